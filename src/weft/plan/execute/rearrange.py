"""Views and other operators that name a shape: on a part, they name the part's shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.plan.execute.site import Local, Site, Unfit
from weft.plan.execute.wire import Wire


def _sized(name: str) -> Callable[[Site], Local]:
    def rule(site: Site) -> Local:
        sizes: Any = {name: list(site.shape())}
        return site.local(**sizes)

    return rule


def _reshaped(site: Site) -> Local:
    if site.target is torch.ops.aten.view.dtype:
        return _contiguous(site)
    shape = site.shape()

    def run(wire: Wire, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        # What is a view of the whole need not be one of a part: its strides are others after a cut.
        return torch.reshape(args[0], shape)

    return site.local(run)


def _contiguous(site: Site) -> Local:
    strides, expected = site.args[0].strides, 1
    for size, stride in zip(reversed(site.args[0].tensor.shape), reversed(strides or ()), strict=False):
        if size > 1 and stride != expected:
            raise Unfit("it depends on how its operand lies in memory, which is not kept")
        expected *= size

    def run(wire: Wire, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return site.target(args[0].contiguous(), *args[1:], **kwargs)

    return site.local(run)


def _rows_counted(site: Site) -> Local:
    """native_group_norm is told how many images there are."""
    images = site.argument("input").tensor.dims[0]
    return site.local(N=site.argument("N") // site.parts(images))


def _interleaved(site: Site) -> Local:
    return site.local() if "output_size" not in site.kwargs else Local(site.local().run, site.args, {})


# Strides need not be those of the captured values, even where nothing is cut: a tensor that was moved is contiguous.
RESTRIDED: dict[str, Callable[[Site], Local]] = {
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "view_copy", "_reshape_alias", "view_as", "reshape_as"), _reshaped
    ),
    # A part may have an axis of one where the whole has more: it must not be squeezed.
    **dict.fromkeys(("flatten", "unflatten", "squeeze", "unsqueeze"), _reshaped),
    **dict.fromkeys(("as_strided", "view_as_complex"), _contiguous),
}

RULES: dict[str, Callable[[Site], Local]] = {
    **RESTRIDED,
    **dict.fromkeys(("expand", "expand_copy", "broadcast_to"), _sized("size")),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), _sized("size")),
    "native_group_norm": _rows_counted,
    "repeat_interleave": _interleaved,
}
