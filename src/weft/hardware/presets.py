"""Machines known by name, with the figures of their makers' data sheets.

Peaks are dense (no sparsity) and at boost clock. A dtype that a device has no unit for computes at the rate of float32.
Overheads, latencies and efficiency curves are on no data sheet: they are usual values, and `calibrate` measures them.
"""

from __future__ import annotations

import re

from weft.errors import PlanError, nearest
from weft.hardware.machine import DeviceSpec, Link, Machine

GIB = 2.0**30

# A kernel needs about 1e10 FLOP to fill a GPU, and small ones waste most of it.
GPU_CURVE = ((1e6, 0.02), (1e7, 0.08), (1e8, 0.25), (1e9, 0.5), (1e10, 0.7), (1e11, 0.8))
CPU_CURVE = ((1e4, 0.05), (1e5, 0.2), (1e6, 0.5), (1e7, 0.7), (1e8, 0.8))


def preset(name: str) -> Machine:
    """The machine of that name, in any case, spaces and dashes aside."""
    key = re.sub(r"[\s_-]", "", name).lower().removeprefix("gtx").removeprefix("rtx")
    for known, value in PRESETS.items():
        if known.lower() == key:
            return value
    raise PlanError(
        f"unknown machine '{name}'{nearest(key, map(str.lower, PRESETS))}; or give a file written by `weft calibrate`"
    )


def _gpu(
    name: str,
    peaks: tuple[float, float, float, float],
    memory: tuple[float, float],
    inner: Link,
    card: float,
    overhead: float = 5e-6,
) -> Machine:
    """``peaks`` in TFLOP/s: float32, tf32, bfloat16, float16; ``memory``: GB/s, GiB; ``card``: network bytes a second
    for each device."""
    names = ("float32", "tf32", "bfloat16", "float16")
    peak = {dtype: 1e12 * teraflops for dtype, teraflops in zip(names, peaks, strict=True)}
    device = DeviceSpec(peak, GPU_CURVE, memory[0] * 1e9, memory[1] * GIB, overhead, 8e-6)
    return Machine(name, device, (inner, Link("network", None, card, 1e-5)))


PRESETS: dict[str, Machine] = {
    value.name: value
    for value in (
        # GeForce GTX 1080 Ti (Pascal, 3584 cores at 1.582 GHz): 11.34 TFLOP/s, 11 GB of GDDR5X at 484 GB/s; float16 is
        # 1/64 of that, so it is stored and computed as float32. Eight on PCI Express 3.0 x16 (15.75 GB/s) behind one
        # FDR InfiniBand card (56 Gb/s).
        _gpu("1080Ti", (11.34, 11.34, 11.34, 11.34), (484, 11), Link("PCIe", 8, 15.75e9, 1e-5), 7e9 / 8),
        # GeForce RTX 2080 Ti (Turing, 4352 cores at 1.545 GHz): 13.45 TFLOP/s, 53.8 in float16 with float32 sums, 11 GB
        # of GDDR6 at 616 GB/s. The driver offers no peer access over PCI Express: data goes by way of the host, in and
        # out, at half the rate.
        _gpu("2080Ti", (13.45, 13.45, 13.45, 53.8), (616, 11), Link("PCIe", 8, 15.75e9 / 2, 2e-5), 7e9 / 8),
        # Tesla V100 SXM2 (Volta): 15.7 TFLOP/s, 125 in float16, 32 GB of HBM2 at 900 GB/s, NVLink 150 GB/s each way;
        # eight in a node with four EDR InfiniBand cards (100 Gb/s), as in the DGX-1.
        _gpu("V100", (15.7, 15.7, 15.7, 125), (900, 32), Link("NVLink", 8, 150e9, 5e-6), 12.5e9 / 2),
        # A100 SXM 80GB (Ampere): 19.5 TFLOP/s, 156 in TF32, 312 in bfloat16 and float16, 80 GB of HBM2e at 2039 GB/s,
        # NVLink 300 GB/s each way; eight in a node, a HDR InfiniBand card (200 Gb/s) each, as in the DGX A100.
        _gpu("A100", (19.5, 156, 312, 312), (2039, 80), Link("NVLink", 8, 300e9, 5e-6), 25e9, 4e-6),
        # H100 SXM (Hopper): 67 TFLOP/s, 494.7 in TF32, 989.4 in bfloat16 and float16, 80 GB of HBM3 at 3350 GB/s,
        # NVLink 450 GB/s each way; eight in a node, a NDR InfiniBand card (400 Gb/s) each, as in the DGX H100.
        _gpu("H100", (67, 494.7, 989.4, 989.4), (3350, 80), Link("NVLink", 8, 450e9, 4e-6), 50e9, 3e-6),
        # H200 SXM: an H100 with 141 GB of HBM3e at 4800 GB/s (sold by the decimal gigabyte).
        _gpu("H200", (67, 494.7, 989.4, 989.4), (4800, 141e9 / GIB), Link("NVLink", 8, 450e9, 4e-6), 50e9, 3e-6),
        # One core of a server as a device: with AVX-512, two multiply-adds of 16 floats at 2.5 GHz make 160 GFLOP/s. 32
        # cores share eight channels of DDR4-3200 (204.8 GB/s) and 256 GiB, talk by way of that memory (in and out), and
        # with other hosts by Ethernet of 25 Gb/s.
        Machine(
            "CPU",
            DeviceSpec(
                {"float32": 160e9, "tf32": 160e9, "bfloat16": 160e9, "float16": 160e9},
                CPU_CURVE,
                204.8e9 / 32,
                8 * GIB,
                2e-6,
            ),
            (Link("host", 32, 204.8e9 / 64, 2e-5), Link("network", None, 3.125e9 / 32, 5e-5)),
        ),
    )
}
