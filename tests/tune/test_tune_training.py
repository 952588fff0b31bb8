"""The training of one trial: the same result whatever happens to it on the way."""

from __future__ import annotations

import copy
import datetime
import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import weft
from weft.data import Data, Tensors
from weft.engine.losses import cross_entropy
from weft.errors import CheckpointError, TuneError
from weft.nn.checkpointing import recompute, recomputed_parts
from weft.nn.state import SAVED, from_plain, to_plain
from weft.runs import Checkpoints
from weft.runs.shards import DTYPES
from weft.tune.jobs import Fit
from weft.tune.recipe import SMALL, Recipe, resident, trial_config
from weft.tune.training.checkpoint import TrialCheckpoint, load_latest, save
from weft.tune.training.trainer import Pruned, train
from weft.utils.rng import generator, get_rng_state, seed


def mlp(params):
    width = params.get("width", 12)
    rows = [nn.Linear(6, width), nn.GELU(), nn.Dropout(params.get("drop", 0.0)), nn.Linear(width, 3)]
    return nn.Sequential(*rows)


def normed(params):
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def blobs(count=96):
    drawn = generator(0, "blobs")
    label = drawn.integers(0, 3, count)
    x = drawn.normal(size=(count, 6)) + label[:, None]
    whole = {"x": torch.tensor(x, dtype=torch.float32), "label": torch.tensor(label)}
    cut = 2 * count // 3
    train, held = ({name: t[rows] for name, t in whole.items()} for rows in (slice(cut), slice(cut, None)))
    return Data("blobs", Tensors(**train), Tensors(**held))


RECIPE = Recipe(
    model=mlp,
    data=blobs,
    metrics={"accuracy": weft.accuracy},
    objectives=("accuracy", "loss"),
    steps=12,
    batch_size=16,
    optimizer_options={"lr": 0.01},
    report_every=4,
)


def way(name, micro, batch=16):
    return Fit(name, micro, -(-batch // micro), 1, 0, None, "a test says so")


def run(recipe, params, folder, fit=None, memory=None, prune_at=None):
    told = []

    def report(step, values):
        told.append((step, values))
        return step == prune_at

    result = train(trial_config(recipe, params), fit, device="cpu", memory=memory, directory=folder, report=report)
    return result, told


def plain_loop(recipe, params):
    """The same training as torch's own tutorials write it; no dropout, no micro-batches."""
    own = trial_config(recipe, params)
    model, data = own.build(), own.data()
    optimizer = own.optimizer.cls(model.parameters(), **own.optimizer.options)
    base = optimizer.param_groups[0]["lr"]
    loader, losses = weft.Loader(data.train, own.batch_size, own.seed), []
    for step in range(own.steps):
        batch = loader.batch(step)
        loss = F.cross_entropy(model(batch["x"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = base * own.lr_schedule(step, own.steps)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        batch = next(iter(weft.Loader(data.validation, len(data.validation), 0, shuffle=False).all()))
        out = model(batch["x"])
        return losses, (out.argmax(1) == batch["label"]).double().mean().item(), F.cross_entropy(out, batch["label"])


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "rmsprop"])
def test_a_trial_trains_as_a_plain_loop_does(optimizer, tmp_path):
    recipe = replace(RECIPE, optimizer=optimizer, lr_schedule="cosine", warmup_steps=3)
    result, told = run(recipe, {}, tmp_path)
    losses, accuracy, loss = plain_loop(recipe, {})
    torch.testing.assert_close(torch.tensor(result.losses), torch.tensor(losses), rtol=1e-5, atol=1e-6)
    assert result.values[0] == pytest.approx(accuracy)
    assert result.values[1] == pytest.approx(loss.item(), rel=1e-5)
    assert [step for step, _ in told] == [4, 8, 12]
    assert told[-1][1] == result.values
    assert result.losses[-1] < result.losses[0]


@pytest.mark.parametrize("micro", [1, 5, 8, 15])
def test_accumulated_gradients_are_those_of_the_whole_batch(micro, tmp_path):
    whole, _ = run(RECIPE, {}, tmp_path / "whole")
    cut, _ = run(RECIPE, {}, tmp_path / "cut", way("accumulate", micro))
    torch.testing.assert_close(torch.tensor(cut.losses), torch.tensor(whole.losses), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.tensor(cut.values), torch.tensor(whole.values), rtol=1e-4, atol=1e-5)


def test_a_last_smaller_micro_batch_counts_by_its_size(tmp_path):
    seen = []

    def loss(outputs, batch):
        if torch.is_grad_enabled():
            seen.append(len(batch["label"]))
        return cross_entropy(outputs, batch)

    run(replace(RECIPE, steps=1, loss=loss, report_every=None), {}, tmp_path, way("accumulate", 7))
    assert seen == [7, 7, 2]


@pytest.mark.parametrize("fit", [way("recompute", 16), way("offload", 16)])
@pytest.mark.parametrize("model", [mlp, normed])
def test_saving_memory_changes_no_bit(fit, model, tmp_path):
    recipe = replace(RECIPE, model=model)
    alone, told = run(recipe, {"drop": 0.3}, tmp_path / "alone")
    saved, same = run(recipe, {"drop": 0.3}, tmp_path / "saved", fit)
    limited, also = run(recipe, {"drop": 0.3}, tmp_path / "limited", fit, memory=10**8)
    assert saved.losses == alone.losses == limited.losses
    assert told == same == also
    assert 0 < limited.peak < 10**8


def test_recomputing_counts_the_statistics_of_a_norm_once():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), torch.randn(8, 4)
    other = copy.deepcopy(model)
    recompute(model)
    for _ in range(3):
        model(x).sum().backward()
        other(x).sum().backward()
    for mine, its in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, its)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)


