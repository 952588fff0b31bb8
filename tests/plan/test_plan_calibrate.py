"""Calibration: the fit of what was measured, and a machine measured here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import PlanError
from weft.hardware.machine import Machine
from weft.plan.calibrate import Stopwatch, Work, calibrate, fit, rates


def rows(q: int, bandwidth: float, latency: float) -> list[tuple[str, int, float, float]]:
    found = []
    for size in (1e3, 1e5, 1e7):
        found.append(("all_reduce", q, size, 2 * (q - 1) * (latency + size / q / bandwidth)))
        for kind in ("all_gather", "reduce_scatter", "all_to_all"):
            found.append((kind, q, size, (q - 1) * (latency + size / q / bandwidth)))
    return found


@given(st.integers(2, 64), st.floats(1e8, 1e12), st.floats(1e-6, 1e-3))
def test_the_fit_finds_the_link_that_made_the_times(q: int, bandwidth: float, latency: float) -> None:
    assert fit(rows(q, bandwidth, latency)) == (pytest.approx(bandwidth, rel=1e-4), pytest.approx(latency, rel=1e-4))


def test_the_fit_is_the_least_square_of_the_relative_errors() -> None:
    noisy = [
        (kind, q, size, taken * factor)
        for (kind, q, size, taken), factor in zip(rows(4, 1e9, 1e-4), (1.1, 0.9, 1.05, 1.2, 0.8, 1.0) * 2, strict=True)
    ]

    def error(bandwidth: float, latency: float) -> float:
        return sum(
            ((2 if kind == "all_reduce" else 1) * 3 * (latency + size / 4 / bandwidth) / taken - 1) ** 2
            for kind, _, size, taken in noisy
        )

    bandwidth, latency = fit(noisy)
    around = [(bandwidth * a, latency * b) for a in (0.999, 1.0, 1.001) for b in (0.999, 1.0, 1.001)]
    assert min(around, key=lambda link: error(*link)) == (bandwidth, latency)


class Known(Stopwatch):
    """A clock by which a product takes a fixed time beside its work, at a fixed rate."""

    def __init__(self, rate: float, beside: float) -> None:
        super().__init__("cpu", quick=True)
        self.rate, self.beside = rate, beside

    def __call__(self, work: Work) -> float:
        product = work()
        assert isinstance(product, torch.Tensor)
        return self.beside + 2.0 * len(product) ** 3 / self.rate


@given(st.floats(1e9, 1e11), st.floats(1e-7, 1e-5), st.floats(0, 1e-4))
def test_the_rate_of_a_product_does_not_count_what_a_call_takes_beside_it(
    rate: float, beside: float, overhead: float
) -> None:
    found = rates(Known(rate, beside), torch.float32, [16, 32, 64, 128], overhead)
    assert [size for size, _ in found] == [16, 32, 64, 128][-len(found) :]
    for _, reached in found:
        assert reached == pytest.approx(rate, rel=0.02)


def test_a_product_that_does_not_show_beside_the_call_gives_no_rate() -> None:
    # 16: 0.08 us of work beside 1 us, 32: 0.66 us, 64: 5.2 us
    assert [size for size, _ in rates(Known(1e11, 1e-6), torch.float32, [16, 32, 64], 0.0)] == [32, 64]


def test_work_is_done_often_enough_for_the_clock_and_the_slowest_process_counts() -> None:
    told: list[float] = []
    calls = 0

    def work() -> None:
        nonlocal calls
        calls += 1

    def slowest(seconds: float) -> float:
        told.append(seconds)
        return 2 * seconds

    taken = Stopwatch("cpu", True, slowest)(work)
    assert taken == 2 * told[-1] > 0
    assert calls > 100


def test_times_that_shrink_with_size_still_give_a_link() -> None:
    bandwidth, latency = fit([("all_reduce", 2, 1e3, 1.0), ("all_reduce", 2, 1e6, 0.5)])
    assert 0 < bandwidth < np.inf
    assert latency == 0.0


def test_two_processes_of_this_host_give_a_machine_that_can_be_kept() -> None:
    threads = torch.get_num_threads()
    found = calibrate("cpu", devices=2, quick=True)
    assert torch.get_num_threads() == threads
    assert Machine.from_json(found.to_json()) == found
    assert found.devices == 2
    assert {"float32", "tf32", "bfloat16", "float16"} == set(found.device.peak)
    assert found.device.efficiency[-1][1] == 1.0
    assert found.device.peak["tf32"] == found.device.peak["float32"]
    assert sorted(found.device.efficiency) == list(found.device.efficiency)
    bandwidth, latency = found.axis_link((2,), 0)
    assert 0 < bandwidth < np.inf
    assert 0 <= latency < 1.0


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(PlanError, match="cannot calibrate 'tpu': the device is cpu or cuda"):
        calibrate("tpu")
    with pytest.raises(PlanError, match="cannot calibrate 0 devices: at least 1"):
        calibrate("cpu", devices=0)
    if not torch.cuda.is_available():
        with pytest.raises(PlanError, match="no CUDA device"):
            calibrate("cuda")
