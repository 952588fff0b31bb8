"""Fingerprints: every weight, every state and every loss counts, and nothing else does."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from stages import make_engine
from torch import Tensor, nn

from weft.engine.layer_state import fingerprint, layer_digest, layer_tensors, tensors_digest
from weft.engine.optimizer import Optimizer
from weft.space import Space
from weft.supernet import Chain, Choice, Shared
from weft.trainer.metrics_log import LossDigest


def tensors() -> dict[str, Tensor]:
    return {
        "a.weight": torch.arange(6.0).view(2, 3),
        "a.bias": torch.zeros(3),
        "a.count": torch.tensor(7),
        "b.half": torch.ones(2, dtype=torch.bfloat16),
        "b.flag": torch.tensor([True, False]),
        "b.none": torch.zeros(0),
    }


def test_every_element_name_type_and_shape_counts() -> None:
    base = tensors_digest(tensors())
    seen = {base}
    for name, tensor in tensors().items():
        for index in range(tensor.numel()):
            changed = tensors()
            flat = changed[name].view(-1)
            flat[index] = ~flat[index] if tensor.dtype is torch.bool else flat[index] + 1
            seen.add(tensors_digest(changed))
    assert len(seen) == 1 + sum(t.numel() for t in tensors().values())
    assert tensors_digest({**tensors(), "a.weight": torch.arange(6.0).view(3, 2)}) not in seen
    assert tensors_digest({**tensors(), "a.count": torch.tensor(7, dtype=torch.int32)}) not in seen
    assert tensors_digest({("x" if k == "a.bias" else k): v for k, v in tensors().items()}) not in seen
    assert tensors_digest({k: v for k, v in tensors().items() if k != "b.none"}) not in seen
    assert tensors_digest({"a": torch.tensor(0.0)}) != tensors_digest({"a": torch.tensor(-0.0)})


def test_order_and_layout_in_memory_do_not_count() -> None:
    base = tensors()
    turned = dict(reversed(base.items()))
    turned["a.weight"] = base["a.weight"].t().contiguous().t()
    assert not turned["a.weight"].is_contiguous()
    assert tensors_digest(turned) == tensors_digest(base)


@given(st.lists(st.floats(width=32), max_size=5), st.lists(st.floats(width=32), max_size=5))
def test_losses_are_chained_in_order_and_can_go_on_from_a_checkpoint(before: list[float], after: list[float]) -> None:
    whole = LossDigest()
    whole.add(before + after)
    first = LossDigest()
    first.add(before)
    second = LossDigest(first.value)
    second.add(after)
    assert whole.value == second.value


def test_every_loss_and_every_layer_counts() -> None:
    def digest(losses: list[float], layers: dict[str, str]) -> str:
        found = LossDigest()
        found.add(losses)
        return fingerprint(layers, found.value)

    base = {"a": "1", "b": "2", "c": "3"}
    others = [*({**base, name: "9"} for name in base), {"a": "1", "b": "2"}]
    seen = {digest(losses, base) for losses in ([1.0, 2.0], [2.0, 1.0], [1.0], [1.0, 2.5])}
    seen |= {digest([1.0, 2.0], other) for other in others}
    assert len(seen) == 8
    assert digest([1.0, 2.0], base) == digest([1.0, 2.0], dict(reversed(base.items())))


def test_a_layers_digest_covers_weights_buffers_and_optimizer_state() -> None:
    space = Space()
    layer = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    chain = Chain(Choice(space, "b", {"p": layer}), Shared(nn.Identity(), "end"))
    sequential = make_engine(chain, [space.first()] * 2, optimizer=Optimizer("adamw", lr=0.01))
    sequential.step(0, {"x": torch.randn(4, 3), "y": torch.randn(4, 3)})
    weights = sequential.weights["b.p"]
    names = set(layer_tensors(weights, sequential.optimizer))
    assert names >= {
        "b.p.0.weight",
        "b.p.0.bias",
        "b.p.1.running_mean",
        "b.p.1.num_batches_tracked",
        "b.p.0.weight#exp_avg",
        "b.p.0.weight#step",
    }
    sequential.eval_mode()
    seen = {layer_digest(weights, sequential.optimizer)}
    for tensor in layer_tensors(weights, sequential.optimizer).values():
        with torch.no_grad():
            tensor.add_(1)
        seen.add(layer_digest(weights, sequential.optimizer))
    assert len(seen) == 1 + len(names)
