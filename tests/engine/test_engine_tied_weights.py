"""Tied weights, whose copies get the sum of both gradients and never differ; and what stages exchange for them and for
clipping by the global norm: at every cut the same bits."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import stages
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from stages import CPU, TIED, Task, in_stages, make_task, saved_at, sequentially
from torch import Tensor, nn
from torch.func import functional_call

import weft
from weft.engine.losses import cross_entropy
from weft.engine.optimizer import GlobalNorm, Optimizer
from weft.engine.reference import SequentialReference
from weft.errors import SupernetError, TrainError
from weft.pipeline.stage import Stage
from weft.supernet import Chain, Choice, Shared, export, extract, initialise
from weft.trainer.checkpointing import load_initial
from weft.trainer.config import TrainConfig, resolve
from weft.zoo import language_model

BLOCKS = 6
quiet = settings(suppress_health_check=list(HealthCheck))
CUTS = st.sets(st.integers(1, BLOCKS - 1), max_size=BLOCKS - 1).map(lambda cut: tuple(sorted(cut)))
OPTIMIZERS = {"sgd": None, "adamw": Optimizer("adamw", lr=1e-2, weight_decay=0.1), "muon": Optimizer("muon", lr=1e-2)}


def task_of(consistency: str, *, kind: str = "tied", steps: int = 10, m: int = 1, **options: Any) -> Task:
    return make_task(kind, steps=steps, m=m, consistency=consistency, **options)


def started(task: Task, dropout: bool = True) -> SequentialReference:
    run = SequentialReference(task.chain(), task.config, CPU)
    run.train_mode()
    for module in run.chain.modules():
        if isinstance(module, nn.Dropout) and not dropout:
            module.p = 0.0
    return run


def assert_one(chain: nn.Module, when: object = "") -> None:
    for first, second in TIED:
        assert torch.equal(chain.get_parameter(first), chain.get_parameter(second)), (first, when)


# --- by hand


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_under_exact_it_is_a_plain_model_with_one_parameter(optimizer: str) -> None:
    # A large eps: keys have biases whose true gradient is 0, and Adam would blow up what rounding leaves of it.
    kind: Any = torch.optim.SGD
    told = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
    if optimizer == "adamw":
        kind = torch.optim.AdamW
        told = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}
    task = task_of("exact", steps=6, optimizer=Optimizer(kind, **told))
    run = started(task, dropout=False)
    model = extract(run.chain, run.chain.space.subnet(), task.batch(0)).train()
    assert model.get_parameter("out.2.weight") is model.get_parameter("embed.weight")
    theirs = kind(model.parameters(), **told)
    before = model.get_parameter("embed.weight").detach().clone()
    for step in range(6):
        batch = task.batch(step)
        theirs.zero_grad()
        cross_entropy(model(batch["tokens"]), batch).backward()
        for group in theirs.param_groups:
            group["lr"] = told["lr"] * task.config.optimizer.lr_factor(step, 6)
        theirs.step()
        run.step(step, batch)
        assert_one(run.chain, step)
        for name, own in run.chain.named_parameters():
            true = model.get_parameter(dict(map(reversed, TIED)).get(name, name))
            torch.testing.assert_close(own, true, rtol=1e-5, atol=1e-6, msg=f"{name} after step {step}")
    assert not torch.allclose(before, run.chain.get_parameter("embed.weight"), atol=1e-3)


def literal(task: Task, every: int, depth: int) -> dict[str, Tensor]:
    """``stashed`` from the formulas: every version of every parameter is kept, and no code is shared with the engine.
    SGD without momentum or decay."""
    chain, delay, m = task.chain().train(), -(-depth // every), task.config.microbatches
    for module in chain.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    block = {name: layer.block for name, layer in chain.layers.items()}
    names = [name for name, _ in chain.named_parameters()]
    window = {name: depth - block[name.partition(".")[0]] * depth // BLOCKS for name in names}
    versions = {name: [chain.get_parameter(name).detach().clone()] for name in names}
    means: list[dict[str, Tensor]] = []
    total = task.config.steps * m
    partner = dict(TIED) | {second: first for first, second in TIED}
    sums: dict[str, Tensor] = {}
    for n in range(total):
        rows = {key: value.chunk(m)[n % m] for key, value in task.batch(n // m).items()}
        seen = {name: versions[name][max(n + 1 - window[name], 0) // every].requires_grad_() for name in names}
        out = functional_call(chain, seen, (rows, chain.space.subnet()))
        found = torch.autograd.grad(cross_entropy(out, rows) / m, list(seen.values()))
        for name, gradient in zip(names, found, strict=True):
            sums[name] = sums[name] + gradient if name in sums else gradient
        if (n + 1) % every and n + 1 < total:
            continue
        u, steps = n // every, -(-(n + 1 - n // every * every) // m)
        means.append({name: gradient / steps for name, gradient in sums.items()})
        sums = {}
        rate = 0.5 * task.config.optimizer.lr_factor(n // m, task.config.steps)
        for name in names:
            newest = versions[name][-1].detach()
            if name not in partner:
                versions[name].append(newest - rate * means[u][name])
            elif u < delay:
                versions[name].append(newest.clone())
            else:
                both = means[u - delay][name] + means[u - delay][partner[name]]
                versions[name].append(newest - rate * both)
    return {name: own[-1].detach() for name, own in versions.items()}


@pytest.mark.parametrize(("every", "depth", "m", "steps"), [(2, 3, 1, 9), (1, 3, 1, 8), (4, 6, 2, 9), (2, 6, 2, 8)])
def test_an_update_uses_the_gradients_of_the_update_a_delay_before(every: int, depth: int, m: int, steps: int) -> None:
    task = task_of(f"stashed({every}, {depth})", steps=steps, m=m, optimizer=Optimizer("sgd", lr=0.5))
    run = started(task, dropout=False)
    for step in range(steps):
        run.step(step, task.batch(step))
        assert_one(run.chain, step)
    for name, true in literal(task, every, depth).items():
        torch.testing.assert_close(run.chain.get_parameter(name).detach(), true, rtol=1e-4, atol=1e-6, msg=name)


def test_decay_momentum_and_counts_begin_with_the_first_sum() -> None:
    task = task_of("bounded(1, 3)", steps=5, optimizer=OPTIMIZERS["adamw"])
    run = started(task)
    begun = run.chain.get_parameter("embed.weight").detach().clone()
    for step in range(5):
        run.step(step, task.batch(step))
        state = run.optimizer.state(run.optimizer.parameters["out.2.weight"])
        assert float(state["step"]) == step - 2 if step > 2 else not state
        assert torch.equal(begun, run.chain.get_parameter("embed.weight")) == (step < 3)
        assert float(run.optimizer.state(run.optimizer.parameters["out.2.bias"])["step"]) == step + 1


def test_operations_wait_for_the_sums_that_they_must_see_and_no_longer() -> None:
    for consistency, wanted in (("exact", [0, 1, 2, 3, 4]), ("bounded(2, 6)", [0, 0, 0, 0, 1])):
        task = task_of(consistency, steps=8, m=2)
        stage = Stage(task.chain(), task.config, CPU, (1, 3), 0)
        assert [dict(stage.counters("B", 2 * u)).get("ties", 0) for u in range(5)] == wanted
        assert stage.ties is not None
        assert stage.ties.layers == {"embed"}
        between = Stage(task.chain(), task.config, CPU, (1, 2, 4), 1)
        assert between.ties is not None  # it has no copy, and passes on what goes from end to end
        assert not between.ties.layers
        assert between.counters("B", 8) == []


# --- at any cut


@settings(quiet, max_examples=30)
@given(
    kind=st.sampled_from(["tied", "plain"]),
    consistency=st.sampled_from(["exact", "bounded(2, 3)", "bounded(4, 6)", "bounded(2, 6)", "stashed(2, 6)"]),
    optimizer=st.sampled_from(["sgd", "adamw", "muon"]),
    clip=st.sampled_from([None, 0.05, GlobalNorm(0.5)]),
    m=st.sampled_from([1, 2]),
    cut=CUTS,
    max_in_flight=st.integers(1, 8),
    steps=st.integers(1, 9),
    split=st.booleans(),
    stop_after=st.none() | st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_cut_timing_and_early_end_gives_the_bits_of_one_device(
    kind: str,
    consistency: str,
    optimizer: str,
    clip: Any,
    m: int,
    cut: tuple[int, ...],
    max_in_flight: int,
    steps: int,
    split: bool,
    stop_after: int | None,
    seed: int,
) -> None:
    task = task_of(consistency, kind=kind, steps=steps, m=m, optimizer=OPTIMIZERS[optimizer], clip=clip)
    found, _ = in_stages(task, cut, max_in_flight, seed, split=split, stop_after=stop_after)
    alone = sequentially(task, found.steps)
    assert found.losses == alone.losses
    assert found.layers == alone.layers


@settings(quiet, max_examples=15)
@given(
    kind=st.sampled_from(["tied", "plain"]),
    consistency=st.sampled_from(["exact", "bounded(2, 3)", "bounded(1, 3)", "stashed(3, 6)"]),
    clip=st.sampled_from([None, GlobalNorm(0.5)]),
    at=st.integers(1, 3),
    cut=st.sampled_from([(2, 4), (), (1, 2, 3), (1, 2, 3, 4, 5)]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_run_that_goes_on_elsewhere_knows_the_sums_and_norms(
    kind: str, consistency: str, clip: Any, at: int, cut: tuple[int, ...], seed: int
) -> None:
    task = task_of(consistency, kind=kind, steps=12, optimizer=OPTIMIZERS["adamw"], clip=clip)
    running, snapshots = in_stages(task, (2, 4), [3, 2, 1], seed, every=3)
    alone = sequentially(task)
    assert running.layers == alone.layers
    own = [snapshot for snapshot in snapshots if snapshot.at == 3 * at]
    assert len(own) == 3
    assert all(snapshot.norms == own[0].norms for snapshot in own)
    tensors, layers, norms = saved_at(snapshots, 3 * at)
    sums = {name for name in tensors if "~" in name}
    delay = {"exact": 0, "bounded(2, 3)": 2, "bounded(1, 3)": 3, "stashed(3, 6)": 2}[consistency]
    every = {"exact": 1, "bounded(2, 3)": 2, "bounded(1, 3)": 1, "stashed(3, 6)": 3}[consistency]
    assert len(sums) == (4 * min(delay, 3 * at // every) if kind == "tied" else 0)
    for first, second in TIED:
        for name in sums:
            parameter, _, slot = name.partition("~")
            if parameter == first:
                assert torch.equal(tensors[name], tensors[f"{second}~{slot}"])
    resumed, _ = in_stages(task, cut, 6, seed + 1, saved=(tensors, layers, norms), first_step=3 * at)
    assert resumed.layers == alone.layers


# --- what is not a number


def flaky(outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Not a number for half of all micro-batches: of a step the first, the last, both or neither."""
    loss = cross_entropy(outputs, batch)
    return loss * float("nan") if int(batch["targets"][0, 1]) % 2 == 0 else loss


