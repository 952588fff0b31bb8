"""What capture promises: the program is the model, the graph says what it costs, and a refusal says why."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from plan_models import Model, run_program, transformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from weft.errors import PlanError
from weft.plan.capture import CapturedModel, capture
from weft.plan.graph import Operator
from weft.utils.rng import torch_seeded


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Convolutions with batch norm, in-place operators, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, groups=4, bias=False)
        self.head = nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.ones(8, 1, 1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)), inplace=True)
        x = self.second(x * self.scale)
        x += 1.0
        return self.head(x.mean((2, 3)))


def find(captured: CapturedModel, name: str) -> Operator:
    return captured.graph.operators[captured.op_index[name]]


def assert_runs_as(captured: CapturedModel, model: nn.Module, batch: Tensor) -> None:
    """The program gives the results and the gradients of the model."""
    values, wanted = run_program(captured, model, batch), floats(model(batch))
    found = [values[name] for name in captured.results]
    torch.testing.assert_close(found, wanted)
    gradients = []
    for results in (found, wanted):
        model.zero_grad()
        torch.stack([each.sum() for each in results]).sum().backward()
        gradients.append([weight.grad for weight in model.parameters()])
    torch.testing.assert_close(*gradients)


def floats(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def test_a_perceptron_has_the_graph_that_one_would_draw() -> None:
    captured = capture(Perceptron(), torch.zeros(10, 6), name="perceptron")
    graph = captured.graph
    assert graph.name == "perceptron"
    assert [(entry.name, entry.kind) for entry in graph.operators] == [
        ("p_up_weight", "parameter"),
        ("p_up_bias", "parameter"),
        ("p_down_weight", "parameter"),
        ("input_0", "input"),
        ("linear", "matmul"),
        ("relu", "elementwise"),
        ("linear_1", "matmul"),
    ]
    linear = find(captured, "linear")
    assert [(dim.name, dim.size, dim.parts) for dim in linear.dims] == [("m0", 10, 10), ("n", 8, 8), ("k", 6, 6)]
    assert [(read.source, read.output, read.tensor.dims) for read in linear.reads] == [
        (3, 0, (0, 2)),
        (0, 0, (1, 2)),
        (1, 0, (1,)),
    ]
    assert linear.outputs[0].dims == (0, 1)
    assert linear.flops == 2 * 10 * 8 * 6
    assert linear.moved == 4 * (10 * 6 + 8 * 6 + 8 + 10 * 8)
    assert linear.backward == 1.0  # the input has no gradient
    assert find(captured, "linear_1").backward == 2.0
    assert find(captured, "relu").saved == 4 * 10 * 8  # for itself and for the second product, once
    assert sum(entry.saved for entry in graph.operators) == 4 * 10 * 8
    assert [entry.module for entry in graph.operators[-3:]] == ["up", "", "down"]
    assert graph.notes == ()


def test_parameters_split_freely_and_what_no_parameter_reaches_is_whole() -> None:
    class Masked(Perceptron):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.arange(6, device=x.device).add(1).to(x.dtype).unsqueeze(0)
            return super().forward(x * mask)

    graph = capture(Masked(), torch.zeros(10, 6)).graph
    for entry in graph.operators:
        if entry.kind == "parameter":
            assert [dim.parts for dim in entry.dims] == list(entry.outputs[0].shape)
            assert entry.outputs[0].gradient
    early = graph.operators[: next(place for place, entry in enumerate(graph.operators) if entry.kind == "matmul")]
    rest = [entry for entry in early if entry.kind != "parameter"]
    assert len(rest) >= 4
    for entry in rest:
        assert all(dim.parts == 1 for dim in entry.dims)
        assert not any(tensor.gradient for tensor in entry.outputs)
        assert entry.backward == 0.0
        assert entry.known


@pytest.mark.parametrize("training", [True, False])
def test_a_program_gives_the_outputs_gradients_and_statistics_of_the_model(training: bool) -> None:
    def loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch["label"])

    class Named(Net):
        def forward(self, x: Tensor, label: Tensor) -> Tensor:
            return super().forward(x)

    with torch_seeded("net"):
        model = Named().train(training)
        batch = {"x": torch.randn(4, 3, 6, 6), "label": torch.tensor([0, 1, 2, 4])}
    captured = capture(model, batch, loss=loss)
    assert "forward" not in model.__dict__
    values = run_program(captured, model, batch)
    assert len(captured.results) == 1
    values[captured.results[0]].backward()
    mine = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    whole = loss(model(**batch), batch)
    whole.backward()
    assert torch.equal(values[captured.results[0]], whole)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            torch.testing.assert_close(mine[name], weight.grad)
        else:
            assert mine[name] is None
            node = next(node for node, own in captured.parameters.items() if own == name)
            assert not find(captured, node).outputs[0].gradient
    assert set(captured.mutated.values()) == (
        {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"} if training else set()
    )
    state = dict(model.named_buffers())
    for node, name in captured.mutated.items():
        torch.testing.assert_close(values[node], state[name])
    assert any(entry.kind == "batch_norm" for entry in captured.graph.operators) == training


def test_the_batch_comes_as_it_is_given() -> None:
    def run(model: Any, x: Tensor, flag: bool, y: Tensor, missing: Tensor | None = None) -> Tensor:
        return model.own(x) - y if flag and missing is None else x

    x, model = torch.randn(4, 6), Model(run, own=nn.Linear(6, 6))
    for given, other in (
        ((x, True, x, None), (x, True, 2 * x, None)),
        ({"y": x, "x": x, "flag": True}, {"y": 2 * x, "x": x, "flag": True}),
    ):
        # x and y are one tensor when it is captured, and two later: they must not become one input
        captured = capture(model, given)
        assert set(captured.inputs.values()) == ({"x", "y"} if isinstance(given, dict) else {0, 2})
        assert torch.equal(run_program(captured, model, other)[captured.results[0]], run(model, x, True, 2 * x))


def test_tied_weights_are_one_parameter() -> None:
    for device in ("cpu", "meta"):
        with torch.device(device):
            words, head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        head.weight = words.weight
        model = Model(lambda model, x: model.head(model.words(x)), words=words, head=head)
        captured = capture(model, torch.zeros(4, 3, dtype=torch.long))
        weights = [place for place, entry in enumerate(captured.graph.operators) if entry.kind == "parameter"]
        assert len(weights) == 1
        assert sum(read.source == weights[0] for entry in captured.graph.operators for read in entry.reads) == 2
        assert len(captured.tied) == 1
        embedding = find(captured, "embedding")
        assert [(dim.name, dim.parts) for dim in embedding.dims] == [("i0", 4), ("i1", 3), ("d", 6), ("v", 1)]


def test_nothing_is_computed_drawn_or_changed() -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with torch.device("meta"):
        big = nn.Sequential(nn.Linear(2**20, 2**20), nn.Dropout(0.5))
    captured = capture(big, torch.zeros(2, 2**20))
    capture(model, torch.zeros(2, 3, 6, 6))
    assert torch.equal(torch.get_rng_state(), state)
    assert sum(entry.flops for entry in captured.graph.operators) > 2 * 2 * 2.0**40
    assert [entry.kind for entry in captured.graph.operators].count("random") == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(weight.grad is None for weight in model.parameters())


def test_no_gradient_flows_through_what_is_detached() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            aim = model.other(x).tanh()
        return F.mse_loss(model.own(x), aim)

    model = Model(run, own=nn.Linear(6, 6), other=nn.Linear(6, 6))
    captured = capture(model, torch.randn(4, 6))
    trained = {
        captured.parameters[entry.name]
        for entry in captured.graph.operators
        if entry.kind == "parameter" and entry.outputs[0].gradient
    }
    assert trained == {"own.weight", "own.bias"}
    run_program(captured, model, torch.randn(4, 6))[captured.results[0]].backward()
    assert {name for name, weight in model.named_parameters() if weight.grad is not None} == trained


@pytest.mark.parametrize("name", ["net", "llama", "resnet"])
def test_costs_are_what_torch_counts(name: str) -> None:
    if name == "net":
        model, batch = Net(), torch.randn(4, 3, 6, 6)
    else:
        model, batch = transformer(name)
    captured = capture(model, batch)
    kept: dict[int, Tensor] = {}
    given = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    own = {value.data_ptr() for value in (*model.parameters(), *model.buffers(), *given)}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        FlopCounterMode(display=False) as counter,
    ):
        output = model(**batch) if isinstance(batch, dict) else model(batch)
    # The counter knows products and convolutions, but not the attention of a CPU.
    products = sum(entry.flops for entry in captured.graph.operators if entry.kind in ("matmul", "conv"))
    assert products == counter.get_total_flops()
    measured = sum(t.untyped_storage().nbytes() for data, t in kept.items() if data not in own)
    saved = sum(entry.saved for entry in captured.graph.operators)
    assert saved == pytest.approx(measured, rel=0.1)
    values = run_program(captured, model, batch)
    for mine, whole in zip((values[node] for node in captured.results), floats(output), strict=True):
        assert mine.shape == whole.shape


def test_attention_costs_two_products() -> None:
    own = nn.Parameter(torch.randn(2, 4, 6, 8))
    model = Model(lambda model, x: F.scaled_dot_product_attention(model.own, x, x), own=own)
    entry = capture(model, torch.randn(2, 4, 10, 8)).graph.operators[-1]
    assert entry.flops == 2 * (2 * 2 * 4 * 6 * 10 * 8)


class Branch(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if out.sum() > 0:
            return out * 2
        return out


class Shaped(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out[out > 0]


class Numbers(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(x.mean())


class Masked(Perceptron):
    """Needs its mask, though the signature says otherwise."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.blocks(super().forward(x), mask)

    def blocks(self, x: Tensor, which: Tensor | None) -> Tensor:
        return x.reshape(*which.shape, -1)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kind", "batch", "reason"),
    [
        (Branch, torch.randn(4, 6), r"Branch cannot be captured .*data-dependent control flow.*`if out.sum\(\) > 0:`"),
        (Shaped, torch.randn(4, 6), r"shape of 'index' \(aten.index\) depends on data, at `return out\[out > 0\]`"),
        (Numbers, torch.randn(4, 6), r"data-dependent control flow.*float\(x.mean\(\)\)"),
        (Perceptron, torch.randn(4, 5), r"\[4, 5\].*`return self.down\(torch.relu\(self.up\(x\)\)\)`"),
        (Masked, {"x": torch.randn(4, 6)}, r"'mask' is None where blocks needs a tensor .*`return x.reshape.*give it"),
        (Perceptron, 3, "not int"),
        (Perceptron, (None, 2), "holds no tensor"),
        (Perceptron, {"x": [torch.zeros(4, 6)]}, "'x' is list"),
    ],
)
def test_what_cannot_be_captured_is_refused_with_its_line_and_nothing_is_printed(
    kind: type[nn.Module], batch: Any, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PlanError, match=reason):
        capture(kind(), batch)
    assert capfd.readouterr() == ("", "")


