"""weft.train as a user calls it: reproducible, with its events, its start weights, its teacher and its retraining."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from stages import Listed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.data import Data, IterableLoader, Tensors
from weft.engine.losses import accuracy, cross_entropy, mean_squared_error
from weft.engine.optimizer import Optimizer
from weft.errors import CheckpointError, ConsistencyError, StreamError, TrainError
from weft.space import Space
from weft.supernet import Chain, Choice, Shared, initialise
from weft.trainer.config import consistencies, prefers_channels_last
from weft.trainer.evaluate import evaluate, recalibrated
from weft.zoo import digits_mlp

WIDTH, CLASSES = 4, 3


def build() -> Chain:
    space = Space()

    def layer(hidden: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, WIDTH)
        )

    blocks = [
        Choice(space, f"b{i}", {"p": partial(layer, 3), "q": partial(layer, 6), "skip": nn.Identity}) for i in range(2)
    ]
    return Chain(
        Shared(partial(nn.Linear, WIDTH, WIDTH), "stem"), *blocks, Shared(partial(nn.Linear, WIDTH, CLASSES), "head")
    )


def samples(count: int = 48, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, WIDTH, generator=generator)
    return Tensors(x=x, label=(x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def data() -> Data:
    return Data("points", samples(), samples(20, 1))


def sgd(**options: Any) -> Optimizer:
    return Optimizer("sgd", lr=0.05, momentum=0.9, **options)


OPTIONS: dict[str, Any] = {"steps": 6, "batch_size": 8, "stream": "iid", "optimizer": sgd()}


def train(folder: Path, net: Any = build, source: Any = None, **changes: Any) -> weft.TrainedRun:
    return weft.train(net, data() if source is None else source, folder=folder, **{**OPTIONS, **changes})


def events(trained: weft.TrainedRun, kind: str) -> list[dict[str, Any]]:
    return [event for event in trained.run.events.read() if event["event"] == kind]


# -- reproducible


def test_the_same_configuration_gives_the_same_fingerprint_and_another_seed_another(tmp_path: Path) -> None:
    found = [train(tmp_path, seed=seed).fingerprint for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    assert len(found[0]) == 64


def test_the_users_generators_neither_influence_a_run_nor_are_moved_by_it(tmp_path: Path) -> None:
    """Nor are torch's settings for determinism, which a run changes while it lasts."""

    def torch_settings() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory

    found, settings_before = [], torch_settings()
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
        found.append(train(tmp_path, validation=2).fingerprint)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
        assert random.getstate() == before[2]
    assert found[0] == found[1]
    assert torch_settings() == settings_before


def test_what_should_not_matter_does_not(tmp_path: Path) -> None:
    """Workers, checkpoints, validation, metrics and callbacks watch a run and change nothing."""
    plain = train(tmp_path).fingerprint
    others: list[dict[str, Any]] = [
        {"data_workers": 1},
        {"data_workers": 3},
        {"checkpoint_every": 1},
        {"validation": 1, "metrics": {"accuracy": accuracy}},
        {"validation": weft.Validation(2, random=1, bn_batches=0)},
        {"callbacks": [lambda event: torch.randn(3)]},
        {"keep_checkpoints": 1},
    ]
    for other in others:
        assert train(tmp_path, **other).fingerprint == plain, other


def test_what_should_matter_does(tmp_path: Path) -> None:
    base = {**OPTIONS, "steps": 8}
    variants: list[dict[str, Any]] = [
        {},
        {"batch_size": 4},
        {"microbatches": 2},
        {"stream": "fair"},
        {"optimizer": Optimizer("sgd", lr=0.06, momentum=0.9)},
        {"optimizer": sgd(schedule="linear")},
        {"optimizer": sgd(warmup_steps=3)},
        {"optimizer": sgd(clip=0.01)},
        {"precision": "bf16"},
        {"consistency": "delayed(1)"},
        {"consistency": "lagged(2)"},
        {"consistency": "bounded(2,2)"},
        {"consistency": {"shared": "delayed(1)"}},
        {"loss": lambda out, batch: cross_entropy(out, batch) * 2},
    ]
    found = [weft.train(build, data(), folder=tmp_path, **{**base, **variant}).fingerprint for variant in variants]
    assert len(set(found)) == len(variants)