class Spiky(nn.Embedding):
    """For some tokens the gradient of its weight is not a number, though everything else is one."""

    def forward(self, tokens: Tensor) -> Tensor:
        out = super().forward(tokens)
        return out + (self.weight.sum() * 0.0).abs().sqrt() if int(tokens[0, 0]) % 2 else out


def spiky() -> Chain:
    return Chain(Shared(lambda: Spiky(11, 8), "embed"), *stages.plain().blocks[1:], inputs=("tokens",), tie=TIED)


@pytest.mark.parametrize("consistency", ["exact", "bounded(2, 3)", "stashed(2, 6)"])
@pytest.mark.parametrize("clip", [None, 0.1, GlobalNorm(0.1)])
@pytest.mark.parametrize("what", ["losses", "gradients"])
def test_what_is_not_a_number_never_tells_the_copies_apart(
    monkeypatch: pytest.MonkeyPatch, consistency: str, clip: Any, what: str
) -> None:
    monkeypatch.setitem(stages.ALIKE, "tied", (spiky if what == "gradients" else stages.tied, stages.words))
    task = task_of(consistency, steps=10, m=2, clip=clip, on_nonfinite="skip")
    if what == "losses":
        task = replace(task, config=replace(task.config, loss=flaky))
    run = started(task)
    before = run.chain.get_parameter("embed.weight").detach().clone()
    skipped = 0
    for step in range(10):
        skipped += run.step(step, task.batch(step)).skipped
        assert_one(run.chain, step)
    assert (skipped > 0) == (what == "losses")
    assert all(bool(torch.isfinite(p).all()) for p in run.chain.parameters())
    assert not torch.equal(before, run.chain.get_parameter("embed.weight"))
    alone = sequentially(task)
    for cut, seed in (((3,), 1), ((1, 2, 3, 4, 5), 2)):
        assert in_stages(task, cut, 4, seed)[0].layers == alone.layers, cut


