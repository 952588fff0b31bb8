"""Elastic convolutions, patches of images, and squeeze and excite. A subnet uses the first channels and the centre of
kernels."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn import grad as gradients  # the public form of autograd's own

from weft.elastic.mixture import Mixture, Pick
from weft.elastic.module import Leaf, Module, contiguous_prefix, load, narrow_prefix, saved_as_view
from weft.elastic.ops.weight import expected
from weft.elastic.sizes import Dim, Sizes
from weft.errors import SupernetError
from weft.space import Expr, Space, Subnet


class Conv2d(nn.Conv2d, Leaf):
    """``nn.Conv2d`` of which a subnet uses the first inputs and outputs, and the centre of the kernel.

    Kernels are odd and, unless a fixed one has its own ``padding``, keep height and width at stride 1. With a
    ``group_width`` the channels form as many groups of that width as there are, so that a narrower layer is the first
    groups of a wider one; ``groups="depthwise"`` is a width of 1.
    """

    def __init__(
        self,
        space: Space,
        inputs: Dim,
        outputs: Dim,
        kernel: Dim,
        stride: int = 1,
        groups: Literal[1, "depthwise"] = 1,
        group_width: int | None = None,
        dilation: int = 1,
        bias: bool = True,
        padding: int | None = None,
    ) -> None:
        what = f"Conv2d({inputs}, {outputs}, kernel {kernel})"
        width = 1 if groups == "depthwise" else group_width
        if groups not in (1, "depthwise") or (groups != 1 and group_width is not None):
            raise SupernetError(
                f"{what} has groups={groups!r} and group_width={group_width}: give 'depthwise' or the width of a "
                "group, since a number of groups would cut those of a narrower layer and of a wider one apart"
            )
        if width is not None and not _same(space, inputs, outputs):
            raise SupernetError(
                f"{what} has groups of {width} channels, which needs as many outputs as inputs: write both alike"
            )
        sizes = Sizes(space, outputs, inputs if width is None else width, kernel, what=what)
        _check(sizes, width, padding, what)
        largest, within, side = sizes.largest
        number = 1 if width is None else largest // width
        pad = dilation * (side // 2) if padding is None else padding
        super().__init__(within * number, largest, side, stride, pad, dilation, number, bias)
        self.sizes = sizes
        self.group_width = width
        self._fixed_padding = padding
        self._rings: dict[torch.device, Tensor] = {}

    def forward(self, x: Tensor, pick: Pick) -> Tensor:  # type: ignore[override]
        if isinstance(pick, Mixture):
            if not self.sizes.names:
                return super().forward(x)
            rows, columns = self._factors(pick)
            where = (self.stride, self.padding, self.dilation, self.groups)
            out: Tensor = _MixedConv.apply(x, self.weight, self.bias, rows, columns, *where)  # type: ignore[no-untyped-call]
            return out
        outputs, within, kernel = self.sizes.of(pick)
        bias = contiguous_prefix(self.bias, outputs)
        padding, groups = self._padding(kernel), self._groups(outputs)
        view = narrow_prefix(_centre(self.weight, kernel), outputs, within)
        return saved_as_view(
            lambda weight: F.conv2d(x, weight, bias, self.stride, padding, self.dilation, groups), view
        )

    def plain(self, subnet: Subnet) -> nn.Module:
        outputs, within, kernel = self.sizes.of(subnet)
        groups = self._groups(outputs)
        made = nn.Conv2d(
            within * groups,
            outputs,
            kernel,
            self.stride,  # type: ignore[arg-type]
            self._padding(kernel),
            self.dilation,  # type: ignore[arg-type]
            groups,
            self.bias is not None,
            device="meta",
            dtype=self.weight.dtype,
        )
        weight = contiguous_prefix(_centre(self.weight, kernel), outputs, within)
        return load(made, self.training, weight=weight, bias=contiguous_prefix(self.bias, outputs))

    def _padding(self, kernel: int) -> int:
        return int(self.dilation[0]) * (kernel // 2) if self._fixed_padding is None else self._fixed_padding

    def _groups(self, outputs: int) -> int:
        return self.groups if self.group_width is None else outputs // self.group_width

    def _factors(self, mixture: Mixture) -> tuple[Tensor, Tensor]:
        """The factors of the outputs, and those of inputs and places of the kernel together."""
        rows, within, kernel = self.sizes.mask_factors(mixture)

        def make() -> Tensor:
            # A kernel of size k reaches the places whose distance d from the centre has 2 d < k.
            places = kernel.index_select(1, self._ring(kernel.device))
            return (within[:, :, None] * places[:, None, :]).flatten(1)

        columns = mixture.cached(("places", self.sizes.key), make)
        return rows.to(self.weight.dtype), columns.to(self.weight.dtype)

    def _ring(self, device: torch.device) -> Tensor:
        """For each place of the largest kernel twice its distance from the centre."""
        if device not in self._rings:
            side = self.kernel_size[0]
            far = (2 * torch.arange(side, device="cpu") - side + 1).abs()
            self._rings[device] = torch.maximum(far[:, None], far).flatten().to(device)
        return self._rings[device]


def _centre(weight: Tensor, kernel: int) -> Tensor:
    margin = (weight.shape[-1] - kernel) // 2
    return weight[:, :, margin : margin + kernel, margin : margin + kernel] if margin else weight


def _same(space: Space, first: Dim, second: Dim) -> bool:
    derived = space.rules.layout.derived
    return Expr.of(first).substitute(derived).same_as(Expr.of(second).substitute(derived))


def _check(sizes: Sizes, width: int | None, padding: int | None, what: str) -> None:
    even = [size for size in sizes.values[2] if size % 2 == 0]
    if even and padding is None:
        raise SupernetError(
            f"{what} has a kernel of size {even[0]}, but kernels are nested by their centre: use odd ones"
        )
    if padding is not None and not sizes.is_fixed(2):
        raise SupernetError(f"{what} has padding={padding}, but kernels that vary are padded by half their size")
    if width is not None and (width < 1 or any(size % width for size in sizes.values[0])):
        raise SupernetError(
            f"{what} has groups of {width} channels, but {', '.join(map(str, sizes.values[0]))} channels: all of them "
            "must be multiples of the group's"
        )


class Patches(Conv2d):
    """A convolution whose kernel and stride are the patch, of which a subnet uses the first outputs."""

    def __init__(self, space: Space, channels: int, width: Dim, patch: int) -> None:
        super().__init__(space, channels, width, patch, patch, padding=0)


class SqueezeExcite(Module):
    """Multiplies each channel by a gate, MobileNetV3's: pooled, reduced, ReLU, expanded, hard sigmoid."""

    def __init__(self, space: Space, channels: Dim, reduced: Dim) -> None:
        super().__init__()
        self.reduce = Conv2d(space, channels, reduced, 1)
        self.expand = Conv2d(space, reduced, channels, 1)

    def forward(self, x: Tensor, pick: Pick) -> Tensor:
        pooled = F.adaptive_avg_pool2d(x, 1)
        gate = F.hardsigmoid(self.expand(F.relu(self.reduce(pooled, pick=pick)), pick=pick))
        return x * gate


