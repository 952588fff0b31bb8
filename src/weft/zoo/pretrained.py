"""Pretrained transformers made elastic: a model of the ``transformers`` package as a chain with its weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weft.elastic.attention import Attention, Rotary
from weft.elastic.linear import Grid
from weft.elastic.mixture import Pick
from weft.elastic.module import Module
from weft.elastic.norm import LayerNorm, RMSNorm
from weft.elastic.sizes import Dim, Sizes
from weft.elastic.transformer import MLP, Head, PatchEmbedding, TokenEmbedding, TransformerBlock
from weft.errors import SupernetError
from weft.space import Space

if TYPE_CHECKING:
    from weft.supernet.chain import Chain

PerLayer = Dim | Sequence[Dim] | None


def from_transformers(
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
    given = {"depth": depth, "width": width, "heads": heads, "kv_heads": kv_heads, "hidden": hidden}
    request = ElasticSizes(space, given, config.num_hidden_layers, config._attn_implementation == "eager")
    try:
        chain = convert(model, request)
    except AttributeError as problem:
        raise SupernetError(
            f"{type(model).__name__} is not laid out as in transformers 5: {problem}. Convert it with that version"
        ) from problem
    for name, tensor in (*chain.named_parameters(), *chain.named_buffers()):
        assert not tensor.is_meta, f"'{name}' has no weights"
    return chain.train(model.training)


@dataclass(frozen=True, slots=True)
class ElasticSizes:
    """What may vary, as the caller has it, in a model of ``count`` layers."""

    space: Space
    given: Mapping[str, PerLayer]
    count: int
    eager: bool

    def size(self, what: str, own: int) -> Dim:
        """A size of the model's; raises SupernetError unless the largest is the model's own."""
        return self._checked(what, own, self.given[what])  # type: ignore[arg-type]

    def layers(self, what: str, own: int) -> list[Dim]:
        """The same for each layer."""
        given = self.given[what]
        each = list(given) if isinstance(given, Sequence) else [given] * self.count
        if len(each) != self.count:
            raise SupernetError(
                f"{what} has {len(each)} entries, but the model has {self.count} layers: give one for each"
            )
        return [self._checked(f"{what} (layer {i})", own, one) for i, one in enumerate(each)]

    def _checked(self, what: str, own: int, given: Dim | None) -> Dim:
        if given is None:
            return own
        sizes = Sizes(self.space, given, what=f"the model's {what}")
        if sizes.largest[0] != own:
            raise SupernetError(
                f"the model's {what} is {own}, but the largest of '{given}' is {sizes.largest[0]}: the largest pick "
                "is the model itself"
            )
        return given

    def chain(
        self, first: Module, layers: Sequence[Module], head: Module, blocks: nn.ModuleList, parts: Mapping[str, str]
    ) -> Chain:
        """The parts in a row, the layers, which get the weights of the blocks, behind the least depth on condition."""
        from weft.supernet.blocks import Elastic
        from weft.supernet.chain import Chain

        for layer, block in zip(layers, blocks, strict=True):
            copy_weights(layer, block, parts)
        depth = self.size("depth", self.count)
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
    """Gives a module copies of these tensors as its parameters; None for what it does not have."""
    for name, tensor in tensors.items():
        own = getattr(module, name)
        if (tensor is None) != (own is None) or (tensor is not None and tensor.shape != own.shape):
            shapes = [None if t is None else tuple(t.shape) for t in (own, tensor)]
            raise SupernetError(f"a weight '{name}' of shape {shapes[0]} cannot be filled from one of {shapes[1]}")
        if tensor is not None:
            copied = tensor.detach().clone(memory_format=torch.contiguous_format)
            setattr(module, name, nn.Parameter(copied, tensor.requires_grad))


def copy_weights(module: nn.Module, source: nn.Module, parts: Mapping[str, str]) -> None:
    """Gives parts of a module copies of the weight and, where they have one, the bias of parts of the source."""
    for name, other in parts.items():
        of = source.get_submodule(other)
        fill(
            module.get_submodule(name), **{kind: getattr(of, kind) for kind in ("weight", "bias") if hasattr(of, kind)}
        )


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


# GPT-2 of transformers, made elastic.

Turned = partial(Grid, transposed=True)
"""A linear layer with its weight as inputs x outputs, which is how GPT-2's are multiplied."""


class JoinedAttention(Attention):
    """Attention whose q, k and v come from one product, rows of the grid (3, heads, head_dim)."""

    def _make(self, space: Space, width: Dim, grid: tuple[Dim, Dim, Dim], bias: bool, out_bias: bool) -> None:
        heads, _, dim = grid
        self.qkv = Turned(space, width, (3, heads, dim), bias)
        self.out = Turned(space, (heads, dim), width, out_bias)

    def project(self, x: Tensor, pick: Pick) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = torch.chunk(self.qkv(x, pick=pick), 3, -1)
        return q, k, v


