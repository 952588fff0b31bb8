"""What capture promises: the program is the model, the graph says what it costs, and a refusal says why."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
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
    return captured.graph.operators[captured.places[name]]


def placeholders(captured: CapturedModel, model: nn.Module, batch: Any) -> dict[str, Any]:
    """A tensor for each placeholder of the program: parameters and buffers, constants, and the batch's tensors."""
    own, state = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers(remove_duplicate=False))
    return {
        **{node: own[name] for node, name in captured.parameters.items()},
        **{node: state[name] for node, name in captured.buffers.items()},
        **captured.constants,
        **{node: batch if isinstance(batch, Tensor) else batch[key] for node, key in captured.inputs.items()},
    }


def run(captured: CapturedModel, model: nn.Module, batch: Any) -> dict[str, Any]:
    values = placeholders(captured, model, batch)
    for node in captured.program.graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: values[source.name])
            values[node.name] = node.target(*args, **kwargs)
    return values


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
    assert graph.results == (6,)
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
    values = run(captured, model, batch)
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
    kinds = {entry.kind for entry in captured.graph.operators}
    assert ("batch_norm" in kinds) == training


def test_the_batch_comes_as_it_is_given() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(6, 6)

        def forward(self, x: Tensor, flag: bool, y: Tensor, missing: Tensor | None = None) -> Tensor:
            return self.own(x) - y if flag and missing is None else x

    x = torch.randn(4, 6)
    with torch_seeded("two"):
        model = Two()
    for given, other in (
        ((x, True, x, None), (x, True, 2 * x, None)),
        ({"y": x, "x": x, "flag": True}, {"y": 2 * x, "x": x, "flag": True}),
    ):
        # x and y are one tensor when it is captured, and two later: they must not become one input
        captured = capture(model, given)
        assert set(captured.inputs.values()) == ({"x", "y"} if isinstance(given, dict) else {0, 2})
        assert torch.equal(run(captured, model, other)[captured.results[0]], model.own(x) - 2 * x)


def test_tied_weights_are_one_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.words(x))

    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Tied()
        captured = capture(model, torch.zeros(4, 3, dtype=torch.long))
        weights = [place for place, entry in enumerate(captured.graph.operators) if entry.kind == "parameter"]
        assert len(weights) == 1
        assert sum(read.source == weights[0] for entry in captured.graph.operators for read in entry.reads) == 2
        assert len(captured.tied) == 1
        embedding = find(captured, "embedding")
        assert [(dim.name, dim.parts) for dim in embedding.dims] == [("i0", 4), ("i1", 3), ("d", 6), ("v", 1)]


def test_results_of_one_node_are_outputs_of_one_operator() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.own(x).chunk(2, -1)
            return left * right.sigmoid()

    captured = capture(Halves(), torch.zeros(4, 6))
    place = next(place for place, entry in enumerate(captured.graph.operators) if entry.target.startswith("aten.split"))
    assert len(captured.graph.operators[place].outputs) == 2
    reads = [(read.source, read.output) for entry in captured.graph.operators for read in entry.reads]
    assert (place, 0) in reads
    assert (place, 1) in reads
    items = [node for node in captured.program.graph.nodes if "getitem" in node.name]
    assert [captured.values[node.name] for node in items] == [(place, 0), (place, 1)]
    assert all(node.name not in captured.places for node in items)


def test_nothing_is_computed_drawn_or_changed() -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with torch.device("meta"):
        big = nn.Sequential(nn.Linear(2**20, 2**20), nn.Dropout(0.5))
    captured = capture(big, torch.zeros(2, 2**20))
    capture(model, torch.zeros(2, 3, 6, 6))
    assert torch.equal(torch.get_rng_state(), state)
    assert captured.graph.flops > 2 * 2 * 2.0**40
    assert [entry.kind for entry in captured.graph.operators].count("random") == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(weight.grad is None for weight in model.parameters())


def test_no_gradient_flows_through_what_is_detached() -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                aim = self.other(x).tanh()
            return F.mse_loss(self.own(x), aim)

    model = Teacher()
    captured = capture(model, torch.randn(4, 6))
    trained = {
        captured.parameters[entry.name]
        for entry in captured.graph.operators
        if entry.kind == "parameter" and entry.outputs[0].gradient
    }
    assert trained == {"own.weight", "own.bias"}
    run(captured, model, torch.randn(4, 6))[captured.results[0]].backward()
    assert {name for name, weight in model.named_parameters() if weight.grad is not None} == trained


def small_model(name: str) -> tuple[nn.Module, Any]:
    if name == "net":
        return Net(), torch.randn(4, 3, 6, 6)
    transformers = pytest.importorskip("transformers")
    words = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    tokens = {"input_ids": torch.randint(3, 40, (4, 8)), "labels": torch.randint(3, 40, (4, 8)), "use_cache": False}
    if name == "gpt2":
        gpt = transformers.GPT2Config(
            **words, n_embd=32, n_layer=2, n_head=4, n_positions=32, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0
        )
        return transformers.GPT2LMHeadModel(gpt), tokens
    if name == "llama":
        llama = transformers.LlamaConfig(
            **words,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
        )
        return transformers.LlamaForCausalLM(llama), tokens
    resnet = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1])
    images = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.tensor([0, 1, 0, 1])}
    return transformers.ResNetForImageClassification(resnet), images


