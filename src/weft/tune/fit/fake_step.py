"""The storages of a step on fake tensors of a CPU, counted as those of a real one would be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from weft.memory.tracer import OPTIMIZER_STEPS, placeholder_value
from weft.utils.live_memory import LiveStorages

aten = torch.ops.aten
_ROWS = 64
"""Samples with which oneDNN's blocks of a recurrent layer end with a page, however wide they are."""


class FakeStorages(LiveStorages):  # type: ignore[no-untyped-call]
    """Live storages that count what oneDNN's LSTM keeps, which its fake kernel leaves out; values that the step asks
    for are made up, those of the optimizer as after many steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, held: Iterable[Tensor] = ()) -> None:
        super().__init__(held)
        self._optimizer, self._updating = optimizer, False
        self._hooks: list[Any] = []

    def __enter__(self) -> FakeStorages:
        def updating(now: bool) -> Callable[..., None]:
            return lambda *_: setattr(self, "_updating", now)

        self._hooks.append(self._optimizer.register_step_pre_hook(updating(True)))
        self._hooks.append(self._optimizer.register_step_post_hook(updating(False)))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)  # type: ignore[no-untyped-call]
        while self._hooks:
            self._hooks.pop().remove()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is aten._local_scalar_dense.default:
            return self._scalar(func, args)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is not aten.mkldnn_rnn_layer.default or not (args[-1] and torch.is_grad_enabled()):
            return result
        steps, samples, features = args[0].shape
        size = lstm_keeps(steps, samples, features, args[5].shape[-1], args[0].dtype)
        kept = torch.empty(size, dtype=torch.uint8)
        self._see(kept, watch=True)
        return (*result[:3], kept)

    def _scalar(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self._updating:
            return OPTIMIZER_STEPS
        try:
            return func(*args)
        except Exception:
            return placeholder_value(args[0].dtype)


def lstm_keeps(steps: int, samples: int, features: int, width: int, dtype: torch.dtype) -> int:
    """Bytes that one layer of oneDNN's keeps for its backward, in one direction, or a few pages more."""
    first, second = (_workspace(count, features, width, dtype) for count in (1, 2))
    return -(-(first + (steps - 1) * (second - first)) * samples // _ROWS) + 5 * 4096


@lru_cache(maxsize=1024)
def _workspace(steps: int, features: int, width: int, dtype: torch.dtype) -> int:
    """As the library itself says, of a real layer with few samples."""
    with _disable_current_modes(), torch.enable_grad():
        x = torch.zeros(steps, _ROWS, features, dtype=dtype)
        weights = [torch.zeros(4 * width, size, dtype=dtype) for size in (features, width)]
        biases = [torch.zeros(4 * width, dtype=dtype)] * 2
        state = torch.zeros(_ROWS, width, dtype=dtype)
        flags: tuple[Any, ...] = (
            False,
            [],
            2,
            width,
            1,
            True,
            False,
            False,
            True,
        )  # 2: an LSTM; the last: it is trained
        return int(aten.mkldnn_rnn_layer(x, *weights, *biases, state, state, *flags)[3].nbytes)