# The convolution with the expectation of its weight, which the backward computes again.


class _MixedConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, columns: Tensor, *where: Any
    ) -> Tensor:
        kind = x.device.type
        ctx.dtype = x.dtype
        if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(kind))  # kept as the convolution uses it
        ctx.save_for_backward(x, weight, bias, rows, columns)
        ctx.where = where
        inside = None if bias is None else bias * rows.sum(0)
        return F.conv2d(x, _expected(weight, rows, columns), inside, *where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, bias, rows, columns = ctx.saved_tensors
        wants = ctx.needs_input_grad
        dx = dw = db = of_rows = of_columns = None
        if wants[0]:
            mixed = _expected(weight, rows, columns).to(gradient.dtype)
            dx = gradients.conv2d_input(x.shape, mixed, gradient, *ctx.where)  # type: ignore[no-untyped-call]
            dx = dx.to(ctx.dtype)
        if wants[1] or wants[3] or wants[4]:
            raw = gradients.conv2d_weight(x, weight.shape, gradient, *ctx.where)  # type: ignore[no-untyped-call]
            raw = raw.to(weight.dtype).flatten(1)
            product = raw * weight.flatten(1) if wants[3] or wants[4] else raw
            of_rows = torch.mm(columns, product.t()) if wants[3] else None
            of_columns = torch.mm(rows, product) if wants[4] else None
            if wants[1]:
                dw = torch.mm(rows.t(), columns).mul_(raw).view_as(weight)
        if bias is not None and (wants[2] or wants[3]):
            total = gradient.sum((0, 2, 3)).to(bias.dtype)
            db = total * rows.sum(0) if wants[2] else None
            of_rows = of_rows if of_rows is None else of_rows + total * bias
        return dx, dw, db, of_rows, of_columns, None, None, None, None


def _expected(weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The expected weight: all dimensions but the first count as columns."""
    return expected(weight.flatten(1), None, rows, columns, weight.dtype)[0].view_as(weight)
