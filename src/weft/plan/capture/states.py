"""The states that an LSTM returns, in their true shapes: torch 2.11 tells others of fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._decomp import decompositions


@contextmanager
def true_states() -> Iterator[None]:
    """Within it an LSTM's layer on fake tensors returns states of the shape ``(b, h)``, as it does on real ones.

    Torch 2.11 leaves an axis of one in them that real states have not, and what reads them would be captured in shapes
    that it never has.
    """
    module: Any = decompositions
    layer = getattr(module, "one_layer_lstm", None)
    if layer is None:  # it is torch's own business where this is
        yield
        return

    def squeezed(value: Tensor, hidden: tuple[Tensor, Tensor], *rest: Any, **options: Any) -> Any:
        out, states = layer(value, hidden, *rest, **options)
        return out, tuple(state.reshape(*hidden[0].shape[:-1], state.shape[-1]) for state in states)

    module.one_layer_lstm = squeezed
    try:
        yield
    finally:
        module.one_layer_lstm = layer