def test_the_row_that_is_recomputed_has_most_layers_and_the_smallest_members():
    body = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.ReLU()) for _ in range(5))
    assert recomputed_parts(nn.Sequential(nn.Embedding(10**4, 9), nn.Sequential(nn.Identity(), body))) == list(body)
    lonely = nn.Linear(3, 3)
    assert recomputed_parts(lonely) == [lonely]
    two = nn.ModuleDict({"body": nn.ModuleDict({"a": lonely, "b": nn.ReLU()}), "heads": nn.Sequential(lonely, lonely)})
    assert recomputed_parts(two) == [two]


def test_an_operator_without_a_deterministic_kernel_is_named(tmp_path):
    def loss(outputs, batch):
        torch.empty(3).put_(torch.tensor([0]), torch.ones(1), accumulate=False)
        return cross_entropy(outputs, batch)

    with pytest.raises(TuneError, match=r"'put_' has no deterministic kernel on cpu.*replace it in the model"):
        run(replace(RECIPE, loss=loss), {}, tmp_path)


class Killed(Exception):
    """Stands for the end of a process, between two steps."""


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 11),
    st.sampled_from(["adamw", "sgd"]),
    st.sampled_from([None, 5]),
    st.sampled_from([None, way("accumulate", 5), way("recompute", 16)]),
)
def test_a_trial_that_is_killed_goes_on_from_its_checkpoint_to_the_same_bits(
    tmp_path_factory, when, optimizer, every, fit
):
    recipe = replace(
        RECIPE, optimizer=optimizer, optimizer_options={"lr": 0.05}, checkpoint_every=every, lr_schedule="linear"
    )
    params = {"drop": 0.3, **({"momentum": 0.9} if optimizer == "sgd" else {})}
    alone, told = run(recipe, params, tmp_path_factory.mktemp("alone"), fit)
    folder, calls = tmp_path_factory.mktemp("killed"), []

    def loss(outputs, batch):
        if torch.is_grad_enabled():
            calls.append(len(calls))
            if len(calls) > when * (1 if fit is None else fit.microbatches):
                raise Killed
        return cross_entropy(outputs, batch)

    with pytest.raises(Killed):
        run(replace(recipe, loss=loss), params, folder, fit)
    resumed, again = run(recipe, params, folder, fit)
    assert resumed.losses == alone.losses
    assert resumed.values == alone.values
    assert [one for one in told if one not in again] == told[: len(told) - len(again)]
    first = when // (every or 4) * (every or 4)
    assert [step for step, _ in again] == [step for step in (4, 8, 12) if step > first]


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    alone, _ = run(RECIPE, {}, tmp_path / "alone")
    with pytest.raises(Pruned):
        run(replace(RECIPE, checkpoint_every=2), {}, tmp_path / "hurt", prune_at=8)
    newest = max((tmp_path / "hurt" / "checkpoints").rglob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-9])
    resumed, told = run(replace(RECIPE, checkpoint_every=2), {}, tmp_path / "hurt")
    assert resumed.losses == alone.losses
    assert [step for step, _ in told] == [8, 12]