def test_a_loss_with_parameters_is_refused() -> None:
    loss = Model(lambda loss, output, batch: loss.weight * output.sum(), weight=nn.Parameter(torch.ones(())))
    with pytest.raises(PlanError, match="make it part of the model"):
        capture(Perceptron(), torch.randn(4, 6), loss=loss)


def test_layers_that_are_dropped_at_random_are_kept_and_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        for layer in model.layers:
            if model.training and torch.rand([]) < 0.9:
                continue
            x = layer(x)
        return x

    model = Model(run, layers=nn.ModuleList(nn.Linear(6, 6) for _ in range(3)))
    with caplog.at_level(logging.WARNING, "weft"):
        captured = capture(model, torch.randn(4, 6))
    assert captured.method == "deterministic export"
    assert "never dropped" in caplog.text
    assert any("never dropped" in note for note in captured.graph.notes)
    assert any("data-dependent control flow" in note for note in captured.graph.notes)
    assert sum(entry.kind == "matmul" for entry in captured.graph.operators) == 3
    assert capture(model.eval(), torch.randn(4, 6)).graph.notes == ()


def test_data_of_a_tensor_is_captured_as_detached() -> None:
    class Data(Perceptron):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out + out.data

    model, x = Data(), torch.randn(4, 6)
    captured = capture(model, x)
    assert captured.method == "deterministic export"
    assert captured.graph.notes
    assert_runs_as(captured, model, x)


