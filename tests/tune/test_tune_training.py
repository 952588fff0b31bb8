"""The training of one trial: the same result whatever happens to it on the way."""

from __future__ import annotations

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
from networks import Between, conv, mlp
from torch import nn
from torch.nn import functional as F
from trials import Killed, config_of, few, fit_of, run, saved

import weft
from weft.data import Data, Tensors
from weft.engine.losses import cross_entropy
from weft.errors import CheckpointError, TuneError
from weft.nn.checkpointing import recomputed_parts
from weft.nn.state import SAVED, from_plain, to_plain
from weft.runs.shards import DTYPES
from weft.tune.recipe import SMALL, resident
from weft.tune.training.checkpoint import TrialCheckpoint, load_latest, save
from weft.tune.training.trainer import Pruned
from weft.utils.rng import get_rng_state, seed

RECOMPUTE, OFFLOAD = fit_of(strategy="recompute"), fit_of(strategy="offload")


class Skipping(Between):
    """Leaves one of its layers out of every other forward, as stochastic depth does."""

    def prepare(self, params):
        self.sometimes, self.count = nn.Linear(16, 16), 0

    def between(self, x):
        self.count += 1
        return self.sometimes(x) if self.count % 2 == 0 else x


def plain_loop(own):
    """The same training as torch's own tutorials write it; no micro-batches."""
    model, data = own.build(), own.data()
    optimizer = own.optimizer.cls(model.parameters(), **own.optimizer.options)
    base = optimizer.param_groups[0]["lr"]
    loader, losses = weft.Loader(data.train, own.batch_size, own.seed), []
    for step in range(own.steps):
        batch = loader.batch(step)
        loss = F.cross_entropy(model(batch["image"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = base * own.lr_schedule(step, own.steps)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        batch = data.validation.take(np.arange(len(data.validation)))
        out = model(batch["image"])
        return losses, (out.argmax(1) == batch["label"]).double().mean().item(), F.cross_entropy(out, batch["label"])


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [(mlp, "adamw"), (mlp, "sgd"), (mlp, "rmsprop"), (Skipping, "adamw")],
)
def test_a_trial_trains_as_a_plain_loop_does(model, optimizer, tmp_path):
    params = {"dropout": 0.0, **({"momentum": 0.9} if optimizer == "sgd" else {})}
    every = 4 if model is mlp else None  # evaluations are forwards, too
    config = config_of(model, params, optimizer=optimizer, lr_schedule="cosine", warmup_steps=3, report_every=every)
    result, told = run(config, tmp_path)
    losses, accuracy, loss = plain_loop(config)
    torch.testing.assert_close(torch.tensor(result.losses), torch.tensor(losses), rtol=1e-5, atol=1e-6)
    assert result.losses[-1] < result.losses[0]
    assert told[-1] == (12, result.values)
    if model is mlp:
        assert result.values == pytest.approx((accuracy, loss.item()), rel=1e-5)
        assert [step for step, _ in told] == [4, 8, 12]


@pytest.mark.parametrize(("micro", "sizes"), [(1, [1] * 16), (7, [7, 7, 2]), (15, [15, 1])])
def test_accumulated_gradients_are_those_of_the_whole_batch(micro, sizes, tmp_path):
    seen = []

    def loss(outputs, batch):
        if torch.is_grad_enabled():
            seen.append(len(batch["label"]))
        return cross_entropy(outputs, batch)

    config = config_of(mlp, {"dropout": 0.0})
    whole, _ = run(config, tmp_path / "whole")
    cut, _ = run(replace(config, loss=loss), tmp_path / "cut", fit_of(micro))
    assert seen == sizes * config.steps
    torch.testing.assert_close(torch.tensor(cut.losses), torch.tensor(whole.losses), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.tensor(cut.values), torch.tensor(whole.values), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fit", [RECOMPUTE, OFFLOAD])
@pytest.mark.parametrize("model", [mlp, conv])
def test_saving_memory_changes_no_bit(fit, model, tmp_path):
    config = config_of(model)
    alone, told = run(config, tmp_path / "alone")
    limited, same = run(config, tmp_path / "limited", fit, memory=10**8)
    assert limited.losses == alone.losses == run(config, tmp_path / "saved", fit)[0].losses
    assert told == same
    assert 0 < limited.peak < 10**8
    kept = saved(tmp_path / "limited")  # with statistics of norms, which count each forward once
    assert {name.split(".")[0] for name in kept} == {"weights", "losses"}  # as always: older checkpoints are these
    assert all(torch.equal(tensor, kept[name]) for name, tensor in saved(tmp_path / "alone").items())


def test_the_row_that_is_recomputed_has_most_layers_and_the_smallest_members():
    body = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.ReLU()) for _ in range(5))
    assert recomputed_parts(nn.Sequential(nn.Embedding(10**4, 9), nn.Sequential(nn.Identity(), body))) == list(body)
    lonely = nn.Linear(3, 3)
    assert recomputed_parts(lonely) == [lonely]
    two = nn.ModuleDict({"body": nn.ModuleDict({"a": lonely, "b": nn.ReLU()}), "heads": nn.Sequential(lonely, lonely)})
    assert recomputed_parts(two) == [two]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 11),
    st.sampled_from(["adamw", "sgd"]),
    st.sampled_from([None, 5]),
    st.sampled_from([None, fit_of(5), RECOMPUTE]),
)
def test_a_trial_that_is_killed_goes_on_from_its_checkpoint_to_the_same_bits(
    tmp_path_factory, when, optimizer, every, fit
):
    params = {"dropout": 0.3, **({"momentum": 0.9} if optimizer == "sgd" else {})}
    config = config_of(mlp, params, optimizer=optimizer, checkpoint_every=every, lr_schedule="linear")
    alone, told = run(config, tmp_path_factory.mktemp("alone"), fit)
    folder, calls = tmp_path_factory.mktemp("killed"), []

    def loss(outputs, batch):
        if torch.is_grad_enabled():
            calls.append(len(calls))
            if len(calls) > when * (1 if fit is None else fit.microbatches):
                raise Killed
        return cross_entropy(outputs, batch)

    with pytest.raises(Killed):
        run(replace(config, loss=loss), folder, fit)
    resumed, again = run(config, folder, fit)
    assert (resumed.losses, resumed.values) == (alone.losses, alone.values)
    first = when // (every or 4) * (every or 4)
    assert again == [one for one in told if one[0] > first]


