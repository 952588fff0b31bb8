"""What kernels take beside their results, against what was measured on a device."""

from __future__ import annotations

import csv
import gzip
import math
from pathlib import Path
from typing import Any

import pytest

from weft.hardware.gpus import kernels
from weft.memory.cudnn_conv import FEW_CHANNELS, PASSES, ConvShape, algorithm, convolution_backward, split_k, workspace
from weft.memory.cudnn_rnn import cudnn_workspace
from weft.memory.timeline import TensorShape

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def rows(name: str) -> list[list[str]]:
    with gzip.open(RESULTS / name, "rt") as file:
        return list(csv.reader(file))[1:]


def shape(row: list[str]) -> ConvShape:
    n, c, side, o, made, k, s, element = map(int, row[:8])
    return ConvShape(n, c, side * side, o, made * made, k * k, s * s, element)


@pytest.fixture(scope="module")
def convolutions() -> list[list[str]]:
    return rows("convolutions.csv.gz")


@pytest.mark.parametrize(("algorithm", "widest", "most"), [("winograd", 3, 450), ("fourier", 3, 200)])
def test_workspaces_of_the_two_algorithms_follow_their_laws(
    convolutions: list[list[str]], algorithm: str, widest: int, most: int
) -> None:
    """Gradients of weights in float32, for 9 of 10 to less than 2 %, and mostly to the byte."""
    seen = [row for row in convolutions if row[13] == algorithm and int(row[5]) <= widest and row[7] == "4"]
    off = sorted(abs(workspace(shape(row), "weights", algorithm, 0.0) / int(row[10]) - 1) for row in seen)
    assert len(off) > most
    assert off[int(0.75 * len(off))] == 0
    assert off[int(0.9 * len(off))] < 0.02


@pytest.mark.parametrize(("element", "which", "least"), [("4", "forward", 0.8), ("4", "images", 0.85),
    ("4", "weights", 0.65), ("2", "weights", 0.7)])  # fmt: skip
def test_trees_tell_workspaces_of_convolutions_that_they_were_not_fitted_to(
    convolutions: list[list[str]], element: str, which: str, least: float
) -> None:
    """Within a tenth of what a convolution reads and writes."""
    others = [row for row in convolutions if int(row[5]) > 1 and int(row[1]) > FEW_CHANNELS][::5]
    close = []
    for row in others:
        if row[7] == element:
            one = shape(row)
            moved = one.element * one.samples * (one.channels * one.seen + one.filters * one.made)
            told = workspace(one, which, algorithm(one, which), split_k(one))
            close.append(abs(told - int(row[8 + PASSES.index(which)])) < 0.1 * moved)
    assert len(close) > 500
    assert sum(close) / len(close) > least


def outline(element: int, *shape: int) -> TensorShape:
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return TensorShape(shape, tuple(strides), element)


def test_filters_of_one_pixel_have_a_rule_for_the_gradients_of_their_weights(convolutions: list[list[str]]) -> None:
    """Within a tenth of what a convolution reads and writes, where no pixel is skipped and images are aligned."""
    close = []
    for row in convolutions:
        n, c, side, o, _, k, stride, element = map(int, row[:8])
        if k == stride == 1 and side * side * element % 16 == 0:
            grad, image, weight = (outline(element, *one, *size) for one, size in
                (((n, o), (side, side)), ((n, c), (side, side)), ((o, c), (1, 1))))  # fmt: skip
            given = (grad, image, weight, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, (False, True, False))
            told = convolution_backward(given, None, kernels("h200"))[1]
            close.append(abs(told - int(row[10])) < 0.1 * (image.bytes + grad.bytes))
    assert len(close) > 500
    assert sum(close) / len(close) > 0.88


def recurrent_errors(layers: list[list[str]]) -> list[float]:
    gates: dict[str, int] = {"lstm": 4, "gru": 3, "rnn": 1}
    found = []
    for row in layers:
        count, width, features, ways, steps, samples, element, real = map(int, row[1:])
        weights = sum(
            ways * gates[row[0]] * width * ((features if layer == 0 else ways * width) + width + 2)
            for layer in range(count)
        )
        given: Any = (row[0], samples, steps, width, features, count, ways, element, weights * element)
        found.append(abs(cudnn_workspace(*given) / real - 1))
    return sorted(found)


def test_workspaces_of_recurrent_layers_follow_their_law() -> None:
    measured = [row for row in rows("recurrent.csv.gz") if int(row[2]) > 128]
    simple = recurrent_errors([row for row in measured if row[1] == "1" or row[4] == "2"])
    deep = recurrent_errors([row for row in measured if row[1] != "1" and row[4] == "1"])
    assert len(simple) > 100 < len(deep)
    assert simple[int(0.9 * len(simple))] < 0.01
    assert deep[len(deep) // 2] < 0.012
    assert deep[int(0.9 * len(deep))] < 0.1