def test_a_finished_trial_is_not_trained_again_and_its_checkpoint_is_not_anothers(tmp_path):
    alone, told = run(RECIPE, {}, tmp_path)

    def never(outputs, batch):
        raise AssertionError("trained again")

    again, also = run(replace(RECIPE, loss=never), {}, tmp_path)
    assert (again.values, again.losses) == (alone.values, alone.losses)
    assert also == told[-1:]
    with pytest.raises(AssertionError, match="trained again"):
        run(replace(RECIPE, loss=never), {"lr": 0.1}, tmp_path)


def test_a_pruned_trial_ends_at_once_with_its_result_so_far(tmp_path):
    alone, told = run(RECIPE, {}, tmp_path / "alone")
    with pytest.raises(Pruned) as caught:
        run(RECIPE, {}, tmp_path / "pruned", prune_at=8)
    assert caught.value.result.values == told[1][1]
    assert caught.value.result.losses == alone.losses[:8]
    done, _ = run(RECIPE, {}, tmp_path / "late", prune_at=12)  # the answer to the last report comes too late
    assert done.values == alone.values


def test_nothing_drawn_elsewhere_changes_a_trial(tmp_path):
    first, _ = run(RECIPE, {"drop": 0.5}, tmp_path / "a")
    state = torch.default_generator.get_state()
    torch.manual_seed(99)
    before = torch.default_generator.get_state()
    second, _ = run(RECIPE, {"drop": 0.5}, tmp_path / "b")
    assert torch.equal(before, torch.default_generator.get_state())
    torch.default_generator.set_state(state)
    assert first.losses == second.losses
    other, _ = run(RECIPE, {"drop": 0.5, "seed": 1}, tmp_path / "c")
    assert first.losses != other.losses