def test_a_finished_trial_is_not_trained_again_and_its_checkpoint_is_not_anothers(tmp_path):
    def never(outputs, batch):
        raise AssertionError("trained again")

    alone, told = run(config_of(mlp), tmp_path)
    again, also = run(config_of(mlp, loss=never), tmp_path)
    assert (again.values, again.losses) == (alone.values, alone.losses)
    assert also == told[-1:]
    with pytest.raises(AssertionError, match="trained again"):
        run(config_of(mlp, {"lr": 0.1}, loss=never), tmp_path)


def test_a_pruned_trial_ends_at_once_with_its_result_so_far(tmp_path):
    alone, told = run(config_of(mlp), tmp_path / "alone")
    with pytest.raises(Pruned) as caught:
        run(config_of(mlp), tmp_path / "pruned", prune_at=8)
    assert caught.value.result.values == told[1][1]
    assert caught.value.result.losses == alone.losses[:8]
    done, _ = run(config_of(mlp), tmp_path / "late", prune_at=12)  # the answer to the last report comes too late
    assert done.values == alone.values


class NoisyRow(nn.Module):
    """Draws from Python's and NumPy's global generators, which nobody should use, when it is built and as it runs."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(16, 16), random.random()

    def forward(self, x):
        return self.linear(x) * (self.scale + float(np.random.rand()) + random.random())  # noqa: NPY002


def noisy(params):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), NoisyRow(), NoisyRow(), nn.Dropout(0.2), nn.Linear(16, 10))


@pytest.mark.parametrize("fit", [None, fit_of(5), RECOMPUTE])
def test_what_is_drawn_follows_from_the_trial_alone_also_after_a_crash_and_moves_no_generator(fit, tmp_path):
    config = config_of(noisy)
    alone, told = run(config, tmp_path / "alone", fit)
    seed(99)
    torch.manual_seed(99)
    before = get_rng_state(), torch.default_generator.get_state()
    with pytest.raises(Pruned):
        run(config, tmp_path / "killed", fit, prune_at=8)
    assert get_rng_state() == before[0]
    assert torch.equal(torch.default_generator.get_state(), before[1])
    resumed, again = run(config, tmp_path / "killed", fit)
    assert resumed.losses == alone.losses
    assert again == told[1:]
    assert alone.losses != run(config_of(noisy, {"seed": 1}), tmp_path / "other", fit)[0].losses
    if fit is RECOMPUTE:
        assert alone.losses == run(config, tmp_path / "whole")[0].losses


def test_batch_norms_refuse_micro_batches_unless_asked_for(tmp_path):
    with pytest.raises(TuneError, match=r"batch norm '1' would see 8 samples"):
        run(config_of(conv), tmp_path, fit_of(8))
    result, _ = run(config_of(conv, microbatch_batchnorm=True), tmp_path, fit_of(8))
    assert len(result.losses) == 12


def test_a_loss_that_is_not_a_number_is_reported_as_it_is(tmp_path):
    for _ in range(2):  # and once more from the checkpoint of its end
        result, told = run(config_of(mlp, {"lr": 1e30}, optimizer="sgd"), tmp_path)
        assert math.isnan(result.values[1])
        assert all(math.isnan(values[1]) for _, values in told)


def test_bf16_computes_in_bf16_and_keeps_its_weights_wide(tmp_path):
    seen = set()

    def loss(outputs, batch):
        seen.add(outputs.dtype)
        return cross_entropy(outputs.float(), batch)

    result, _ = run(config_of(mlp, precision="bf16", loss=loss), tmp_path)
    wide, _ = run(config_of(mlp), tmp_path / "wide")
    assert seen == {torch.bfloat16}
    assert result.losses != wide.losses
    torch.testing.assert_close(torch.tensor(result.losses), torch.tensor(wide.losses), rtol=0.1, atol=0.05)
    assert saved(tmp_path)["weights.1.weight"].dtype == torch.float32


def test_small_data_in_memory_is_kept_on_a_device_and_counted_once_however_it_is_split():
    part = Tensors(x=torch.zeros(64, 6), label=torch.zeros(64, dtype=torch.long))
    assert resident(Data("halves", *weft.data.split(part, (0.5, 0.5), 0))) == 64 * (6 * 4 + 8)
    assert resident(Data("two", part, Tensors(x=torch.zeros(2, 6)))) == 64 * (6 * 4 + 8) + 2 * 6 * 4
    assert resident(weft.data.text(8)) > 0
    assert resident(Data("large", Tensors(x=torch.empty(SMALL // 4 + 1)))) == 0
    assert resident(Data("foreign", weft.data.adapt([(1, 2), (3, 4)]))) == 0


def not_deterministic(outputs, batch):
    torch.empty(3).put_(torch.tensor([0]), torch.ones(1), accumulate=False)
    return cross_entropy(outputs, batch)


@pytest.mark.parametrize(
    ("fields", "fit", "word"),
    [
        ({"data": Data("bare", few().train)}, None, "'bare' has none: split some off it"),
        ({"loss": lambda out, batch: out.sum(1)}, None, r"one number, not \(16,\)"),
        ({"loss": not_deterministic}, None, "'put_' has no deterministic kernel on cpu"),
        ({}, replace(fit_of(strategy="split"), devices=2), "split over 2 devices"),
    ],
)
def test_what_cannot_be_trained_is_refused(fields, fit, word, tmp_path):
    with pytest.raises(TuneError, match=word):
        run(config_of(mlp, **fields), tmp_path, fit)


def test_a_part_that_the_model_holds_in_evaluation_mode_stays_so(tmp_path):
    built = []

    def model(params):
        built.append(conv(params))
        built[-1][1].eval()
        return built[-1]

    run(config_of(model), tmp_path)
    assert built[-1].training
    assert not built[-1][1].training
    assert torch.equal(built[-1][1].running_mean, torch.zeros(4))


# Models with a state between their layers that is no weight.


class Stateful(Between):
    """Buffers that no state_dict has or that the first forward makes, attributes, and complex ones of all."""

    def prepare(self, params):
        part = self.inner = nn.Identity()
        part.register_buffer("hidden", torch.zeros(16), persistent=False)
        part.register_buffer("late", None, persistent=False)
        part.register_buffer("first", None)
        part.register_buffer("mean", torch.zeros(1))
        part.register_buffer("turned", torch.zeros((), dtype=torch.complex128), persistent=False)
        part.weight = nn.Parameter(torch.polar(torch.ones(16), torch.arange(16.0)))
        part.count, part.rate, part.odd, part.name, part.turn = 0, 1.0, False, "", 1j
        part.past, part.last = [(0, 1.0)], torch.zeros(16, dtype=torch.complex64).conj()

    def between(self, x):
        part, mean = self.inner, x.detach().mean(0)
        if part.first is None:
            part.first = part.late = mean
        if self.training:
            part.hidden.mul_(0.5).add_(mean)
            part.mean = part.mean + mean
            part.turned.add_((mean * part.weight.detach()).sum())
            part.count, part.rate, part.odd = part.count + 1, part.rate / 3 + 0.1, not part.odd
            part.name, part.turn = (part.name + "a")[-3:], part.turn * (0.6 + 0.8j)
            part.past = [*part.past[-2:], (part.count, part.rate)]
            part.last = (part.last.conj() / 2 + mean * part.weight.detach()).conj()
        x = x - part.hidden - part.first + part.late * part.mean
        x = (-x if part.odd else x) * (1 + part.rate * (part.count % 3) + len(part.name) + part.past[0][1])
        return (x * part.weight + part.last * part.turn + part.turned).to(torch.complex64).abs()


class Extra(Between):
    """What it counts is an extra state."""

    def prepare(self, params):
        self.state = [{"count": 0, "rate": float("-inf"), 3: (True, torch.zeros(16))}]

    def get_extra_state(self):
        return self.state[0]

    def set_extra_state(self, state):
        self.state[0] = state

    def between(self, x):
        if self.training:
            mean = self.state[0][3][1] / 2 + x.detach().mean(0)
            self.state[0] = {"count": self.state[0]["count"] + 1, "rate": float("-inf"), 3: (True, mean)}
        return x * (self.state[0]["count"] % 3 + 1) - self.state[0][3][1]


def lazy(params):
    """Layers that are made in the first step."""
    body = [nn.Flatten(), nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Dropout(0.2), nn.LazyLinear(10)]
    return nn.Sequential(*body)


@pytest.mark.parametrize("model", [Stateful, Extra, lazy, Skipping])
def test_a_trial_whose_model_is_more_than_its_weights_goes_on_to_the_same_bits(model, tmp_path):
    config = config_of(model, {"momentum": 0.9}, optimizer="sgd", checkpoint_every=3)
    alone, told = run(config, tmp_path / "alone")
    for when in (4, 8):  # twice, so that what was put back is kept again
        with pytest.raises(Killed):
            run(config, tmp_path / "cut", kill_at=when)
    resumed, again = run(config, tmp_path / "cut")
    assert resumed.losses == alone.losses
    assert again == told[1:]


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

    with pytest.raises(CheckpointError, match=r"'_extra_state' .* cannot hold a date"):
        run(config_of(Refused), tmp_path)


@settings(max_examples=40)
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


def test_the_types_that_attributes_are_saved_in_are_those_of_checkpoints_and_complex_ones():
    assert {kind for kind in SAVED if not kind.is_complex} == DTYPES.keys()