def test_dropout_draws_anew_in_every_step_and_for_every_layer(tmp_path: Path) -> None:
    """Ones through two dropouts: what comes through is the mask itself."""
    seen: list[tuple[float, ...]] = []

    class Mask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.nn.functional.dropout(torch.ones_like(x), 0.5, self.training)
            if self.training:
                seen.append(tuple(mask.flatten().tolist()))
            return mask

    def double() -> Chain:
        return Chain(Shared(Mask, "one"), Shared(Mask, "two"), Shared(partial(nn.Linear, 64, 1), "head"))

    source = {"x": torch.zeros(8, 64), "y": torch.zeros(8, 1)}
    train(tmp_path, double, source, steps=3, batch_size=4, microbatches=2, loss=mean_squared_error)
    assert len(seen) == 12
    assert len(set(seen)) == 12


def test_a_foreign_loader_trains_reproducibly(tmp_path: Path) -> None:
    source = samples()
    pairs = TensorDataset(*source.take(np.arange(48)).values())

    def foreign() -> Data:
        loader = IterableLoader(DataLoader(pairs, batch_size=8, shuffle=True), ("x", "label"))
        return Data("foreign", loader, samples(20, 1))  # type: ignore[arg-type]

    found = [train(tmp_path, source=foreign(), validation=every, steps=14) for every in (None, None, 2)]
    assert found[0].fingerprint == found[1].fingerprint == found[2].fingerprint
    assert train(
        tmp_path,
        source=DataLoader(pairs, batch_size=8),
        loss=lambda out, batch: torch.nn.functional.cross_entropy(out, batch["y"]),
    )


# -- what a run tells


