"""Which kernels cuDNN takes for convolutions, and what they take of memory: measured, and fitted as decision trees.

    python benchmarks/convolutions.py --part measure --rows FILE.csv.gz [--seconds 60] [--seed 0]      on a GPU
    python benchmarks/convolutions.py --part fit --rows FILE.csv.gz --trees FILE.json [--json FILE]    anywhere

`measure` adds random convolutions, forward and both gradients, with the bytes that each takes beside its result and
whether cuDNN's algorithm is Winograd's, Fourier's, or one that first turns its operands round. `fit` makes the trees
that `weft.estimate` reads (`src/weft/memory/cudnn_conv_trees.json`) from four fifths of the rows, and says how far they
are off for the rest: errors are those of the workspace, as a share of what the convolution reads and writes. `closer`
is the share of convolutions within a tenth. Filters of one pixel and images of few channels have rules instead.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import write

from weft.memory.cudnn_conv import FEW_CHANNELS, KINDS, PASSES, ConvShape, split_k, workspace
from weft.memory.cudnn_conv import algorithm as predicted_algorithm

CHANNELS = (16, 24, 32, 40, 48, 60, 64, 96, 128, 160, 180, 192, 256, 320, 384, 512)
SIDES = (7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
SAMPLES = (4, 6, 8, 12, 16, 20, 24, 32, 36, 48, 50, 64, 96, 128, 256, 512, 700, 1024, 1421, 1880)
KERNELS = (3, 3, 3, 3, 3, 3, 5, 7, 2, 4)
FIELDS = ("samples", "channels", "side", "filters", "made", "kernel", "stride", "element")
LEAVES, FEWEST, CAUTION = 400, 2, 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("measure", "fit"), required=True)
    parser.add_argument("--rows", required=True, metavar="FILE")
    parser.add_argument("--trees", metavar="FILE")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    path = Path(options.rows)
    rows = read(path) if path.exists() else []
    if options.part == "measure":
        rows += measure(options.seconds, random.Random(options.seed))
        with gzip.open(path, "wt") as file:
            csv.writer(file).writerows([[*FIELDS, *PASSES, *(f"{p} by" for p in PASSES)], *rows])
        print(f"{len(rows)} convolutions in {path}")
        return
    rows = [row for row in rows if not ruled(row)]
    fitted = fit([row for place, row in enumerate(rows) if place % 5])
    Path(options.trees).write_text(json.dumps(fitted, separators=(",", ":")) + "\n")
    found = list(errors(rows[::5]))
    for row in found:
        print(row)
    write(options.json, count=len(rows), rows=found)


def read(path: Path) -> list[list[Any]]:
    with gzip.open(path, "rt") as file:
        return [[*map(int, row[:11]), *row[11:]] for row in list(csv.reader(file))[1:]]


def ruled(row: list[Any]) -> bool:
    """Whether a convolution has a rule instead of trees."""
    return row[5] == 1 or row[1] <= FEW_CHANNELS


def measure(seconds: float, rng: random.Random) -> Iterator[list[Any]]:
    torch.backends.cudnn.benchmark = False
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        n, c, h, k = rng.choice(SAMPLES), rng.choice(CHANNELS), rng.choice(SIDES), rng.choice(KERNELS)
        o = c if rng.random() < 0.5 else rng.choice(CHANNELS)
        s = 1 if rng.random() < 0.75 else 2
        dtype = torch.float32 if rng.random() < 0.7 else torch.bfloat16
        if n * max(c, o) * h * h > 1e8 or n * c * h * h * o * k * k / s / s > 4e12:
            continue
        x, w = torch.randn(n, c, h, h, device="cuda", dtype=dtype), torch.randn(o, c, k, k, device="cuda", dtype=dtype)
        shared = ([s, s], [k // 2, k // 2], [1, 1], False, [0, 0], 1)
        y = torch.ops.aten.convolution(x, w, None, *shared)
        calls = [lambda x=x, w=w, given=shared: torch.ops.aten.convolution(x, w, None, *given)]
        for asked in ([True, False, False], [False, True, False]):
            calls.append(
                lambda y=y, x=x, w=w, given=(*shared, asked): torch.ops.aten.convolution_backward(y, x, w, None, *given)
            )
        found = [taken(call) for call in calls]
        yield [n, c, h, o, y.shape[2], k, s, x.element_size(), *(f[0] for f in found), *(f[1] for f in found)]


def taken(call: Callable[[], Any]) -> tuple[int, str]:
    """The bytes that a call takes beside its result, and by which kind of kernel."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    beside = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del result
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return beside, algorithm(" ".join(event.key for event in profile.key_averages()))


