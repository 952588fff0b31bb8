"""Pretrained transformers made elastic: a model of the ``transformers`` package as a chain with its weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weft.errors import SupernetError
from weft.space import Space
from weft.supernet.elastic.leaf import Module
from weft.supernet.elastic.mixture import Pick
from weft.supernet.elastic.sizes import Dim, Sizes

if TYPE_CHECKING:
    from weft.supernet.chain import Chain

PerLayer = Dim | Sequence[Dim] | None


def elastic(
    model: nn.Module,
    space: Space,
    *,
    depth: Dim | None = None,
    width: Dim | None = None,
    heads: PerLayer = None,
    kv_heads: PerLayer = None,
    hidden: PerLayer = None,
) -> Chain:
    """The model as a chain that takes token ids, or images, and gives logits: its largest pick has those of the model,
    on the CPU to the last bit (of ``use_cache=False``: the cache of keys changes the model's own rounding).

    What is not given is fixed at the model's own size; of what is given the largest must be just that. ``heads``,
    ``kv_heads`` and ``hidden``, the size within the perceptrons, may be lists with an entry for each layer. A subnet
    uses the first layers, features and heads. The model is left as it is: its weights are copied, tied ones apart from
    each other, and its attention is computed as its own configuration says. Chains take no padding masks and drop no
    attention weights. Raises SupernetError for models other than GPT-2 and Llama for causal language modelling and ViT
    for image classification.
    """
    from weft.supernet.elastic.gpt2 import gpt2
    from weft.supernet.elastic.llama import llama
    from weft.supernet.elastic.vit import vit

    config = getattr(model, "config", None)
    families = {
        ("gpt2", "GPT2LMHeadModel"): gpt2,
        ("llama", "LlamaForCausalLM"): llama,
        ("vit", "ViTForImageClassification"): vit,
    }
    convert = families.get((str(getattr(config, "model_type", "")), type(model).__name__))
    if config is None or convert is None:
        known = ", ".join(name for _, name in families)
        raise SupernetError(f"{type(model).__name__} cannot be made elastic: give a {known} of transformers")
    if config._attn_implementation not in ("sdpa", "eager"):
        raise SupernetError(
            f"the model computes its attention by '{config._attn_implementation}', which has other bits: call "
            "model.set_attn_implementation('sdpa') or 'eager' first"
        )
    if kv_heads is not None and convert is not llama:
        raise SupernetError(f"{type(model).__name__} has as many keys and values as heads: leave kv_heads out")
    wanted = Wanted(space, depth, width, heads, kv_heads, hidden, config._attn_implementation == "eager")
    try:
        chain = convert(model, wanted)
    except AttributeError as problem:
        raise SupernetError(
            f"{type(model).__name__} is not laid out as in transformers 5: {problem}. Convert it with that version"
        ) from problem
    for name, tensor in (*chain.named_parameters(), *chain.named_buffers()):
        assert not tensor.is_meta, f"'{name}' has no weights"
    return chain.train(model.training)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What may vary, as the caller has it."""

    space: Space
    depth: Dim | None
    width: Dim | None
    heads: PerLayer
    kv_heads: PerLayer
    hidden: PerLayer
    eager: bool

    def size(self, what: str, own: int, given: Dim | None) -> Dim:
        """A size of the model's; raises SupernetError unless the largest is the model's own."""
        if given is None:
            return own
        sizes = Sizes(self.space, given, what=f"the model's {what}")
        if sizes.largest[0] != own:
            raise SupernetError(
                f"the model's {what} is {own}, but the largest of '{given}' is {sizes.largest[0]}: the largest pick "
                "is the model itself"
            )
        return given

    def layers(self, what: str, own: int, given: PerLayer, count: int) -> list[Dim]:
        """The same for each layer."""
        each = list(given) if isinstance(given, Sequence) else [given] * count
        if len(each) != count:
            raise SupernetError(f"{what} has {len(each)} entries, but the model has {count} layers: give one for each")
        return [self.size(f"{what} (layer {i})", own, one) for i, one in enumerate(each)]

    def chain(self, first: Module, layers: Sequence[Module], head: Module) -> Chain:
        """The parts in a row, the layers behind the least depth on condition."""
        from weft.supernet.block import Elastic
        from weft.supernet.chain import Chain

        depth = self.size("depth", len(layers), self.depth)
        least = Sizes(self.space, depth).values[0][0]
        return Chain(
            Elastic(self.space, "embed", first),
            *[
                Elastic(self.space, f"layer{i}", layer, when=None if i < least else depth > i)  # type: ignore[arg-type]
                for i, layer in enumerate(layers)
            ],
            Elastic(self.space, "head", head),
        )


def fill(module: Any, **tensors: Tensor | None) -> None:
    """Gives a module copies of these tensors as its parameters; None stands for what it does not have."""
    for name, tensor in tensors.items():
        own = getattr(module, name)
        if (tensor is None) != (own is None) or (tensor is not None and tensor.shape != own.shape):
            shapes = [None if t is None else tuple(t.shape) for t in (own, tensor)]
            raise SupernetError(f"a weight '{name}' of shape {shapes[0]} cannot be filled from one of {shapes[1]}")
        if tensor is not None:
            copied = tensor.detach().clone(memory_format=torch.contiguous_format)
            setattr(module, name, nn.Parameter(copied, tensor.requires_grad))


def activation(name: str, own: nn.Module) -> Callable[[], nn.Module]:
    """How to make the model's activation: one of torch's with the same bits where there is one, else a copy."""
    known: dict[str, Callable[[], nn.Module]] = {
        "gelu": nn.GELU,
        "gelu_new": NewGELU,
        "gelu_pytorch_tanh": partial(nn.GELU, approximate="tanh"),
        "relu": nn.ReLU,
        "silu": nn.SiLU,
        "swish": nn.SiLU,
    }
    return known.get(name, partial(copy.deepcopy, own))


class NewGELU(Module):
    """GPT-2's activation, term by term: ``nn.GELU(approximate="tanh")`` rounds differently."""

    def forward(self, x: Tensor, pick: Pick) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
