"""What it costs to sum, spread and collect tensors over a group of devices, in seconds.

Every function takes arrays that broadcast: ``size`` in bytes, ``q`` devices in the group, ``bandwidth`` in bytes a
second each way between neighbours, ``latency`` in seconds a message. Each has a *ring*, in which every device sends a
q-th at a time and all links are busy, and a *tree*, in which log2(q) rounds send more; the cheaper is taken. A group of
one, and an empty tensor, cost nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Seconds = NDArray[np.float64]


def all_reduce(size: ArrayLike, q: ArrayLike, bandwidth: ArrayLike, latency: ArrayLike) -> Seconds:
    """Every device has a tensor of ``size``, and gets the sum of all.

    Ring: a reduce-scatter, then an all-gather. Tree: summed up to a root, then sent down, the whole tensor each round.
    """
    count, rounds = _count(q), _rounds(q)
    ring = 2 * (count - 1), 2 * (count - 1) / count
    return _cheaper(ring, (2 * rounds, 2 * rounds), size, bandwidth, latency)


def reduce_scatter(size: ArrayLike, q: ArrayLike, bandwidth: ArrayLike, latency: ArrayLike) -> Seconds:
    """Every device has a tensor of ``size``, and gets its q-th of the sum.

    Ring: q - 1 steps. Tree: summed up to a root, whole, then sent down in halves.
    """
    count, rounds = _count(q), _rounds(q)
    ring = count - 1, (count - 1) / count
    return _cheaper(ring, (2 * rounds, rounds + (count - 1) / count), size, bandwidth, latency)


all_gather = reduce_scatter
"""Every device has a q-th, and gets the whole tensor of ``size``: a reduce-scatter, backwards."""


def all_to_all(size: ArrayLike, q: ArrayLike, bandwidth: ArrayLike, latency: ArrayLike) -> Seconds:
    """Every device has ``size``, a q-th of it for each device.

    Direct: one message to each other device. Tree: each round sends half of what a device has on.
    """
    count, rounds = _count(q), _rounds(q)
    direct = count - 1, (count - 1) / count
    return _cheaper(direct, (rounds, rounds / 2), size, bandwidth, latency)


_Way = tuple[Seconds, Seconds]  # messages one after the other, and bytes sent over the size of the tensor


def _cheaper(one: _Way, other: _Way, size: ArrayLike, bandwidth: ArrayLike, latency: ArrayLike) -> Seconds:
    sizes, width, delay = (np.asarray(each, dtype=np.float64) for each in (size, bandwidth, latency))
    ring, tree = (
        np.where(sizes > 0, messages * delay + share * sizes / width, 0.0) for messages, share in (one, other)
    )
    return np.minimum(ring, tree)


def _count(q: ArrayLike) -> Seconds:
    return np.asarray(q, dtype=np.float64)


def _rounds(q: ArrayLike) -> Seconds:
    return np.asarray(np.ceil(np.log2(_count(q))))