def algorithm(kernels: str) -> str:
    if "winograd_nonfused" in kernels:
        return "winograd"
    if "fft2d" in kernels:
        return "fourier"
    return "turned" if any(name in kernels for name in ("nchwToNhwc", "nhwcToNchw", "tensorTransform")) else "plain"


def shape_of(row: list[Any]) -> ConvShape:
    n, c, h, o, q, k, s, element = row[:8]
    return ConvShape(n, c, h * h, o, q * q, k * k, s * s, element)


def labelled(row: list[Any], which: str) -> str:
    """The kind of kernel whose workspace is nearest to the one measured, among those that its algorithm may be."""
    place = PASSES.index(which)
    real, algorithm, shape = row[8 + place], row[11 + place], shape_of(row)
    if algorithm in ("winograd", "fourier"):
        return str(algorithm)
    among = [k for k in KINDS if k not in ("winograd", "fourier") and (k == "none") == (algorithm == "plain")]
    if which == "weights":  # partial sums are added to what is turned
        below = [k for k in among if workspace(shape, which, k, 0.0) <= real * 1.01 + 4096]
        return max(below or among[:1], key=lambda k: workspace(shape, which, k, 0.0))
    return min(among, key=lambda k: abs(workspace(shape, which, k, 0.0) - real))


def cut(row: list[Any]) -> float:
    """The partial sums of a gradient of weights."""
    shape = shape_of(row)
    whole = 4 * shape.filters * shape.channels * shape.taps
    return max(0.0, (row[10] - workspace(shape, "weights", labelled(row, "weights"), 0.0)) / whole)


def fit(rows: list[list[Any]]) -> dict[str, Any]:
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    kinds: dict[str, dict[str, Any]] = {which: {} for which in PASSES}
    sums: dict[str, Any] = {}
    given = {"max_leaf_nodes": LEAVES, "min_samples_leaf": FEWEST, "random_state": 0}
    for element in (4, 2):
        own = [row for row in rows if row[7] == element]
        asked = np.array([list(shape_of(row).properties().values()) for row in own], float)
        for which in PASSES:
            places = [KINDS.index(labelled(row, which)) for row in own]
            tree = DecisionTreeClassifier(**given).fit(asked, places)
            kinds[which][str(element)] = nested(tree, asked, places, lambda value: KINDS[int(value)])
        split = [place for place, row in enumerate(own) if labelled(row, "weights") not in ("winograd", "fourier")]
        counts = [cut(own[place]) for place in split]
        tree = DecisionTreeRegressor(criterion="absolute_error", **given).fit(asked[split], np.log1p(counts))
        sums[str(element)] = nested(tree, asked[split], counts, lambda value: round(float(value), 2))
    return {"kinds": kinds, "pieces": sums}


def nested(tree: Any, asked: Any, values: list[Any], shown: Callable[[Any], Any]) -> Any:
    """A fitted tree as lists of property, limit, what is below and what is above.

    A leaf has the value that `CAUTION` of its rows do not exceed: memory that is there and not needed costs less than
    memory that is needed and not there."""
    ends, found = tree.apply(asked), np.array(values)
    names, nodes = list(ConvShape(1, 1, 1, 1, 1, 1, 1, 4).properties()), tree.tree_

    def node(place: int) -> Any:
        if nodes.children_left[place] < 0:
            return shown(np.quantile(found[ends == place], CAUTION, method="inverted_cdf"))
        below, above = node(nodes.children_left[place]), node(nodes.children_right[place])
        return below if below == above else [names[nodes.feature[place]], float(nodes.threshold[place]), below, above]

    return node(0)


def errors(rows: list[list[Any]]) -> Iterator[dict[str, Any]]:
    """How far the trees are off, for convolutions that they were not fitted to."""
    for element, which in ((e, w) for e in (4, 2) for w in PASSES):
        own = [row for row in rows if row[7] == element]
        off = []
        for row in own:
            shape = shape_of(row)
            told = workspace(shape, which, predicted_algorithm(shape, which), split_k(shape))
            moved = element * shape.samples * (shape.channels * shape.seen + shape.filters * shape.made)
            off.append((told - row[8 + PASSES.index(which)]) / moved)
        low, middle, high = np.percentile(off, [5, 50, 95])
        yield {
            "element": element, "pass": which, "count": len(own), "p5": round(float(low), 3),
            "median": round(float(middle), 3), "p95": round(float(high), 3),
            "closer": round(float(np.mean(np.abs(off) < 0.1)), 3),
        }  # fmt: skip


if __name__ == "__main__":
    main()