# --- the chain itself


def small(**more: Any) -> Callable[[], Chain]:
    sizes = {"vocabulary": 11, "context": 12, "width": 16, "layers": 2, "heads": 2, "dropout": 0.1}
    return partial(language_model, **{**sizes, **more})


def test_both_begin_with_the_first_ones_values_wherever_they_are_built() -> None:
    untied, whole = initialise(small(), 3), initialise(small(tied=True), 3)
    first, second = "tokens.tokens.weight", "head.out.weight"
    assert torch.equal(whole.get_parameter(first), untied.get_parameter(first))
    assert torch.equal(whole.get_parameter(first), whole.get_parameter(second))
    assert not torch.equal(untied.get_parameter(first), untied.get_parameter(second))
    assert whole.get_parameter(first).data_ptr() != whole.get_parameter(second).data_ptr()
    head = initialise(small(tied=True), 3, only=["head"])
    assert torch.equal(head.get_parameter(second), whole.get_parameter(first))
    on_meta = initialise(meta, 3, only=["head"])
    assert torch.equal(on_meta.module("head").weight, initialise(meta, 3).module("embed").weight)
    assert on_meta.module("embed").weight.is_meta


def meta() -> Chain:
    with torch.device("meta"):
        return Chain(
            Shared(nn.Embedding(5, 4), "embed"), Shared(nn.Linear(4, 5), "head"), tie=[("embed.weight", "head.weight")]
        )


