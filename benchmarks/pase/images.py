"""PaSE's networks for images: AlexNet and Inception-v3."""

from __future__ import annotations

from pase.layers import Builder, Value
from pase.network import Network

CUTOFF = 4  # hence 128 images are split at most 32 ways

Kernel = tuple[int, int]
ONE, THREE, FIVE, WIDE, TALL = (1, 1), (3, 3), (5, 5), (1, 7), (7, 1)


def alexnet(batch: int) -> Network:
    """Five convolutions, three poolings, three dense layers; 227 x 227 images, 1024 classes."""
    net = Builder()
    x = net.conv(Value((batch, 3, 227, 227)), 96, (11, 11), stride=4, pointwise=1)
    x = net.pool(x, THREE, stride=2)
    x = net.conv(x, 256, FIVE, pad=(2, 2), pointwise=1)
    x = net.pool(x, THREE, stride=2)
    for channels in (384, 384, 256):
        x = net.conv(x, channels, THREE, pad=(1, 1), pointwise=1)
    x = net.pool(x, THREE, stride=2)
    x = net.reshape(x, (batch, 9216))
    for units, pointwise in ((4096, 1), (4096, 1), (1024, 0)):
        x = net.linear(x, units, pointwise)
    net.cross_entropy(x)
    return net.network("alexnet", batch, CUTOFF)


def inception3(batch: int) -> Network:
    """Eleven modules of parallel branches, each convolution with a batch norm; 299 x 299 images, 1000 classes."""
    net = Builder()
    x = _unit(net, Value((batch, 3, 299, 299)), 32, THREE, stride=2)
    x = _unit(net, x, 32, THREE)
    x = _unit(net, x, 64, THREE, pad=(1, 1))
    x = net.pool(x, THREE, stride=2)
    x = _unit(net, x, 80, ONE)
    x = _unit(net, x, 192, THREE)
    x = net.pool(x, THREE, stride=2)
    for pooled in (32, 64, 64):
        parts = [_branch(net, x, (64, ONE)), _branch(net, x, (48, ONE), (64, FIVE))]
        parts.append(_branch(net, x, (64, ONE), (96, THREE), (96, THREE)))
        x = net.concat([*parts, _pooled(net, x, pooled)])
    parts = [_halved(net, x, 384), _halved(net, _branch(net, x, (64, ONE), (96, THREE)), 96)]
    x = net.concat([*parts, net.pool(x, THREE, stride=2)])
    for c in (128, 160, 160, 192):
        parts = [_branch(net, x, (192, ONE)), _branch(net, x, (c, ONE), (c, WIDE), (192, TALL))]
        parts.append(_branch(net, x, (c, ONE), (c, TALL), (c, WIDE), (c, TALL), (192, WIDE)))
        x = net.concat([*parts, _pooled(net, x, 192)])
    parts = [_halved(net, _branch(net, x, (192, ONE)), 320)]
    parts.append(_halved(net, _branch(net, x, (192, ONE), (192, WIDE), (192, TALL)), 192))
    x = net.concat([*parts, net.pool(x, THREE, stride=2)])
    for _ in range(2):
        parts = [_branch(net, x, (320, ONE))]
        for stem in ([(384, ONE)], [(448, ONE), (384, THREE)]):
            y = _branch(net, x, *stem)
            parts.append(net.concat([_branch(net, y, (384, (1, 3))), _branch(net, y, (384, (3, 1)))]))
        x = net.concat([*parts, _pooled(net, x, 192)])
    x = net.linear(net.mean_of_image(x), 1000)
    net.cross_entropy(x)
    return net.network("inception3", batch, CUTOFF)


def _unit(net: Builder, x: Value, channels: int, kernel: Kernel, stride: int = 1, pad: Kernel = (0, 0)) -> Value:
    return net.batch_norm(net.conv(x, channels, kernel, stride, pad))


def _branch(net: Builder, x: Value, *steps: tuple[int, Kernel]) -> Value:
    """Convolutions in a row, (channels, kernel) each, that keep the size of the image."""
    for channels, (r, s) in steps:
        x = _unit(net, x, channels, (r, s), pad=(r // 2, s // 2))
    return x


def _halved(net: Builder, x: Value, channels: int) -> Value:
    return _unit(net, x, channels, THREE, stride=2)


def _pooled(net: Builder, x: Value, channels: int) -> Value:
    return _unit(net, net.pool(x, THREE, pad=(1, 1)), channels, ONE)
