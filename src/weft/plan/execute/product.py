"""Products with a bias: parts of the summed dimension each add their share of it. Convolutions: groups are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.plan.execute.site import Local, Operand, Run, Site, called
from weft.plan.execute.wire import Wire


def _biased(bias: str) -> Callable[[Site], Local]:
    def rule(site: Site) -> Local:
        return _with_share(site, bias, site.local())

    return rule


def _convolution(site: Site) -> Local:
    groups = site.argument("groups")
    image, kernel = site.argument("input"), site.argument("weight")
    channels = image.tensor.dims[len(image.tensor.dims) - (len(kernel.tensor.dims) - 1)]
    if groups > 1 and channels is not None and channels == kernel.tensor.dims[0]:
        groups //= site.parts(channels)
    return _with_share(site, "bias", site.local(groups=groups))


def _with_share(site: Site, bias: str, made: Local) -> Local:
    """Every summand would add the whole bias: each adds a part of it instead, so that the sum has it once."""
    if site.summands() == 1 or not isinstance(site.argument(bias), Operand):
        return made
    return Local(_shared(called(site.target), site.index(bias), 1 / site.summands()), made.args, made.kwargs)


def _shared(run: Run, place: int, share: float) -> Run:
    def shared(wire: Wire, args: list[Any], kwargs: dict[str, Any]) -> Any:
        args[place] = args[place] * share
        return run(wire, args, kwargs)

    return shared


def _plain(site: Site) -> Local:
    return site.local()


_CONVOLUTIONS = (
    "convolution",
    "_convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
)

RULES: dict[str, Callable[[Site], Local]] = {
    "linear": _biased("bias"),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "addbmm"), _biased("self")),
    **dict.fromkeys(("mm", "bmm", "matmul", "mv", "dot", "einsum"), _plain),
    **dict.fromkeys(("_grouped_mm", "transformers::grouped_mm_fallback"), _plain),
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
}