def test_an_extracted_model_has_one_parameter_and_goes_on_learning_with_it(tmp_path: Path) -> None:
    chain = initialise(small(tied=True))
    tokens = torch.arange(12).reshape(1, 12) % 11
    plain = extract(chain, chain.space.subnet(), {"tokens": tokens})
    assert plain.get_parameter("head.out.weight") is plain.get_parameter("tokens.tokens.weight")
    assert torch.equal(plain(tokens), chain.eval()(tokens, chain.space.subnet()))
    assert {"head.out.weight", "tokens.tokens.weight"} <= plain.state_dict().keys()
    paths = export(plain, (tokens,), tmp_path, formats=("safetensors", "torch"))
    written = load_file(paths["safetensors"])
    for name in ("head.out.weight", "tokens.tokens.weight"):
        assert torch.equal(written[name], chain.get_parameter(name))


def test_weights_from_elsewhere_fill_both_copies() -> None:
    first, second = "tokens.tokens.weight", "head.out.weight"
    halves, zeros = torch.full((11, 16), 0.5), torch.zeros(11, 16)
    for weights, expected in (
        ({first: halves}, halves),
        ({second: halves}, halves),
        ({first: zeros, second: halves}, zeros),
    ):
        chain = initialise(small(tied=True))
        load_initial(chain, weights)
        assert all(torch.equal(chain.get_parameter(name), expected) for name in (first, second))


@pytest.mark.parametrize(
    ("tie", "words"),
    [
        (["embed.weight"], "a tie is a pair of names"),
        ([("embed.weight", "heda.weight")], "'heda.weight' is in no layer; did you mean 'head'?"),
        ([("embed.weight", "head.wieght")], "layer 'head' has no parameter 'wieght'; did you mean 'weight'?"),
        ([("embed.weight", "head.bias")], "their shape must be the same, not (5, 4) and (5,)"),
        ([("embed.weight", "embed.weight")], "are of one block"),
        ([("embed.weight", "b.one.weight")], "layer 'b.one' is a candidate"),
        ([("embed.weight", "head.weight"), ("head.weight", "last.weight")], "'head.weight' is in two ties"),
        ([("embed.weight", "frozen.weight")], "their requires_grad must be the same, not True and False"),
    ],
)
def test_what_cannot_be_tied_is_refused_in_one_line(tie: Any, words: str) -> None:
    def build() -> Chain:
        space = weft.Space()
        return Chain(
            Shared(lambda: nn.Embedding(5, 4), "embed"),
            Choice(space, "b", {"one": lambda: nn.Linear(4, 4), "two": lambda: nn.Identity()}),
            Shared(lambda: nn.Linear(4, 5), "head"),
            Shared(lambda: nn.Linear(4, 5), "last"),
            Shared(lambda: nn.Linear(4, 5).requires_grad_(False), "frozen"),
            tie=tie,
        )

    with pytest.raises(SupernetError, match=re.escape(words)) as caught:
        initialise(build)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("consistency", ["lagged(2)", "delayed(1)", {"tokens": "exact", "layer0": "bounded(2, 2)"}])
def test_layers_that_are_not_updated_together_cannot_be_tied(consistency: Any) -> None:
    with pytest.raises(TrainError, match=r"'tokens\.tokens\.weight' and 'head\.out\.weight' are tied, which needs one"):
        resolve(TrainConfig(steps=2, consistency=consistency), initialise(small(tied=True)))


def test_options_by_name_are_those_of_the_first() -> None:
    def groups(name: str, parameter: nn.Parameter) -> dict[str, float]:
        return {"weight_decay": 0.5} if name == "embed.weight" else {"lr": 0.01} if name == "out.2.weight" else {}

    task = task_of("exact", steps=4, optimizer=Optimizer("adamw", lr=1e-2, groups=groups))
    run = started(task)
    for step in range(4):
        run.step(step, task.batch(step))
        assert_one(run.chain, step)
    assert in_stages(task, (1, 4), 3)[0].layers == sequentially(task).layers