@pytest.mark.parametrize("name", ["net", "gpt2", "llama", "resnet"])
def test_costs_are_what_torch_counts(name: str) -> None:
    with torch_seeded(name):
        model, batch = small_model(name)
    captured = capture(model, batch)
    kept: dict[int, Tensor] = {}
    own = {value.data_ptr() for value in (*model.parameters(), *model.buffers(), *floats_and_ints(batch))}

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
    values = run(captured, model, batch)
    for mine, whole in zip((values[node] for node in captured.results), floats(output), strict=True):
        assert mine.shape == whole.shape


def floats_and_ints(batch: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def test_attention_costs_two_products() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.randn(2, 4, 6, 8))

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(self.own, x, x)

    entry = capture(Attention(), torch.randn(2, 4, 10, 8)).graph.operators[-1]
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


def test_a_branch_on_data_is_named_with_its_line() -> None:
    with pytest.raises(
        PlanError, match=r"Branch cannot be captured .*data-dependent control flow.*`if out.sum\(\) > 0:`"
    ):
        capture(Branch(), torch.randn(4, 6))


def test_a_shape_that_depends_on_data_is_named_with_its_operator() -> None:
    with pytest.raises(
        PlanError, match=r"the shape of 'index' \(aten.index\) depends on data, at `return out\[out > 0\]`"
    ):
        capture(Shaped(), torch.randn(4, 6))


def test_a_model_that_cannot_run_says_what_and_where(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PlanError, match=r"\[4, 5\].*`return self.down\(torch.relu\(self.up\(x\)\)\)`"):
        capture(Perceptron(), torch.randn(4, 5))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("batch", "reason"),
    [(3, "not int"), ((None, 2), "holds no tensor"), ({"x": [torch.zeros(4, 6)]}, "'x' is list")],
)
def test_a_batch_that_is_none_is_refused(batch: Any, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        capture(Perceptron(), batch)


def test_a_loss_with_parameters_is_refused() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, output: Tensor, batch: Tensor) -> Tensor:
            return self.weight * output.sum()

    with pytest.raises(PlanError, match="make it part of the model"):
        capture(Perceptron(), torch.randn(4, 6), loss=Loss())


def test_layers_that_are_dropped_at_random_are_kept_and_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if self.training and torch.rand([]) < 0.9:
                    continue
                x = layer(x)
            return x

    model = Dropped()
    with caplog.at_level(logging.WARNING, "weft"):
        captured = capture(model, torch.randn(4, 6))
    assert captured.method == "export of a settled model"
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
    assert captured.method == "export of a settled model"
    assert captured.graph.notes
    torch.testing.assert_close(run(captured, model, x)[captured.results[0]], model(x))


def test_a_number_that_is_read_from_a_tensor_is_refused_with_its_line() -> None:
    class Numbers(Perceptron):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(x.mean())

    with pytest.raises(PlanError, match=r"data-dependent control flow.*float\(x.mean\(\)\)"):
        capture(Numbers(), torch.randn(4, 6))


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
    run(captured, model, x)[captured.results[0]].sum().backward()
    mine = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    for gradient, weight in zip(mine, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, weight.grad)


def test_an_operator_without_a_rule_is_whole_counted_and_named() -> None:
    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.eye(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.inv(self.own) @ x

    graph = capture(Inverse(), torch.randn(4, 6)).graph
    assert len(graph.unknown) == 1
    (target,) = graph.unknown
    assert "linalg_inv" in target
    entry = next(entry for entry in graph.operators if not entry.known)
    assert all(dim.parts == 1 for dim in entry.dims)
    assert entry.outputs[0].gradient


@pytest.mark.parametrize("both", [False, True])
def test_what_reads_the_states_of_an_lstm_is_captured_in_the_shapes_that_it_has(both: bool) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LSTM(5, 4, num_layers=2, batch_first=True, bidirectional=both)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            _, (state, cell) = self.layers(x)
            return self.head(state[-1]), state, cell

    model, batch = Last(), torch.randn(6, 7, 5)
    captured = capture(model, batch)
    assert captured.method == "export"
    wanted = model(batch)
    found = {
        node.name: tuple(node.meta["val"].shape)
        for node in captured.program.graph.nodes
        if node.name in captured.results
    }
    assert [found[name] for name in captured.results] == [tuple(value.shape) for value in wanted]
    values = run(captured, model, batch)
    for name, whole in zip(captured.results, wanted, strict=True):
        torch.testing.assert_close(values[name], whole)


class Masked(nn.Module):
    """Needs its mask, though the signature says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Perceptron()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.blocks(self.inner(x), mask)

    def blocks(self, x: Tensor, which: Tensor | None) -> Tensor:
        return x.reshape(*which.shape, -1)  # type: ignore[union-attr]


def test_an_input_that_is_missing_is_named_with_what_needs_it() -> None:
    batch = {"x": torch.randn(4, 6)}
    with pytest.raises(PlanError, match=r"'mask' is None where blocks needs a tensor .*`return x.reshape.*give it in"):
        capture(Masked(), batch)
    assert capture(Masked(), {**batch, "mask": torch.ones(2, 2)}).method == "export"