class Noisy(nn.Module):
    """Draws from Python's and NumPy's global generators, which nobody should use, when it is built and as it runs."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Sequential(*(NoisyRow() for _ in range(3)), nn.Linear(6, 3))

    def forward(self, x):
        return self.rows(x)


class NoisyRow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6), random.random()

    def forward(self, x):
        return self.linear(x) * (self.scale + float(np.random.rand()) + random.random())  # noqa: NPY002


def noisy(params):
    return Noisy()


@pytest.mark.parametrize("fit", [None, way("accumulate", 5), way("recompute", 16), way("offload", 16)])
def test_what_a_model_draws_on_the_host_follows_from_the_trial_also_after_a_crash(fit, tmp_path):
    recipe = replace(RECIPE, model=noisy)
    alone, told = run(recipe, {}, tmp_path / "alone", fit)
    seed(99)
    before = get_rng_state()
    with pytest.raises(Pruned):
        run(recipe, {}, tmp_path / "killed", fit, prune_at=8)
    assert get_rng_state() == before
    resumed, again = run(recipe, {}, tmp_path / "killed", fit)
    assert resumed.losses == alone.losses
    assert again == told[1:]
    other, _ = run(recipe, {"seed": 1}, tmp_path / "other", fit)
    assert alone.losses != other.losses
    if fit is not None and fit.strategy != "accumulate":
        assert alone.losses == run(recipe, {}, tmp_path / "whole")[0].losses


def test_batch_norms_refuse_micro_batches_unless_asked_for(tmp_path):
    recipe = replace(RECIPE, model=normed)
    with pytest.raises(TuneError, match=r"batch norm '1' would see 8 samples at a time of a batch of 16"):
        run(recipe, {}, tmp_path, way("accumulate", 8))
    result, _ = run(replace(recipe, microbatch_batchnorm=True), {}, tmp_path, way("accumulate", 8))
    assert len(result.losses) == 12


def test_a_loss_that_is_not_a_number_is_reported_as_it_is(tmp_path):
    result, told = run(replace(RECIPE, optimizer="sgd"), {"lr": 1e30}, tmp_path)
    assert math.isnan(result.values[1])
    assert all(math.isnan(values[1]) for _, values in told)
    again, _ = run(replace(RECIPE, optimizer="sgd"), {"lr": 1e30}, tmp_path)
    assert math.isnan(again.values[1])


class Skipping(nn.Module):
    """Leaves one of its layers out of every other forward, as stochastic depth does."""

    def __init__(self):
        super().__init__()
        self.ends = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 3)])
        self.sometimes = nn.Linear(6, 6)
        self.count = 0

    def forward(self, x):
        self.count += 1
        x = self.ends[0](x)
        return self.ends[1](self.sometimes(x) if self.count % 2 == 0 else x)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_weights_without_a_gradient_stay_as_they_are_in_that_step(optimizer, tmp_path):
    params = {"momentum": 0.9} if optimizer == "sgd" else {}
    recipe = replace(
        RECIPE, model=lambda _: Skipping(), optimizer=optimizer, optimizer_options={"lr": 0.1}, report_every=None
    )
    result, _ = run(recipe, params, tmp_path)
    losses, _, _ = plain_loop(recipe, params)
    torch.testing.assert_close(torch.tensor(result.losses), torch.tensor(losses), rtol=1e-5, atol=1e-6)


def test_bf16_computes_in_bf16_and_keeps_its_weights_wide(tmp_path):
    seen = set()

    def loss(outputs, batch):
        seen.add(outputs.dtype)
        return cross_entropy(outputs.float(), batch)

    result, _ = run(replace(RECIPE, precision="bf16", loss=loss), {}, tmp_path)
    assert seen == {torch.bfloat16}
    wide, _ = run(RECIPE, {}, tmp_path / "wide")
    assert result.losses != wide.losses
    torch.testing.assert_close(torch.tensor(result.losses), torch.tensor(wide.losses), rtol=0.1, atol=0.05)


def test_small_data_in_memory_is_kept_on_a_device_and_counted_once_however_it_is_split():
    whole = blobs()
    assert resident(whole) == 96 * (6 * 4 + 8)
    cut = weft.data.split(whole.train, (0.5, 0.5), 0)
    assert resident(Data("halves", *cut)) == 64 * (6 * 4 + 8)
    assert resident(weft.data.text(8)) > 0
    large = Tensors(x=torch.empty(SMALL // 4 + 1, dtype=torch.float32))
    assert resident(Data("large", large)) == 0
    assert resident(Data("foreign", weft.data.adapt([(1, 2), (3, 4)]))) == 0


def test_what_cannot_be_trained_is_refused(tmp_path):
    with pytest.raises(TuneError, match="'bare' has none: split some off it"):
        run(replace(RECIPE, data=Data("bare", blobs().train)), {}, tmp_path)
    with pytest.raises(TuneError, match=r"one number, not \(16,\)"):
        run(replace(RECIPE, loss=lambda out, batch: out.sum(1)), {}, tmp_path)
    with pytest.raises(TuneError, match="split over 2 devices"):
        run(RECIPE, {}, tmp_path, replace(way("split", 16), devices=2))


def test_a_part_that_the_model_holds_in_evaluation_mode_stays_so(tmp_path):
    built = []

    def model(params):
        module = normed(params)
        module[1].eval()
        built.append(module)
        return module

    run(replace(RECIPE, model=model), {}, tmp_path)
    assert built[-1].training
    assert not built[-1][1].training
    assert torch.equal(built[-1][1].running_mean, torch.zeros(8))


class Beyond(nn.Module):
    """Two layers, and a state between them that is no weight."""

    def __init__(self):
        super().__init__()
        self.ends = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 3)])
        self.inner = self.made()

    def made(self):
        return nn.Identity()

    def forward(self, x):
        return self.ends[1](self.between(self.ends[0](x)))


class Hidden(Beyond):
    """A buffer that the state_dict does not have."""

    def made(self):
        inner = nn.Identity()
        inner.register_buffer("mean", torch.zeros(8), persistent=False)
        return inner

    def between(self, x):
        if self.training:
            self.inner.mean.mul_(0.5).add_(x.detach().mean(0))
        return x - self.inner.mean


class Late(Beyond):
    """Buffers that the first forward makes, or makes larger."""

    def made(self):
        inner = nn.Identity()
        inner.register_buffer("first", None)
        inner.register_buffer("hidden", None, persistent=False)
        inner.register_buffer("mean", torch.zeros(1))
        return inner

    def between(self, x):
        if self.inner.first is None:
            self.inner.first = self.inner.hidden = x.detach().mean(0)
        if self.training:
            self.inner.mean = self.inner.mean + x.detach().mean(0)
        return x - self.inner.first + self.inner.hidden * self.inner.mean


class Counting(Beyond):
    """Numbers, a text, a list and a tensor, as attributes of parts."""

    def made(self):
        inner = nn.Identity()
        inner.count, inner.rate, inner.odd, inner.name = 0, 1.0, False, ""
        inner.past, inner.last = [(0, 1.0)], torch.zeros(8)
        return inner

    def between(self, x):
        inner = self.inner
        if self.training:
            inner.count, inner.rate, inner.odd = inner.count + 1, inner.rate / 3 + 0.1, not inner.odd
            inner.name = (inner.name + "a")[-3:]
            inner.past = [*inner.past[-2:], (inner.count, inner.rate)]
            inner.last = inner.last / 2 + x.detach().mean(0)
        factor = 1 + inner.rate * (inner.count % 3) + len(inner.name) + inner.past[0][1]
        return (-x if inner.odd else x - inner.last) * factor


class Extra(Beyond):
    """What it counts is an extra state."""

    def __init__(self, state=None):
        super().__init__()
        self.state = [state or {"count": 0, "rate": float("-inf"), 3: (True, torch.zeros(8))}]

    def get_extra_state(self):
        return self.state[0]

    def set_extra_state(self, state):
        self.state[0] = state

    def between(self, x):
        if self.training:
            mean = self.state[0][3][1] / 2 + x.detach().mean(0)
            self.state[0] = {"count": self.state[0]["count"] + 1, "rate": float("-inf"), 3: (True, mean)}
        return x * (self.state[0]["count"] % 3 + 1) - self.state[0][3][1]


class Lazy(nn.Module):
    """Layers that are made in the first step."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Dropout(0.2), nn.LazyLinear(3))

    def forward(self, x):
        return self.body(x)


