"""CUDA's autocast on fake tensors of the CPU: the same operators are cast as on the device, weights once a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.plan.memory.overrides import Kernel, overriding

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
def as_on_cuda() -> Iterator[None]:
    """Within the block, ``torch.autocast("cpu")`` does what ``torch.autocast("cuda")`` does on a GPU."""
    cast: dict[int, tuple[Tensor, Tensor]] = {}
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        cast.clear()
        clear()

    kernels: dict[str, Kernel | None] = dict.fromkeys(operators("CPU"))
    kernels |= {name: _kernel(name, cast) for name in operators("CUDA")}
    with overriding(kernels, "AutocastCPU"):
        torch.clear_autocast_cache = clear_both
        try:
            yield
        finally:
            torch.clear_autocast_cache = clear


@cache
def operators(backend: str) -> tuple[str, ...]:
    """The operators that autocast has a kernel for on CPU or CUDA in this version of PyTorch."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return tuple(sorted(name for name in names if has(name, f"Autocast{backend}")))


def _kernel(name: str, cast: dict[int, tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    takes_dtype = any(argument.name == "dtype" for argument in operator._schema.arguments)

    def run(*args: Any, **kwargs: Any) -> Any:
        low = torch.get_autocast_dtype("cpu")
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            if packet in _RESULT and takes_dtype:
                eligible = isinstance(args[0], Tensor) and args[0].dtype in _FLOATS
                if kwargs.get("dtype") is None and not _asked(operator, args) and eligible:
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


def _asked(operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether the caller named a dtype by its place."""
    names = [argument.name for argument in operator._schema.arguments]
    place = names.index("dtype")
    return len(args) > place and args[place] is not None


def _cast(leaf: Any, to: torch.dtype, low: torch.dtype, cast: dict[int, tuple[Tensor, Tensor]]) -> Any:
    if not isinstance(leaf, Tensor) or leaf.dtype not in _FLOATS or leaf.dtype == to:
        return leaf
    # A weight that many operators read is cast once, as long as autocast is on.
    if to == low and leaf.dtype == torch.float32 and leaf.requires_grad and leaf.is_leaf and not leaf._is_view():
        if id(leaf) not in cast:
            cast[id(leaf)] = (leaf, leaf.to(to))
        return cast[id(leaf)][1]
    return leaf.to(to)
