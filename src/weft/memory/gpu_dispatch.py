"""The kernels that a GPU takes where the CPU, or a fake tensor, has others: attention, dropout, recurrent layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.hardware.gpus import Kernels
from weft.memory import cudnn_rnn

aten = torch.ops.aten


@contextmanager
def dispatch_as_gpu(kernels: Kernels, in_place_sums: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """A block in which operators on fake tensors of the CPU take the kernels that they take on this device. Within
    ``in_place_sums``, sums would be formed in place if the tensors held data."""
    kept: list[Tensor] = []

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        way = attention_kernel(query, key, value, attn_mask, kernels)
        if attn_mask is not None and attn_mask.dtype == torch.bool and way != "math":
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask, 0.0)
        operands: tuple[Any, ...]
        keeps = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
        if way == "cudnn":
            operands = (query, key, value, attn_mask, keeps, dropout_p, is_causal, False)
            return aten._scaled_dot_product_cudnn_attention(*operands, scale=scale)[0]
        if way == "flash":
            operands = (query, key, value, dropout_p, is_causal, False)
            return aten._scaled_dot_product_flash_attention(*operands, scale=scale)[0]
        if way == "efficient":
            mask = _padded(attn_mask, query, key)
            operands = (query, key, value, mask, keeps, dropout_p, is_causal)
            return aten._scaled_dot_product_efficient_attention(*operands, scale=scale)[0]
        operands = (query, key, value, attn_mask, dropout_p, is_causal, None)
        with in_place_sums():
            return aten._scaled_dot_product_attention_math(*operands, scale=scale, enable_gqa=enable_gqa)[0]

    def dropout(input: Tensor, p: float, train: bool) -> Any:
        if train and 0 < p < 1 and input.numel():
            return aten.native_dropout(input, p, train)[0]
        if not train or p == 0:
            return input
        return input * torch.zeros_like(input)

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        if bias is not None and input.is_contiguous():
            flat = torch.addmm(bias, input.reshape(-1, input.shape[-1]), weight.t())
            return flat if input.dim() == 2 else flat.view(*input.shape[:-1], weight.shape[0])
        if bias is not None and input.dim() == 2:
            return torch.addmm(bias, input, weight.t())
        result = torch.matmul(input, weight.t())
        # In place, as with tensors that hold data; with fake ones PyTorch would make another.
        return result if bias is None else result.add_(bias)

    own: dict[str, Kernel | None] = {"scaled_dot_product_attention": attention, "dropout": dropout, "linear": linear}
    own |= {f"{kind}.input": cudnn_rnn.operator(kind, kept) for kind in cudnn_rnn.GATES}
    with replace_kernels(own, "AutogradCPU"):
        yield


def attention_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kernels: Kernels) -> str:
    """The kernel of an attention: ``cudnn``, ``flash``, ``efficient`` or ``math`` (cuda/sdp_utils.cpp)."""
    operands = (query, key, value)
    if any(one.dim() != 4 or one.stride(-1) != 1 for one in operands):
        return "math"
    half, width = query.element_size() == 2, query.shape[-1]
    grouped = key.shape[1] != query.shape[1]
    learned = mask is not None and mask.requires_grad
    crooked = mask is not None and mask.shape[-1] > 1 and mask.stride(-1) != 1
    if half and not crooked and not learned and width <= 128:
        if kernels.cudnn_attention and width % 8 == 0:
            return "cudnn"
        if mask is None and width % 8 == 0:
            return "flash"
    aligned = width % (8 if half else 4) == 0 and value.shape[-1] % (8 if half else 4) == 0
    if aligned and not grouped and not crooked:
        return "efficient"
    return "math"


def _padded(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Rows of a mask begin at multiples of eight elements, and it is as large as the products."""
    if mask is None:
        return None
    if any(stride % 8 for stride in mask.stride()[:-1]):
        length = mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, -length % 8))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


# CUDA's autocast on fake tensors of the CPU: the same operators are cast as on the device, weights once a step.

# The policies of ATen/autocast_mode.h. An operator with a kernel for CUDA's autocast that is on neither list is cast
# to float32.
_LOWER = """
_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu addmm
addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
_thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention
""".split()  # noqa: SIM905
_PROMOTE = """
addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add cat stack
""".split()  # noqa: SIM905
_RESULT = """
prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum
""".split()  # noqa: SIM905
"""Computed from what is given, with a result of float32, unless the caller asks for another dtype."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@contextmanager
def autocast_as_cuda() -> Iterator[None]:
    """Within the block, ``torch.autocast("cpu")`` does what ``torch.autocast("cuda")`` does on a GPU."""
    cast: dict[int, tuple[Tensor, Tensor]] = {}
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        cast.clear()
        clear()

    kernels: dict[str, Kernel | None] = dict.fromkeys(autocast_operators("CPU"))
    kernels |= {name: _kernel(name, cast) for name in autocast_operators("CUDA")}
    with replace_kernels(kernels, "AutocastCPU"):
        torch.clear_autocast_cache = clear_both
        try:
            yield
        finally:
            torch.clear_autocast_cache = clear


@cache
def autocast_operators(backend: str) -> tuple[str, ...]:
    """The operators that autocast has a kernel for on CPU or CUDA in this version of PyTorch."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return tuple(sorted(name for name in names if has(name, f"Autocast{backend}")))


def _kernel(name: str, cast: dict[int, tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    names = [argument.name for argument in operator._schema.arguments]
    dtype_place = names.index("dtype") if "dtype" in names else None

    def run(*args: Any, **kwargs: Any) -> Any:
        low = torch.get_autocast_dtype("cpu")
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            if packet in _RESULT and dtype_place is not None:
                eligible = isinstance(args[0], Tensor) and args[0].dtype in _FLOATS
                if kwargs.get("dtype") is None and args[dtype_place:][:1] in ((), (None,)) and eligible:
                    kwargs["dtype"] = torch.float32
                return operator(*args, **kwargs)
            if packet in _LOWER:
                to = low
            elif packet in _PROMOTE:
                found = [leaf.dtype for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
                to = torch.float32 if torch.float32 in found else low
            else:
                to = torch.float32
            leaves, form = pytree.tree_flatten((args, kwargs))
            # As compiled, the arguments of the call are cast from the last to the first.
            leaves = [_cast(leaf, to, low, cast) for leaf in reversed(leaves)][::-1]
            args, kwargs = pytree.tree_unflatten(leaves, form)
            return operator(*args, **kwargs)

    return run


def _cast(leaf: Any, to: torch.dtype, low: torch.dtype, cast: dict[int, tuple[Tensor, Tensor]]) -> Any:
    if not isinstance(leaf, Tensor) or leaf.dtype not in _FLOATS or leaf.dtype == to:
        return leaf
    # A weight that many operators read is cast once, as long as autocast is on.
    if to == low and leaf.dtype == torch.float32 and leaf.requires_grad and leaf.is_leaf and not leaf._is_view():
        if id(leaf) not in cast:
            cast[id(leaf)] = (leaf, leaf.to(to))
        return cast[id(leaf)][1]
    return leaf.to(to)


# Kernels of PyTorch's operators replaced for a while.

Kernel = Callable[..., Any]
_library: Any = torch.library


@contextmanager
def replace_kernels(kernels: Mapping[str, Kernel | None], key: str) -> Iterator[None]:
    """Within the block, operators (``aten`` names) have these kernels for a dispatch key; None: they have none."""
    library = _library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kernels that are replaced, which is what is wanted
            for name, kernel in kernels.items():
                library.impl(name, kernel or _library.fallthrough_kernel, key)
        yield
    finally:
        library._destroy()