class Complex(Beyond):
    """A complex weight and buffer, and an attribute and a number that are complex too."""

    def made(self):
        inner = nn.Identity()
        inner.weight = nn.Parameter(torch.polar(torch.ones(8), torch.arange(8.0)))
        inner.register_buffer("mean", torch.zeros(8, dtype=torch.complex64))
        inner.register_buffer("hidden", torch.zeros((), dtype=torch.complex128), persistent=False)
        inner.last, inner.turn = torch.zeros(8, dtype=torch.complex64).conj(), 1j
        return inner

    def between(self, x):
        inner = self.inner
        if self.training:
            mean = (x * inner.weight).detach().mean(0)
            inner.mean.mul_(0.5).add_(mean)
            inner.hidden.add_(mean.sum())
            inner.last, inner.turn = (inner.last.conj() + mean).conj(), inner.turn * (0.6 + 0.8j)
        return (x * inner.weight - inner.mean + inner.last * inner.turn + inner.hidden).to(torch.complex64).abs()


@pytest.mark.parametrize("model", [Hidden, Late, Counting, Extra, Lazy, Skipping, Complex])
def test_a_trial_whose_model_is_more_than_its_weights_goes_on_to_the_same_bits(model, tmp_path):
    recipe = replace(
        RECIPE, model=lambda params: model(), optimizer="sgd", optimizer_options={"lr": 0.01}, checkpoint_every=3
    )
    alone, told = run(recipe, {"momentum": 0.9}, tmp_path / "alone")
    for when in (4, 8):  # twice, so that what was put back is kept again

        def report(step, values, when=when):
            if step == when:
                raise Killed
            return False

        with pytest.raises(Killed):
            train(
                trial_config(recipe, {"momentum": 0.9}), None, device="cpu", directory=tmp_path / "cut", report=report
            )
    resumed, again = run(recipe, {"momentum": 0.9}, tmp_path / "cut")
    assert resumed.losses == alone.losses
    assert again == told[1:]


