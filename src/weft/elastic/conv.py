"""Elastic convolutions, patches of images, and squeeze and excite. A subnet uses the first channels and the centre of
kernels."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.elastic.mixture import Mixture, Pick
from weft.elastic.module import Leaf, Module, cloned_prefix, contiguous_prefix, load, narrow_prefix, saved_as_view
from weft.elastic.ops.conv import mixed_conv2d
from weft.elastic.sizes import Dim, Sizes
from weft.errors import SupernetError
from weft.space import Expr, Space, Subnet


class Conv2d(nn.Conv2d, Leaf):
    """``nn.Conv2d`` of which a subnet uses the first inputs and outputs, and the centre of the kernel.

    Kernels are odd and, unless a fixed one has its own ``padding``, keep height and width at stride 1. With a
    ``group_width`` the channels form as many groups of that width as there are, so that a narrower layer is the first
    groups of a wider one; ``groups="depthwise"`` is a width of 1. A number of groups is for fixed channels.
    """

    def __init__(
        self,
        space: Space,
        inputs: Dim,
        outputs: Dim,
        kernel: Dim,
        stride: int = 1,
        groups: int | Literal["depthwise"] = 1,
        group_width: int | None = None,
        dilation: int = 1,
        bias: bool = True,
        padding: int | None = None,
    ) -> None:
        what = f"Conv2d({inputs}, {outputs}, kernel {kernel})"
        width = 1 if groups == "depthwise" else group_width
        if (groups != 1) + (group_width is not None) > 1:
            raise SupernetError(f"{what} has groups={groups!r} and group_width={group_width}: give one of them")
        if groups == "depthwise" or groups == 1:
            number = 1
        else:
            number = _number_of_groups(space, inputs, outputs, groups, what)
        if width is not None and not _same(space, inputs, outputs):
            raise SupernetError(
                f"{what} has groups of {width} channels, which needs as many outputs as inputs: write both alike"
            )
        per_group = inputs if number == 1 else int(Expr.of(inputs).value({})) // number
        sizes = Sizes(space, outputs, per_group if width is None else width, kernel, what=what)
        _check(sizes, width, padding, what)
        largest, within, side = sizes.largest
        if width is not None:
            number = largest // width
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
            return mixed_conv2d(x, self.weight, self.bias, rows, columns, *where)  # type: ignore[arg-type]
        outputs, within, kernel = self.sizes.of(pick)
        bias = None if self.bias is None else contiguous_prefix(self.bias, outputs)
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
        bias = None if self.bias is None else cloned_prefix(self.bias, outputs)
        weight = cloned_prefix(_centre(self.weight, kernel), outputs, within)
        return load(made, {"weight": weight, "bias": bias}, self.training)

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

        return rows, mixture.cached(("places", self.sizes.key), make)

    def _ring(self, device: torch.device) -> Tensor:
        """For each place of the largest kernel twice its distance from the centre."""
        if device not in self._rings:
            far = (torch.arange(self.kernel_size[0], device="cpu") - self.kernel_size[0] // 2).abs()
            self._rings[device] = (2 * torch.maximum(far[:, None], far)).flatten().to(device)
        return self._rings[device]


def _centre(weight: Tensor, kernel: int) -> Tensor:
    margin = (weight.shape[-1] - kernel) // 2
    return weight[:, :, margin : margin + kernel, margin : margin + kernel] if margin else weight


def _same(space: Space, first: Dim, second: Dim) -> bool:
    derived = space.rules.layout.derived
    return Expr.of(first).substitute(derived).same_as(Expr.of(second).substitute(derived))


def _number_of_groups(space: Space, inputs: Dim, outputs: Dim, groups: int, what: str) -> int:
    channels = Sizes(space, inputs, outputs, what=what)
    if channels.names:
        raise SupernetError(
            f"{what} has {groups} groups, and channels that vary: the groups of a narrower layer would cut those of a "
            "wider one apart. Give group_width, the channels of a group, instead"
        )
    if groups < 1 or any(size % groups for size in channels.largest):
        raise SupernetError(f"{what} cannot have {groups} groups: inputs and outputs must be multiples of them")
    return groups


def _check(sizes: Sizes, width: int | None, padding: int | None, what: str) -> None:
    even = [size for size in sizes.values[2] if size % 2 == 0]
    if even:
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


# An elastic layer that turns the patches of an image into vectors.


class Patches(nn.Conv2d, Leaf):
    """An ``nn.Conv2d`` whose kernel and stride are the patch, of which a subnet uses the first outputs."""

    def __init__(self, space: Space, channels: int, width: Dim, patch: int) -> None:
        sizes = Sizes(space, width, channels, what=f"Patches({channels}, {width})")
        super().__init__(channels, sizes.largest[0], patch, patch)
        self.sizes = sizes

    def forward(self, x: Tensor, pick: Pick) -> Tensor:  # type: ignore[override]
        if isinstance(pick, Mixture):
            rows, channels = self.sizes.mask_factors(pick)
            columns = channels.repeat_interleave(self.weight[0, 0].numel(), 1)
            where = (self.stride, (0, 0), (1, 1), 1)
            return mixed_conv2d(x, self.weight, self.bias, rows, columns, *where)  # type: ignore[arg-type]
        width, _ = self.sizes.of(pick)
        return F.conv2d(x, contiguous_prefix(self.weight, width), self._narrow_bias(width), self.stride)

    def plain(self, subnet: Subnet) -> nn.Module:
        width, channels = self.sizes.of(subnet)
        bias = self._narrow_bias(width)
        made = nn.Conv2d(
            channels,
            width,
            self.kernel_size,  # type: ignore[arg-type]
            self.stride,  # type: ignore[arg-type]
            bias=bias is not None,
            device="meta",
            dtype=self.weight.dtype,
        )
        held = {"weight": cloned_prefix(self.weight, width), "bias": None if bias is None else cloned_prefix(bias)}
        return load(made, held, self.training)

    def _narrow_bias(self, width: int) -> Tensor | None:
        return None if self.bias is None else contiguous_prefix(self.bias, width)


# Squeeze and excite: a gate for each channel, computed from the channel means of the image.


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