def gpt2(model: Any, request: ElasticSizes) -> Chain:
    """The chain of a GPT2LMHeadModel; the head's weight, which the model shares with its embedding, is its own."""
    config, body, space = model.config, model.transformer, request.space
    if config.add_cross_attention or (request.eager and config.reorder_and_upcast_attn):
        raise SupernetError("GPT-2 with add_cross_attention or reorder_and_upcast_attn cannot be made elastic")
    width = request.size("width", config.hidden_size)
    heads = request.layers("heads", config.num_attention_heads)
    hidden = request.layers("hidden", body.h[0].mlp.c_fc.nf)
    norm = partial(LayerNorm, eps=config.layer_norm_epsilon)
    layers = []
    with torch.device("meta"):
        first = TokenEmbedding(space, config.vocab_size, width, config.max_position_embeddings, config.embd_pdrop)
        for i, block in enumerate(body.h):
            attend = partial(JoinedAttention, causal=True, scale=block.attn.scaling, eager=request.eager)
            attention = attend(space, width, heads[i], block.attn.head_dim)
            act = activation(config.activation_function, block.mlp.act)
            mlp = MLP(space, width, hidden[i], act, linear=Turned)
            layers.append(TransformerBlock(space, width, attention, mlp, norm, config.resid_pdrop))
        head = Head(space, width, config.vocab_size, norm=norm, bias=False)
    copy_weights(first, body, {"token": "wte", "place": "wpe"})
    copy_weights(head, model, {"norm": "transformer.ln_f", "linear": "lm_head"})
    parts = {
        "norm1": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "norm2": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    return request.chain(first, layers, head, body.h, parts)


# Llama of transformers, made elastic.


def llama(model: Any, request: ElasticSizes) -> Chain:
    """The chain of a LlamaForCausalLM; every layer has its own copy of the rotary frequencies."""
    config, body, space = model.config, model.model, request.space
    turn = body.rotary_emb
    if turn.rope_type in ("dynamic", "longrope"):
        raise SupernetError(
            f"the rotary frequencies of kind '{turn.rope_type}' change with the length of the input, which a chain's "
            "cannot: use another rope_type"
        )
    dim = body.layers[0].self_attn.head_dim
    width = request.size("width", config.hidden_size)
    heads = request.layers("heads", config.num_attention_heads)
    groups = request.layers("kv_heads", config.num_key_value_heads)
    hidden = request.layers("hidden", config.intermediate_size)
    frequencies, device = turn.inv_freq.tolist(), turn.inv_freq.device
    turns = [Rotary(dim, frequencies, turn.attention_scaling).to(device) for _ in body.layers]
    norm, bias = partial(RMSNorm, eps=config.rms_norm_eps), config.attention_bias
    attend = partial(Attention, causal=True, bias=bias, out_bias=bias, eager=request.eager)
    layers = []
    with torch.device("meta"):
        first = TokenEmbedding(space, config.vocab_size, width)
        for i, block in enumerate(body.layers):
            attention = attend(space, width, heads[i], dim, groups[i], rotary=turns[i])
            act = activation(config.hidden_act, block.mlp.act_fn)
            mlp = MLP(space, width, hidden[i], act, gated=True, bias=config.mlp_bias)
            layers.append(TransformerBlock(space, width, attention, mlp, norm))
        head = Head(space, width, config.vocab_size, norm=norm, bias=False)
    copy_weights(first, body, {"token": "embed_tokens"})
    copy_weights(head, model, {"norm": "model.norm", "linear": "lm_head"})
    parts = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    parts |= {f"attention.{name}": f"self_attn.{name[0]}_proj" for name in ("q", "k", "v", "out")}
    parts |= {f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    return request.chain(first, layers, head, body.layers, parts)


# ViT of transformers, made elastic.


def vit(model: Any, request: ElasticSizes) -> Chain:
    """The chain of a ViTForImageClassification."""
    config, body, space = model.config, model.vit, request.space
    if not isinstance(model.classifier, nn.Linear):
        raise SupernetError("this ViT has no classifier: give num_labels, so that there is something to predict")
    if not isinstance(config.image_size, int) or not isinstance(config.patch_size, int):
        raise SupernetError(
            f"only square images and patches can be made elastic, not {config.image_size} and {config.patch_size}"
        )
    width = request.size("width", config.hidden_size)
    heads = request.layers("heads", config.num_attention_heads)
    hidden = request.layers("hidden", config.intermediate_size)
    norm = partial(LayerNorm, eps=config.layer_norm_eps)
    drop = config.hidden_dropout_prob
    layers = []
    with torch.device("meta"):
        first = PatchEmbedding(space, config.image_size, config.patch_size, width, config.num_channels, drop)
        for i, block in enumerate(body.layers):
            dim = block.attention.head_dim
            attention = Attention(space, width, heads[i], dim, bias=config.qkv_bias, eager=request.eager)
            mlp = MLP(space, width, hidden[i], activation(config.hidden_act, block.mlp.activation_fn))
            layers.append(TransformerBlock(space, width, attention, mlp, norm, drop))
        head = Head(space, width, config.num_labels, "first", norm)
    source = body.embeddings
    copy_weights(first, source, {"patches": "patch_embeddings.projection"})
    fill(first.first, weight=source.cls_token[0])
    fill(first.place, weight=source.position_embeddings[0])
    copy_weights(head, model, {"norm": "vit.layernorm", "linear": "classifier"})
    parts = {"norm1": "layernorm_before", "norm2": "layernorm_after", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
    parts |= {f"attention.{name}": f"attention.{name[0]}_proj" for name in ("q", "k", "v", "out")}
    return request.chain(first, layers, head, body.layers, parts)
