"""What a plain module costs: parameters, floating-point operations, latency and memory of one forward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from weft.errors import SearchError
from weft.nn.state import evaluation_mode
from weft.utils.live_memory import LiveStorages, tensors

Inputs = Any  # a tensor, or a tuple or list of positional arguments


def parameters(module: nn.Module) -> int:
    """The number of parameters, shared ones counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def flops(module: nn.Module, example_inputs: Inputs) -> int:
    """Floating-point operations of one forward in evaluation mode; a multiply-add counts as 2.

    Counted are matrix products, convolutions and attention, as PyTorch's counter does; element-wise work is not. It
    runs on meta tensors and computes nothing, unless the module reads values of tensors: then it really runs.
    """
    return int(_counted(module, example_inputs).get_total_flops())


def flops_by_child(module: nn.Module, example_inputs: Inputs) -> dict[str, int]:
    """The same for each direct child of the module."""
    found = _counted(module, example_inputs).get_flop_counts()
    root = type(module).__name__
    return {name: int(sum(found.get(f"{root}.{name}", {}).values())) for name, _ in module.named_children()}


def latency(module: nn.Module, inputs: Inputs, repeats: int = 20, warmup: int = 3) -> float:
    """The median time of a forward in milliseconds, in inference mode, after `warmup` forwards."""
    return latencies([module], inputs, repeats, warmup)[0]


def latencies(modules: Sequence[nn.Module], inputs: Inputs, repeats: int = 20, warmup: int = 3) -> list[float]:
    """The latency of each module; each repeat times all of them, so that drift affects all equally."""
    if repeats < 1:
        raise SearchError(f"a latency needs at least 1 repeat, not {repeats}")
    args = _arguments(inputs)
    times: list[list[float]] = [[] for _ in modules]
    for repeat in range(-warmup, repeats):
        for module, kept in zip(modules, times, strict=True):
            with evaluation_mode(module), torch.inference_mode():
                taken = _timed(module, args)
            if repeat >= 0:
                kept.append(taken)
    return [statistics.median(one) for one in times]


def peak_memory(module: nn.Module, inputs: Inputs) -> int:
    """The most bytes alive at once in an inference forward: weights, buffers, inputs and activations.

    On the CPU storages are counted, the same on every run; what a kernel takes for itself is not seen. On CUDA the
    allocator is asked, with its rounding and with kernels' workspaces.
    """
    args = _arguments(inputs)
    held = [*module.parameters(), *module.buffers(), *tensors(args)]
    device = _cuda(module, args)
    with evaluation_mode(module), torch.no_grad():
        if device is None:
            live = LiveStorages(held)
            with live:
                module(*args)
            return live.peak
        own = LiveStorages(held).now
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        module(*args)
        torch.cuda.synchronize(device)
        return own + int(torch.cuda.max_memory_allocated(device)) - int(before)


def _counted(module: nn.Module, example_inputs: Inputs) -> FlopCounterMode:
    args = _arguments(example_inputs)
    state = {name: _meta(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    counter = FlopCounterMode(display=False)
    # Fused attention on the CPU is unknown to the counter; as plain products it counts the same as fused on CUDA.
    with evaluation_mode(module), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        try:
            with torch.device("meta"), counter:
                torch.func.functional_call(module, state, _map(_meta, args))
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            counter = FlopCounterMode(display=False)
            with counter:
                module(*args)
    return counter


def _timed(module: nn.Module, args: tuple[Any, ...]) -> float:
    device = _cuda(module, args)
    if device is None:
        start = time.perf_counter()
        module(*args)
        return (time.perf_counter() - start) * 1e3
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        module(*args)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


def _arguments(inputs: Inputs) -> tuple[Any, ...]:
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)


def _map(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_map(change, one) for one in value)
    return {name: _map(change, one) for name, one in value.items()} if isinstance(value, dict) else value


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


def _cuda(module: nn.Module, args: tuple[Any, ...]) -> torch.device | None:
    for tensor in (*module.parameters(), *tensors(args)):
        if tensor.is_cuda:
            return tensor.device
    return None