def test_callbacks_see_every_event_that_is_written(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    options = {"checkpoint_every": 2, "validation": 3, "metrics": {"accuracy": accuracy}}
    trained = train(tmp_path, callbacks=[lambda e: seen.append(dict(e))], **options)
    written = list(trained.run.events.read())
    kinds = [e["event"] for e in seen]
    assert kinds == [e["event"] for e in written]
    assert (kinds[0], kinds[-1]) == ("started", "finished")
    assert [kinds.count(kind) for kind in ("step", "checkpoint", "validation")] == [6, 3, 2 * 4]
    for mine, theirs in zip(seen, written, strict=True):
        if mine["event"] in ("step", "validation"):
            assert mine == {key: value for key, value in theirs.items() if key != "time"}
    assert seen[-1]["fingerprint"] == trained.fingerprint


def test_a_steps_event_holds_its_loss_metrics_rate_and_subnets(tmp_path: Path) -> None:
    trained = train(tmp_path, microbatches=2, metrics={"accuracy": accuracy}, optimizer=sgd(warmup_steps=2))
    steps = events(trained, "step")
    assert [e["step"] for e in steps] == list(range(6))
    assert [e["rate"] for e in steps] == [trained.step.optimizer.lr_factor(i, 6) for i in range(6)]
    stream = trained.step.stream
    assert [e["subnets"] for e in steps] == [[s.id for s in stream[i]] for i in range(6)]
    assert all(0 <= e["accuracy"] <= 1 and (e["accuracy"] * 8) % 1 == 0 for e in steps)


def test_validation_scores_named_subnets_with_the_weights_of_that_moment(tmp_path: Path) -> None:
    trained = train(tmp_path, validation=weft.Validation(3, random=2, bn_batches=2), metrics={"accuracy": accuracy})
    validations = events(trained, "validation")
    assert [(e["step"], e["pick"]) for e in validations] == [
        (s, p) for s in (2, 5) for p in ("largest", "smallest", "random0", "random1")
    ]
    assert validations[2]["subnet"] == validations[6]["subnet"]
    loader = weft.Loader(trained.data.train, 8, trained.config.seed)
    batches = [loader.batch(k) for k in range(2)]
    largest = trained.chain.largest()
    with recalibrated(trained.chain, largest, batches):
        scores = evaluate(
            trained.chain, largest, [samples(20, 1).take(np.arange(20))], cross_entropy, {"accuracy": accuracy}
        )
    assert validations[4]["scores"] == scores
    assert validations[0]["scores"] != scores


def test_without_recalibration_validation_uses_the_running_statistics(tmp_path: Path) -> None:
    trained = train(tmp_path, validation=weft.Validation(6, random=0, bn_batches=0))
    validations = events(trained, "validation")
    truth = evaluate(trained.chain, trained.chain.largest(), [samples(20, 1).take(np.arange(20))], cross_entropy)
    assert validations[0]["scores"] == truth


def test_recalibration_is_a_plain_average_for_one_subnet_and_is_undone(tmp_path: Path) -> None:
    chain = train(tmp_path).chain
    before = {name: t.clone() for name, t in chain.state_dict().items()}
    subnet = chain.space.subnet(b0="p", b1="skip")
    batches = [samples(16, 5).take(np.arange(16)), samples(16, 6).take(np.arange(16))]
    norm, momentum = chain.module("b0.p")[1], chain.module("b0.p")[1].momentum
    with torch.no_grad():
        entering = [chain.module("b0.p")[0](chain.module("stem")(batch["x"])) for batch in batches]
    with recalibrated(chain, subnet, batches):
        torch.testing.assert_close(norm.running_mean, (entering[0].mean(0) + entering[1].mean(0)) / 2)
        torch.testing.assert_close(norm.running_var, (entering[0].var(0) + entering[1].var(0)) / 2)
        assert not norm.training
        other = chain.module("b1.p")[1]
        assert torch.equal(other.running_mean, before["b1.p.1.running_mean"])
    assert all(torch.equal(t, before[name]) for name, t in chain.state_dict().items())
    assert norm.momentum == momentum == 0.1
    with pytest.raises(ZeroDivisionError), recalibrated(chain, subnet, batches):
        raise ZeroDivisionError
    assert all(torch.equal(t, before[name]) for name, t in chain.state_dict().items())


def test_evaluation_weights_batches_by_their_sizes() -> None:
    chain = initialise(build).eval()
    subnet = chain.space.first()
    whole = samples(20, 3).take(np.arange(20))
    parts = [{k: v[a:b] for k, v in whole.items()} for a, b in ((0, 3), (3, 4), (4, 20))]
    one = evaluate(chain, subnet, [whole], cross_entropy, {"accuracy": accuracy})
    many = evaluate(chain, subnet, parts, cross_entropy, {"accuracy": accuracy})
    assert one["accuracy"] == many["accuracy"]
    assert one["loss"] == pytest.approx(many["loss"], rel=1e-6)


def test_tensorboard_shows_the_losses_that_the_events_hold(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = weft.TensorBoard(tmp_path / "logs")
    trained = train(tmp_path, validation=3, callbacks=[board])
    shown = accumulator.EventAccumulator(str(tmp_path / "logs")).Reload()
    assert {"train/loss", "train/rate", "validation/largest/loss", "validation/random1/loss"} <= set(
        shown.Tags()["scalars"]
    )
    losses = {e["step"]: np.float32(e["loss"]) for e in events(trained, "step")}
    assert {s.step: np.float32(s.value) for s in shown.Scalars("train/loss")} == losses


# -- where it starts


def test_a_run_starts_from_a_state_dict_a_file_a_run_a_folder_or_a_chain(tmp_path: Path) -> None:
    source = train(tmp_path, run="source")
    state = {name: t.clone() for name, t in source.chain.state_dict().items()}
    file = tmp_path / "weights.safetensors"
    save_file(state, str(file))
    more = {**state, "unknown": torch.ones(2)}
    starts: list[Any] = [state, more, file, str(file), source.run, source.path, source.chain]

    def still(start: Any) -> weft.TrainedRun:
        return train(tmp_path, init_from=start, optimizer=Optimizer("sgd", lr=0.0), steps=1, seed=5)

    found = [still(start) for start in starts]
    for name, tensor in found[0].chain.named_parameters():
        assert torch.equal(tensor, state[name]), name
    assert len({trained.fingerprint for trained in found}) == 1
    part = still({"stem.weight": state["stem.weight"]}).chain.state_dict()
    assert [torch.equal(part[name], state[name]) for name in ("stem.weight", "head.weight")] == [True, False]


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (
            {"stem.bias": torch.ones(4), "head.weight": torch.ones(9, 9)},
            r"shape \(9, 9\), but the supernet has \(3, 4\)",
        ),
        ({"other": torch.ones(1)}, "none of the 1 weights fits"),
        ("absent", "neither a run nor"),
        (__file__, "safetensors"),
    ],
)
def test_start_weights_that_do_not_fit_are_refused(tmp_path: Path, start: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        train(tmp_path, init_from=start)


def test_a_chain_is_trained_in_place(tmp_path: Path) -> None:
    chain = initialise(build, 0)
    before = chain.module("head").weight.detach().clone()
    trained = train(tmp_path, net=chain)
    assert trained.chain is chain
    assert not chain.training
    assert not torch.equal(chain.module("head").weight, before)
    assert trained.fingerprint == train(tmp_path).fingerprint


def test_a_run_can_be_loaded_again_with_its_weights_and_its_configuration(tmp_path: Path) -> None:
    options = {"consistency": {"b0": "delayed(2)"}, "metrics": {"accuracy": accuracy}, "seed": 3}
    trained = train(tmp_path, run="x", optimizer=sgd(warmup_steps=2, clip=0.5), **options)
    loaded = weft.load_run(tmp_path / "x", build, data())
    assert replace(loaded.step, stream=trained.step.stream) == trained.step
    assert [loaded.step.stream[i] for i in range(6)] == [trained.step.stream[i] for i in range(6)]
    for (name, a), b in zip(trained.chain.state_dict().items(), loaded.chain.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


# -- teachers and retraining


def test_a_teachers_outputs_enter_the_loss(tmp_path: Path) -> None:
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(WIDTH, CLASSES), nn.Dropout(0.5))

    def trained(loss: Any) -> weft.TrainedRun:
        return train(tmp_path, loss=loss)

    by_module = trained(weft.Distillation(teacher))
    assert by_module.fingerprint == trained(weft.Distillation(lambda batch: teacher[0](batch["x"]))).fingerprint
    assert by_module.fingerprint == trained(weft.Distillation(teacher, inputs="x")).fingerprint
    assert all(parameter.grad is None for parameter in teacher.parameters())
    found = [trained(loss) for loss in (cross_entropy, weft.Distillation(teacher, weight=0.0))]
    losses = [[e["loss"] for e in events(t, "step")] for t in (*found, by_module)]
    assert losses[0] == pytest.approx(losses[1])
    assert losses[0] != pytest.approx(losses[2])
    with pytest.raises(TrainError, match="the teacher takes image, but the batch has x, "):
        trained(weft.Distillation(teacher, inputs=("image",)))


def test_distillation_is_zero_for_a_student_like_its_teacher() -> None:
    outputs = torch.randn(5, 3)
    alone = weft.Distillation(lambda batch: batch["said"], lambda out, batch: torch.zeros(()), weight=1.0)
    assert float(alone(outputs, {"said": outputs})) == pytest.approx(0.0, abs=1e-6)
    softened = torch.softmax(outputs / 2, -1)
    other = torch.randn(5, 3)
    expected = 4 * (softened * (softened.log() - torch.log_softmax(other / 2, -1))).sum(-1).mean()
    torch.testing.assert_close(alone(other, {"said": outputs}), expected)


def test_a_subnet_is_retrained_from_scratch_or_from_what_it_inherits(tmp_path: Path) -> None:
    trained = train(tmp_path, run="super")
    subnet = trained.chain.space.subnet(b0="q", b1="skip")
    state = {name: t.clone() for name, t in trained.chain.state_dict().items()}
    scratch = weft.retrain(trained, subnet, steps=2)
    heir = weft.retrain(trained, subnet, steps=2, inherit=True, run="heir", optimizer=Optimizer("sgd", lr=0.0))
    assert all(torch.equal(t, state[name]) for name, t in trained.chain.state_dict().items())
    assert scratch.run.name == f"super-{subnet.id}"
    for name, parameter in heir.chain.named_parameters():
        assert torch.equal(parameter, state[name])
    fresh = initialise(build, 0)
    used = {layer.name for layer in fresh.route(subnet)}
    for name in scratch.chain.layers:
        same = all(
            torch.equal(a, b)
            for a, b in zip(scratch.chain.module(name).parameters(), fresh.module(name).parameters(), strict=True)
        )
        assert same == (name not in used or not list(fresh.module(name).parameters()))
    assert [e["subnets"] for e in events(scratch, "step")] == [[subnet.id]] * 2


def test_retraining_keeps_the_settings_of_its_run(tmp_path: Path) -> None:
    kept: dict[str, Any] = {
        "microbatches": 2,
        "optimizer": sgd(clip=0.1, schedule="linear", warmup_steps=2),
        "on_nonfinite": "skip",
        "consistency": "delayed(2)",
        "precision": "bf16",
    }
    trained = train(tmp_path, **kept)
    subnet = trained.chain.space.first()
    again = weft.retrain(trained, subnet, steps=6)
    alone = train(tmp_path, stream=subnet, **kept)
    assert again.fingerprint == alone.fingerprint
    other = weft.retrain(trained, subnet, steps=6, run="other", optimizer=weft.Optimizer(clip=None))
    assert other.fingerprint != alone.fingerprint


# -- sandwiches, chains without a choice, consistencies by name


def test_a_chain_without_a_choice_trains_its_one_subnet(tmp_path: Path) -> None:
    def plain() -> Chain:
        return Chain(Shared(partial(nn.Linear, WIDTH, CLASSES), "only"))

    subnet = plain().space.subnet()
    trained = train(tmp_path, net=plain, validation=3, stream=subnet)
    assert len(events(trained, "step")) == 6
    assert {e["pick"] for e in events(trained, "validation")} == {"largest"}


def test_a_consistency_may_be_given_for_all_for_a_block_a_layer_or_the_shared_ones() -> None:
    def of_layers(consistency: Any, chain: Chain) -> dict[str, str]:
        return {name: str(c) for name, c in consistencies(chain, consistency).items()}

    chain = build()
    assert set(of_layers("lagged(2)", chain).values()) == {"lagged(2)"}
    assert set(of_layers(weft.Lagged(2), chain).values()) == {"lagged(2)"}
    mixed = of_layers({"shared": weft.Delayed(3), "b0": "lagged(2)", "b0.q": "exact"}, chain)
    assert mixed == {
        "stem": "delayed(3)",
        "head": "delayed(3)",
        "b0.p": "lagged(2)",
        "b0.q": "exact",
        "b0.skip": "lagged(2)",
        "b1.p": "exact",
        "b1.q": "exact",
        "b1.skip": "exact",
    }
    with pytest.raises(ConsistencyError, match="did you mean 'b0'"):
        of_layers({"b00": "exact"}, chain)
    # A block may state its consistency, and the run has the last word.
    stating = Chain(Choice(Space(), "b", {"p": nn.Identity}, consistency=weft.Delayed(2)), Shared(nn.Identity, "end"))
    assert of_layers(None, stating)["b.p"] == "delayed(2)"
    assert of_layers("exact", stating)["b.p"] == "exact"


# -- mistakes


class Short(Listed):
    length = 3


SHORT = Short(build().space, [(build().space.first(),)] * 3)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"steps": 0}, TrainError, "1 or more"),
        ({"batch_size": 9, "microbatches": 2}, TrainError, "use a multiple"),
        ({"precision": "fp16"}, TrainError, "fp16"),
        ({"validation": 0}, TrainError, "1 or more"),
        ({"validation": 1, "source": Data("alone", samples())}, TrainError, "needs validation data"),
        ({"stream": "sandwich:2", "microbatches": 2}, TrainError, "set microbatches=4, not 2"),
        ({"on_nonfinite": "skp"}, TrainError, "did you mean 'skip'"),
        ({"distill": True}, TrainError, "must be 'sandwich'"),
        ({"optimizer": "sdg"}, TrainError, "did you mean 'sgd'"),
        ({"stream": "iidd"}, StreamError, "did you mean 'iid'"),
        ({"consistency": "bounded(3,2)", "microbatches": 2}, ConsistencyError, "K = 4"),
        ({"consistency": "bounded(2,9)"}, ConsistencyError, "at most 4"),
        ({"stream": SHORT}, TrainError, "3 steps, fewer than the run's 6"),
        ({"device": "cuda"}, TrainError, "no CUDA device"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_a_mistake_is_refused_before_anything_is_trained(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], match: str
) -> None:
    if change.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    seen: list[str] = []
    with pytest.raises(error, match=match):
        train(tmp_path, callbacks=[lambda e: seen.append(e["event"])], **change)
    assert not seen


