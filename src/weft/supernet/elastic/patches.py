"""An elastic layer that turns the patches of an image into vectors."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from weft.space import Space, Subnet
from weft.supernet.elastic.leaf import Leaf, copied, load, prefix
from weft.supernet.elastic.mixedconv import mixed_conv2d
from weft.supernet.elastic.mixture import Mixture, Pick
from weft.supernet.elastic.sizes import Dim, Sizes


class Patches(nn.Conv2d, Leaf):
    """An ``nn.Conv2d`` whose kernel and stride are the patch, of which a subnet uses the first outputs."""

    def __init__(self, space: Space, channels: int, width: Dim, patch: int) -> None:
        sizes = Sizes(space, width, channels, what=f"Patches({channels}, {width})")
        super().__init__(channels, sizes.largest[0], patch, patch)
        self.sizes = sizes

    def forward(self, x: Tensor, pick: Pick) -> Tensor:  # type: ignore[override]
        if isinstance(pick, Mixture):
            rows, channels = self.sizes.factors(pick)
            columns = channels.repeat_interleave(self.weight[0, 0].numel(), 1)
            where = (self.stride, (0, 0), (1, 1), 1)
            return mixed_conv2d(x, self.weight, self.bias, rows, columns, *where)  # type: ignore[arg-type]
        width, _ = self.sizes.of(pick)
        return F.conv2d(x, prefix(self.weight, width), self._narrow_bias(width), self.stride)

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
        held = {"weight": copied(self.weight, width), "bias": None if bias is None else copied(bias)}
        return load(made, held, self.training)

    def _narrow_bias(self, width: int) -> Tensor | None:
        return None if self.bias is None else prefix(self.bias, width)