def test_an_autograd_function_of_the_users_is_named() -> None:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return gradients[0]

    class Rounded(Perceptron):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Straight.apply(super().forward(x))
            return out

    apply = torch.autograd.Function.__dict__["apply"]
    captured = capture(Rounded(), torch.randn(4, 6))
    assert any("Straight" in note for note in captured.graph.notes)
    assert torch.autograd.Function.__dict__["apply"] is apply


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_what_it_computes(reentrant: bool) -> None:
    class Checkpointed(Perceptron):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.down, self.up(x), use_reentrant=reentrant)
            return out

    model, x = Checkpointed(), torch.randn(4, 6)
    captured = capture(model, x)
    parameters = [entry for entry in captured.graph.operators if entry.kind == "parameter"]
    assert [entry.outputs[0].gradient for entry in parameters] == [True] * 3
    assert_runs_as(captured, model, x)


def test_an_operator_without_a_rule_is_whole_counted_and_named() -> None:
    model = Model(lambda model, x: torch.linalg.inv(model.own) @ x, own=nn.Parameter(torch.eye(4)))
    graph = capture(model, torch.randn(4, 6)).graph
    assert len(graph.unknown) == 1
    (target,) = graph.unknown
    assert "linalg_inv" in target
    entry = next(entry for entry in graph.operators if not entry.known)
    assert all(dim.parts == 1 for dim in entry.dims)
    assert entry.outputs[0].gradient


@pytest.mark.parametrize("both", [False, True])
def test_what_reads_the_states_of_an_lstm_is_captured_in_the_shapes_that_it_has(both: bool) -> None:
    def run(model: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, (state, cell) = model.layers(x)
        return model.head(state[-1]), state, cell

    layers = nn.LSTM(5, 4, num_layers=2, batch_first=True, bidirectional=both)
    model, batch = Model(run, layers=layers, head=nn.Linear(4, 3)), torch.randn(6, 7, 5)
    captured = capture(model, batch)
    assert captured.method == "export"
    wanted = model(batch)
    found = {
        node.name: tuple(node.meta["val"].shape)
        for node in captured.program.graph.nodes
        if node.name in captured.results
    }
    assert [found[name] for name in captured.results] == [tuple(value.shape) for value in wanted]
    assert_runs_as(captured, model, batch)