# -- what was found later


def test_a_pick_from_a_front_is_retrained_without_naming_its_run(tmp_path: Path) -> None:
    trained = train(tmp_path)
    pick = weft.search(trained, minimize=["loss", "parameters"], budget=4).best()
    by_pick = weft.retrain(pick, steps=2, run="by-pick")
    by_name = weft.retrain(trained, pick.subnet, steps=2, run="by-name")
    assert by_pick.fingerprint == by_name.fingerprint
    with pytest.raises(TrainError, match="a member of a front"):
        weft.retrain(pick.subnet)
    in_place = train(tmp_path, net=initialise(build))
    with pytest.raises(TrainError, match="function that makes the supernet"):
        weft.retrain(in_place, pick.subnet, steps=1)


def test_weights_that_are_not_finite_never_reach_a_checkpoint(tmp_path: Path) -> None:
    class Overflow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * float("inf")

    def loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return Overflow.apply(outputs).sum() * 1e-3

    with pytest.raises(weft.WeftError, match=r"weights of layer '\w+' are not finite before step 1"):
        train(tmp_path, run="x", checkpoint_every=1, loss=loss)
    assert weft.Run.open(tmp_path / "x").checkpoints.steps() == []


# The memory format of images and filters.

Layers = dict[str, Callable[[], nn.Module]]


