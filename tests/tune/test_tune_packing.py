"""Packing: never too much, always something, nobody forgotten."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.tune.fit.estimator import Requirements
from weft.tune.jobs import Device, Fit, PendingJob
from weft.tune.packing.packer import Dispatcher, Packer, job_spec
from weft.tune.packing.pool import DeviceCapacity, JobRate, JobSpec, ThroughputModel


def packer_of(devices: int = 1, **options: Any) -> Packer:
    return Packer([DeviceCapacity(10)] * devices, **options)


def test_the_largest_by_memory_and_time_starts_first_and_the_rest_fill_what_is_left() -> None:
    packer = packer_of(2)
    waiting = [JobSpec("small", 2, seconds=1), JobSpec("big", 9, seconds=10), JobSpec("middle", 5, seconds=10)]
    assert packer.admit(waiting) == [("big", (0,)), ("middle", (1,)), ("small", (1,))]
    assert packer.admit(waiting) == []  # they run
    assert packer_of().admit([JobSpec("wide", 8, seconds=1), JobSpec("long", 5, seconds=9)]) == [("long", (0,))]


def test_a_long_job_starts_before_larger_ones_when_it_would_be_the_last_to_end() -> None:
    wide = [JobSpec(f"wide{k}", 9, seconds=10) for k in range(8)]
    packer = packer_of(2)
    first = packer.admit([*wide, JobSpec("long", 2, seconds=15)])[:2]  # of 95 / 2 s
    assert first == [("wide0", (0,)), ("wide1", (1,))]
    packer.ended("wide0")
    packer.ended("wide1")
    rest = [*wide[2:4], JobSpec("long", 2, seconds=15)]
    # To one a place was promised. Of the 35 / 2 s that are left the long one takes most, so it does not wait longer.
    assert packer.admit(rest, now=20.0) == [("wide2", (0,)), ("long", (1,))]


def test_a_small_job_goes_before_the_largest_only_if_it_ends_in_time_or_fits_beside_it() -> None:
    packer = packer_of()
    packer.placed(JobSpec("runs", 6, seconds=100), [0], now=0.0)
    waiting = [JobSpec("big", 8, seconds=50), JobSpec("slow", 3, seconds=90), JobSpec("fast", 3, seconds=40)]
    assert packer.admit(waiting, now=50.0) == [("fast", (0,))]
    assert packer.reservation is not None
    assert (packer.reservation.job.id, packer.reservation.at) == ("big", 100.0)
    packer.ended("fast")
    assert packer.admit([*waiting[:2], JobSpec("tiny", 2, seconds=400)], now=60.0) == [("tiny", (0,))]
    packer.ended("runs")
    assert packer.admit(waiting, now=100.0) == [("big", (0,))]


def test_a_split_job_gets_devices_of_one_node() -> None:
    packer = Packer([DeviceCapacity(10, node) for node in "abba"])
    packer.placed(JobSpec("other", 5), [0])
    assert packer.admit([JobSpec("split", 8, degree=2)]) == [("split", (1, 2))]
    assert packer.admit([JobSpec("again", 8, degree=2)]) == []
    packer.ended("other")
    assert packer.admit([JobSpec("again", 8, degree=2)]) == [("again", (0, 3))]


def test_a_job_that_fits_nowhere_holds_up_nobody() -> None:
    packer = packer_of(2)
    assert not packer.possible(JobSpec("giant", 11))
    assert not packer.possible(JobSpec("wide", 1, degree=3))
    assert packer.admit([JobSpec("giant", 11, seconds=9), JobSpec("ok", 5, seconds=1)]) == [("ok", (0,))]


def test_a_device_that_is_gone_takes_nothing_and_one_that_comes_does() -> None:
    packer = packer_of(2)
    packer.change([DeviceCapacity(10), DeviceCapacity(10, max_jobs=0)])
    assert packer.admit([JobSpec("a", 6), JobSpec("b", 6)]) == [("a", (0,))]
    packer.change([DeviceCapacity(10), DeviceCapacity(10, max_jobs=0), DeviceCapacity(10)])
    assert packer.admit([JobSpec("b", 6)]) == [("b", (2,))]


def test_a_job_that_later_ones_overtook_too_often_starts_before_them() -> None:
    packer = packer_of(max_overtakes=3)
    packer.placed(JobSpec("0", 5), [0])
    old, started = JobSpec("old", 9), []
    for number in range(1, 50):
        # A queue that never ends: always another small one, of unknown length, and one of the running ends.
        jobs = [job for job in [old, JobSpec(str(number), 5)] if job.id not in packer.running]
        started += [id for id, _ in packer.admit(jobs)]
        if "old" in started:
            break
        packer.ended(str(min(map(int, packer.running))))
    assert "old" in started
    assert started.index("old") <= 3 + 2


def test_a_study_gives_everything_that_packing_decides_by() -> None:
    """No field of a job or of a device is left as it is unless something else gives it: a benchmark, for example."""
    plan = Fit("split", 1, 1, 2, 5, 0.5, "")
    job = job_spec(PendingJob({0: {}}, Requirements(5, plan, None, "kind", 3), exclusive=True, memory=7, id="0-0"))
    assert job == JobSpec("0-0", 7, 2, 1.5, True, "kind")
    executor = Mock(devices=(Device("cuda:0", 10**12, "far"),))
    assert [f.name for f in fields(job) if getattr(job, f.name) == f.default] == []
    assert Dispatcher(executor, 3, counted=True).slots() == 3


def test_one_more_that_adds_nothing_is_not_tried_again_soon() -> None:
    throughput = ThroughputModel(gain=0.05, again=3)
    packer = Packer([DeviceCapacity(100)], throughput=throughput)
    speeds = {1: 1.0, 2: 0.8, 3: 0.5}  # together 1, 1.6, 1.5: two are best
    waiting = [JobSpec(name, 1, kind="same") for name in "abcdefgh"]
    for count in (1, 2, 3):
        packer.admit(waiting[:count])
        for id in list(packer.running):
            packer.measured(id, speeds[count])
    assert throughput.speed(2) == pytest.approx(1.6)
    packer.ended("a")
    assert packer.admit(waiting[1:]) == []
    packer.ended("b")
    assert [id for id, _ in packer.admit(waiting[2:])] == ["d"]
    for _ in range(3):  # measured often enough since, it is worth another try
        for id in list(packer.running):
            packer.measured(id, speeds[2])
    assert len(packer.admit(waiting[4:])) == 1


def test_what_stays_worth_while_is_not_given_up_for_noise() -> None:
    throughput = ThroughputModel(gain=0.1)
    for count, speed in ((1, 1.0), (2, 0.6)):
        throughput.add([JobRate("k", speed, 1.0)] * count)
    assert throughput.allows_one_more(1)
    throughput.add([JobRate("k", 0.52, 1.0)] * 2)  # less than the gain that was asked for at first, yet not less than 1
    assert throughput.allows_one_more(1)
    for _ in range(8):
        throughput.add([JobRate("k", 0.45, 1.0)] * 2)
    assert not throughput.allows_one_more(1)


def test_a_kind_beside_which_all_are_slower_gets_a_device_by_itself() -> None:
    throughput = ThroughputModel()
    packer = Packer([DeviceCapacity(10)], throughput=throughput)
    for kind in ("hog", "meek"):
        throughput.add([JobRate(kind, 1.0, 1.0)])
    for _ in range(2):
        throughput.add([JobRate("hog", 0.5, 9.0), JobRate("meek", 0.2, 1.0)])
    assert throughput.must_run_alone("hog")
    assert not throughput.must_run_alone("meek")
    assert packer.admit([JobSpec("h", 5, kind="hog"), JobSpec("m", 1, kind="meek")]) == [("h", (0,))]


jobs_of = st.lists(
    st.builds(
        JobSpec,
        id=st.uuids().map(str),
        memory=st.one_of(st.none(), st.integers(0, 12)),
        degree=st.integers(1, 3),
        seconds=st.one_of(st.none(), st.integers(0, 20).map(float)),
        exclusive=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda job: job.id,
)
devices_of = st.lists(
    st.builds(
        DeviceCapacity,
        memory=st.one_of(st.none(), st.integers(4, 12)),
        node=st.sampled_from("xy"),
        reserve=st.integers(0, 1),
        max_jobs=st.one_of(st.none(), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=5,
)


def by_itself(job: JobSpec) -> bool:
    return job.exclusive or job.degree > 1


def jobs_on(packer: Packer, place: int) -> tuple[list[JobSpec], int]:
    """Those that run there, and the memory that they take."""
    device = packer.devices[place]
    runs = [run.job for run in packer.running.values() if place in run.places]
    return runs, sum(taken_of(job, device) for job in runs)


def taken_of(job: JobSpec, device: DeviceCapacity) -> int:
    return (device.memory or 0) if job.memory is None else job.memory + device.reserve


def check_safe(packer: Packer) -> None:
    for place, device in enumerate(packer.devices):
        runs, taken = jobs_on(packer, place)
        assert device.memory is None or taken <= device.memory
        assert device.max_jobs is None or len(runs) <= device.max_jobs
        assert len(runs) <= 1 or not any(map(by_itself, runs))
    for run in packer.running.values():
        assert len(set(run.places)) == run.job.degree
        assert len({packer.devices[place].node for place in run.places}) == 1


@settings(max_examples=150, deadline=None)
@given(devices_of, jobs_of, st.data())
def test_devices_never_have_too_much_and_a_queue_that_fits_empties(
    devices: list[DeviceCapacity], jobs: list[JobSpec], data: st.DataObject
) -> None:
    packer = Packer(devices, max_overtakes=data.draw(st.integers(0, 4)))
    waiting = [job for job in jobs if packer.possible(job)]
    arrived: list[JobSpec] = []
    now = 0.0
    while waiting or arrived or packer.running:
        count = data.draw(st.integers(0, len(waiting)))
        arrived, waiting = arrived + waiting[:count], waiting[count:]
        started = {id for id, _ in packer.admit(arrived, now)}
        arrived = [job for job in arrived if job.id not in started]
        check_safe(packer)
        # Progress: an empty floor never stays empty while something waits.
        assert packer.running or not arrived
        if packer.running:
            packer.ended(data.draw(st.sampled_from(sorted(packer.running))))
        now += data.draw(st.integers(0, 5))


@settings(max_examples=100, deadline=None)
@given(devices_of, jobs_of)
def test_nothing_that_has_room_waits_while_no_place_is_held(devices: list[DeviceCapacity], jobs: list[JobSpec]) -> None:
    packer = Packer(devices)
    placed = packer.admit(jobs)
    assert placed == Packer(devices).admit(list(jobs))  # the same each time
    if packer.reservation is not None:
        return

    def has_room(job: JobSpec, place: int, device: DeviceCapacity) -> bool:
        runs, taken = jobs_on(packer, place)
        full = device.max_jobs is not None and len(runs) >= device.max_jobs
        shut = bool(runs) and (by_itself(job) or any(map(by_itself, runs)))
        return not (full or shut) and (device.memory is None or taken + taken_of(job, device) <= device.memory)

    for job in jobs:
        free = Counter(device.node for place, device in enumerate(devices) if has_room(job, place, device))
        assert job.id in packer.running or max(free.values(), default=0) < job.degree