def test_of_a_plain_model_nothing_but_its_weights_is_kept(tmp_path):
    run(replace(RECIPE, model=normed), {}, tmp_path)
    kept = Checkpoints(tmp_path / "checkpoints").load()
    assert set(kept.meta) == {"law", "values"}  # as always: older checkpoints are these
    assert {name.split(".")[0] for name in kept.tensors} == {"weights", "losses"}


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
def test_complex_tensors_come_back_from_a_checkpoint_with_every_bit(dtype, tmp_path):
    parts = torch.randn(4, 3, 2, dtype=torch.float64).to(torch.zeros(0, dtype=dtype).real.dtype)
    parts[0, 0], parts[1, 1, 0] = torch.tensor([-0.0, float("inf")]), float("nan")
    value = torch.view_as_complex(parts)
    given = {"plain": value, "turned": value.T.conj(), "one": value[2, 2].conj(), "none": value[:0], "real": parts}
    state = {"weight": {"momentum": value.conj(), "step": torch.tensor(3.0)}}
    save(tmp_path, {}, TrialCheckpoint(1, given, state, torch.zeros(1)))
    found = load_latest(tmp_path, {})
    assert found.weights.keys() == given.keys()
    pairs = [(found.weights[name], tensor) for name, tensor in given.items()]
    for there, wanted in (*pairs, (found.states["weight"]["momentum"], value.conj())):
        assert (there.dtype, there.shape) == (wanted.dtype, wanted.shape)
        there, wanted = (one.resolve_conj().contiguous().flatten().view(torch.uint8) for one in (there, wanted))
        assert torch.equal(there, wanted)


def test_an_extra_state_that_would_have_to_be_pickled_is_refused(tmp_path):
    class Refused(Extra):
        def get_extra_state(self):
            return {"when": [datetime.date(2026, 1, 1)]}

    with pytest.raises(CheckpointError, match=r"'_extra_state' of the model's state_dict: .* cannot hold a date: "):
        run(replace(RECIPE, model=lambda params: Refused()), {}, tmp_path)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.complex_numbers(allow_nan=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.integers() | st.text(), inner),
        max_leaves=8,
    )
)
def test_a_plain_value_comes_back_from_json_as_it_was(value):
    told = json.loads(json.dumps(to_plain(value, {}, ""), allow_nan=False))
    assert repr(from_plain(told, {}, torch.device("cpu"))) == repr(value)


def test_the_types_that_attributes_are_saved_in_are_those_of_checkpoints_and_complex_ones() -> None:
    assert {kind for kind in SAVED if not kind.is_complex} == DTYPES.keys()