def pictures() -> Chain:
    """A convolution in one candidate of one block, and nowhere else."""
    layers: Layers = {"conv": partial(nn.Conv2d, 2, 2, 3, padding=1), "skip": nn.Identity}
    head = partial(nn.Linear, 32, 3)
    return Chain(Choice(weft.Space(), "b", layers), Shared(nn.Flatten, "flat"), Shared(head, "head"))


def held_volume() -> nn.Module:
    """torch cannot lay out a chain with volumes with the channels innermost."""
    convolution = nn.Conv2d(2, 2, 1)
    convolution.register_buffer("volume", torch.zeros(1, 1, 1, 1, 1))
    return convolution


def photographs() -> weft.Data:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(24, 2, 4, 4, generator=generator)
    return weft.Data("pictures", weft.Tensors(image=images, label=torch.arange(24) % 3))


@pytest.mark.parametrize(
    ("build", "last"),
    [
        (pictures, True),
        (partial(Chain, Shared(partial(nn.ConvTranspose2d, 2, 2, 2), "up")), True),
        (digits_mlp, False),
        (partial(Chain, Shared(partial(nn.Conv1d, 2, 2, 3), "line")), False),
        (partial(Chain, Shared(partial(nn.Conv2d, 2, 2, 1), "a"), Shared(partial(nn.Conv3d, 2, 2, 1), "b")), False),
        (partial(Chain, Shared(held_volume, "b")), False),
    ],
    ids=["one candidate", "transposed", "digits-mlp", "lines", "images and volumes", "volume held"],
)
def test_channels_are_last_by_default_where_images_are_convolved_on_a_gpu(
    build: Callable[[], Chain], last: bool
) -> None:
    chain = initialise(build)
    assert not prefers_channels_last(chain, "cpu")
    assert prefers_channels_last(chain, "cuda") is prefers_channels_last(chain, "cuda:1") is last


@pytest.mark.parametrize("given", [None, True])
def test_filters_lie_as_the_manifest_says_and_a_retrained_run_keeps_that_unless_told(
    tmp_path: Path, given: bool | None
) -> None:
    trained = train(tmp_path, pictures, photographs(), channels_last=given, steps=2)
    filters = trained.chain.state_dict()["b.conv.weight"]
    assert filters.is_contiguous(memory_format=torch.channels_last) is bool(given)
    subnet = trained.chain.largest()
    other = weft.retrain(trained, subnet, run="other", channels_last=not given)
    runs = (trained, weft.retrain(trained, subnet), other)
    described = [run.run.manifest["train_config"]["channels_last"] for run in runs]
    assert described == [bool(given), bool(given), not given]
