"""The simulator of packing: times by hand, and laws over random queues."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_simulator import Recorded, lower_bound, simulate

from weft.errors import TuneError
from weft.tune.packing.packer import Packer, Placement
from weft.tune.packing.pool import DeviceCapacity, JobSpec


def trial(name: str, memory: int, seconds: float, demand: float = 1.0, degree: int = 1) -> Recorded:
    return Recorded(JobSpec(name, memory, degree, seconds), seconds, demand)


@pytest.mark.parametrize(
    ("demand", "loss", "a", "b"),
    [
        (0.5, 0.0, 10.0, 6.0),  # they leave each other time
        (1.0, 0.0, 16.0, 12.0),  # both at half speed until b is done; a then has 4 of its 10 s left
        (0.5, 0.5, 16.0, 12.0),  # a further job costs all half of their speed
    ],
)
def test_jobs_that_share_a_device_run_at_the_speed_that_it_leaves_them(
    demand: float, loss: float, a: float, b: float
) -> None:
    packed = simulate([trial("a", 4, 10, demand), trial("b", 4, 6, demand)], Packer([DeviceCapacity(10)]), loss=loss)
    assert packed.ends == {"a": pytest.approx(a), "b": pytest.approx(b)}
    assert (packed.makespan, packed.most) == (pytest.approx(a), 2)
    assert packed.mean_memory == pytest.approx((4 * a + 4 * b) / (10 * a))


class Everywhere:
    """Starts all that waits on its first devices, whatever runs there."""

    devices = (DeviceCapacity(10), DeviceCapacity(10))

    def admit(self, waiting: Iterable[JobSpec], now: float = 0.0) -> list[Placement]:
        return [(load.id, tuple(range(load.degree))) for load in waiting]

    def ended(self, id: str) -> None: ...

    def measured(self, id: str, rate: float) -> None: ...


def test_a_split_load_goes_at_the_pace_of_its_slowest_device() -> None:
    packed = simulate([trial("wide", 5, 10, degree=2), trial("small", 1, 5)], Everywhere())
    assert packed.ends == {"small": pytest.approx(10.0), "wide": pytest.approx(15.0)}


def test_a_trial_beyond_the_window_waits_for_the_oldest() -> None:
    trials = [trial("0", 1, 10, 0.1), *(trial(str(i), 1, 1, 0.1) for i in range(1, 5))]
    packed = simulate(trials, Packer([DeviceCapacity(10)]), window=2)
    assert [packed.starts[str(i)] for i in range(5)] == [0.0, 0.0, 0.0, 10.0, 10.0]


def test_trials_that_fit_nowhere_are_named() -> None:
    with pytest.raises(TuneError, match="1 trials never started"):
        simulate([trial("giant", 11, 1)], Packer([DeviceCapacity(10)]))


def test_the_bound_is_the_largest_of_work_memory_and_the_longest() -> None:
    devices = [DeviceCapacity(10), DeviceCapacity(10)]
    assert lower_bound([trial("a", 1, 6), trial("b", 1, 6), trial("c", 1, 6)], devices) == 9.0
    assert lower_bound([trial("a", 10, 6, 0.1), trial("b", 10, 6, 0.1), trial("c", 10, 6, 0.1)], devices) == 9.0
    assert lower_bound([trial("a", 1, 6, 0.1)], devices) == 6.0


one_trial = st.tuples(st.integers(1, 10), st.integers(1, 30), st.sampled_from([0.1, 0.5, 1.0]), st.integers(1, 2))


@settings(max_examples=60, deadline=None)
@given(st.lists(one_trial, min_size=1, max_size=20), st.integers(0, 6), st.booleans())
def test_every_trial_runs_once_no_sooner_than_it_can_and_no_packing_beats_the_bound(
    drawn: list[tuple[int, int, float, int]], window: int, measure: bool
) -> None:
    trials = [trial(str(i), m, float(s), d, g) for i, (m, s, d, g) in enumerate(drawn)]
    devices = [DeviceCapacity(10), DeviceCapacity(10), DeviceCapacity(10)]
    packed = simulate(trials, Packer(devices), window=window, measure=measure)
    assert packed.ends.keys() == {one.load.id for one in trials}
    for one in trials:
        assert packed.ends[one.load.id] - packed.starts[one.load.id] >= one.seconds - 1e-6
    assert packed.makespan >= lower_bound(trials, devices) - 1e-6
    # Nobody idles: with whatever window, it is never slower than one after another.
    assert packed.makespan <= sum(one.seconds for one in trials) + 1e-6
