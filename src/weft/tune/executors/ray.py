"""Jobs on the nodes of a Ray cluster: an actor for each that runs, in the placement group of its node's devices.

    placement group of node A   | bundle 0: GPU 0 |  | bundle 1: GPU 1 |     one bundle a device, all on one node
    actors in the bundles       | seat  seat      |  | seat            |     a trial on two devices: a seat in each

Ray counts whole devices and their memory, so that nobody else is given them; how trials share one is the packer's
affair. Results and messages travel as JSON text. The study's directory must lie where every node sees it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.errors import TuneError, install_extra
from weft.tune.executors.connection import event_message, event_of, job_message, job_of
from weft.tune.executors.local import RunningJob
from weft.tune.executors.processes import surroundings
from weft.tune.executors.worker import packed, prepare, unpacked, worn, written
from weft.tune.jobs import Device, Ended, Event, Job, Lost, Reported
from weft.tune.trial import OUTPUT

MEMORY = "weft_memory_mib"
"""The custom resource of a node that says how much memory each of its devices has, in MiB."""

LOOK = 2.0
"""Seconds between two looks at which nodes there are."""

DOUBT = 5.0
"""Seconds for which a device whose actor cannot be reached is left alone."""

log = logging.getLogger("weft.tune")


class RayExecutor:
    """An `Executor` on a Ray cluster: the one at ``address``, or of RAY_ADDRESS, or a new one on this machine.

    A node's devices are its GPUs, or one CPU device where it has none; a node that comes later brings more.
    """

    def __init__(self, terms: Any, *, address: str | None = None, threads: int = 1) -> None:
        self._ray = _ray()
        self._own = not self._ray.is_initialized()
        if self._own:
            quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": None}
            try:
                self._ray.init(address=address, **quiet)
            except (ConnectionError, ValueError, RuntimeError) as problem:
                told = " ".join(str(problem).split())[:200]
                raise TuneError(f"no Ray cluster can be reached or started: {told}; check RAY_ADDRESS") from None
        self._payload, self._threads = packed(terms), threads
        self._places: list[_Place] = []
        self._jobs: dict[str, _Running] = {}
        self._events: list[Event] = []
        self._looked = -math.inf
        self._discover()
        if not self._places:
            raise TuneError("the Ray cluster has no node with a CPU or GPU that is free for trials")

    @property
    def devices(self) -> Sequence[Device]:
        if time.monotonic() - self._looked > LOOK:
            self._discover()
        return tuple(place.device for place in self._places)

    def start(self, job: Job) -> None:
        crew = []
        for place in job.devices:
            idle = self._places[place].idle
            crew.append(idle.pop() if idle and len(job.devices) == 1 else self._seat(place))
        running = self._jobs[job.id] = _Running(job, crew)
        output = str(Path(job.directory) / "trials" / str(job.trials[0]) / OUTPUT)
        told: Any = crew[0].meeting.remote(len(crew)) if len(crew) > 1 else {}
        for rank, seat in enumerate(crew):
            seat.start.remote(json.dumps(job_message(job)), rank, told, output)
        running.polls = {seat.poll.remote(): rank for rank, seat in enumerate(crew)}

    def answer(self, job: str, trial: int, prune: bool) -> None:
        if job in self._jobs:
            self._jobs[job].crew[0].answer.remote(prune)

    def stop(self, job: str) -> None:
        running = self._jobs.pop(job, None)
        if running is not None:
            self._events = [event for event in self._events if event.job != job]
            self._kill(running)

    def poll(self, timeout: float) -> list[Event]:
        until = time.monotonic() + timeout
        while not self._events:
            now = time.monotonic()
            due = min([until, *(running.deadline for running in self._jobs.values())])
            refs = {ref: running for running in self._jobs.values() for ref in running.polls}
            if refs:
                ready, _ = self._ray.wait(list(refs), num_returns=1, timeout=max(0.0, min(due - now, 1.0)))
                for ref in ready:
                    self._hear(refs[ref], ref)
            else:
                time.sleep(max(0.0, min(due - now, 0.2)))
            self._look()
            if time.monotonic() >= until:
                break
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        for running in list(self._jobs.values()):
            self._kill(running)
        self._jobs.clear()
        for place in self._places:
            for seat in place.idle:
                self._end(seat)
            with suppress(Exception):
                self._ray.util.remove_placement_group(place.group)
        self._places.clear()
        if self._own:
            self._ray.shutdown()

    def processes(self) -> dict[str, list[int]]:
        """The process ids of every job that runs, rank by rank."""
        return {id: self._ray.get([seat.pid.remote() for seat in run.crew]) for id, run in self._jobs.items()}

    def _hear(self, running: _Running, ref: Any) -> None:
        rank = running.polls.pop(ref)
        try:
            messages = json.loads(self._ray.get(ref))
        except Exception as problem:  # the actor, its worker or its node is gone, in Ray's many words
            self._lose(running, problem)
            return
        idle = worn = False
        for message in messages:
            said = message["say"]
            if said == "began":
                running.begin()
            elif said == "broken":
                raise TuneError(f"a node cannot import what it is to run: {message['why']}; install it on every node")
            elif said == "idle":
                idle, worn = True, message["worn"]
            else:
                self._tell(running, event_of(message["event"]))
        if worn and len(running.crew) == 1:
            self._end(running.crew[0])
        elif idle and len(running.crew) == 1:
            self._places[running.job.devices[0]].idle.append(running.crew[0])
        elif not idle:
            running.polls[running.crew[rank].poll.remote()] = rank

    def _tell(self, running: _Running, event: Event) -> None:
        if running.job.id not in self._jobs:
            return
        if isinstance(event, Ended) and event.state == "failed" and len(running.crew) > 1:
            try:  # it may only have noticed that another of its processes is gone
                self._ray.get([seat.pid.remote() for seat in running.crew], timeout=5)
            except Exception as problem:
                self._lose(running, problem)
                return
        self._events.append(event)
        if running.over(event):
            del self._jobs[running.job.id]
            if len(running.crew) > 1:
                self._kill(running)

    def _lose(self, running: _Running, problem: Exception) -> None:
        if self._jobs.pop(running.job.id, None) is not None:
            why = next(iter(str(problem).strip().splitlines()), type(problem).__name__)
            self._events.append(Lost(running.job.id, f"its actor is gone: {why[:160]}"))
        self._kill(running)
        if isinstance(problem, self._ray.exceptions.ActorUnavailableError):
            # Mostly its whole node is gone, which Ray will know in a while: nothing is started there until then.
            for place in running.job.devices:
                self._places[place].doubted = time.monotonic() + DOUBT
        self._looked = -math.inf

    def _look(self) -> None:
        now = time.monotonic()
        for running in list(self._jobs.values()):
            if now >= running.deadline:
                self.stop(running.job.id)
                self._events += running.timeouts(now)
        if now - self._looked > LOOK:
            self._discover()

    def _seat(self, place: int) -> Any:
        found = self._places[place]
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=found.group, placement_group_bundle_index=found.bundle
        )
        gpu = found.device.name.startswith("cuda")
        options = {"num_cpus": 0, "num_gpus": 1 / 64 if gpu else 0, "max_concurrency": 4, "max_restarts": 0}
        seat = self._ray.remote(JobActor).options(**options, scheduling_strategy=strategy)
        return seat.remote(self._payload, "cuda:0" if gpu else "cpu", None if gpu else self._threads)

    def _kill(self, running: _Running) -> None:
        running.polls.clear()
        for seat in running.crew:
            self._end(seat)

    def _end(self, seat: Any) -> None:
        with suppress(Exception):
            self._ray.kill(seat, no_restart=True)

    def _discover(self) -> None:
        """Nodes that went keep their places, which are away; those that are new get places at the end."""
        self._looked = time.monotonic()
        nodes = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        for place in self._places:
            gone = place.device.node not in nodes or place.doubted > self._looked
            place.device = replace(place.device, gone=gone)
            if place.device.gone:
                place.idle.clear()
        known = {place.device.node for place in self._places}
        for id, node in nodes.items():
            if id not in known:
                self._places += self._reserve(id, node["Resources"])

    def _reserve(self, node: str, resources: dict[str, float]) -> list[_Place]:
        """All devices of a node, by a placement group with a bundle for each."""
        gpus, cpus = int(resources.get("GPU", 0)), resources.get("CPU", 0.0)
        memory = resources.get(MEMORY)
        if not gpus and not cpus:
            return []
        count = gpus or 1
        bundle = {"GPU": 1.0} if gpus else {"CPU": max(1.0, cpus / 2)}
        if gpus and cpus >= gpus:
            bundle["CPU"] = 1.0
        if memory is not None:
            bundle[MEMORY] = memory / count
        util = self._ray.util
        group = util.placement_group(
            [dict(bundle) for _ in range(count)],
            strategy="STRICT_PACK",
            bundle_label_selector=[{"ray.io/node-id": node}] * count,
        )
        if not group.wait(30):
            log.warning("the devices of Ray node %s are taken by others: it is not used", node[:8])
            util.remove_placement_group(group)
            return []
        size = None if memory is None else int(memory / count * 2**20)
        if gpus and size is None:
            size = self._ray.get(self._ray.remote(_gpu_memory).options(num_cpus=0, num_gpus=0.01).remote())
        names = [f"cuda:{index}" for index in range(gpus)] or ["cpu"]
        return [_Place(Device(name, size, node), group, index) for index, name in enumerate(names)]


@dataclass(eq=False)
class _Place:
    device: Device
    group: Any
    bundle: int
    idle: list[Any] = field(default_factory=list)
    doubted: float = -math.inf


@dataclass(eq=False)
class _Running(RunningJob):
    polls: dict[Any, int] = field(default_factory=dict)


def _gpu_memory() -> int:
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)


def _ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as problem:
        raise TuneError(f"trials on a cluster need Ray: {install_extra('ray')}") from problem
    return ray


# A seat: what runs jobs on a node of a cluster, as a plain class that an actor is made of.


class JobActor:
    """Runs one job at a time in a thread of its own; its methods are called from others, and speak JSON text."""

    def __init__(self, payload: bytes, device: str, threads: int | None) -> None:
        self._payload, self._device, self._threads = payload, device, threads
        self._said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._terms: Any = None
        self._store: Any = None

    def pid(self) -> int:
        return os.getpid()

    def meeting(self, world: int) -> dict[str, str]:
        """Where the processes of a split job meet, which all are on this node."""
        from weft.tune.executors.processes import open_meeting

        variables, self._store = open_meeting(world)
        return variables

    def start(self, job: str, rank: int, variables: dict[str, str], output: str) -> None:
        threading.Thread(
            target=self._run, args=(job_of(json.loads(job)), rank, variables, output), name="weft-trial", daemon=True
        ).start()

    def answer(self, prune: bool) -> None:
        self._answers.put(prune)

    def poll(self, timeout: float = 10.0) -> str:
        """What was said since the last call, waited for if nothing was."""
        found = []
        try:
            found.append(self._said.get(timeout=timeout))
            while True:
                found.append(self._said.get_nowait())
        except queue.Empty:
            return json.dumps(found)

    def _run(self, job: Job, rank: int, variables: dict[str, str], output: str) -> None:
        from weft.tune.training.run_job import run_job

        try:
            if self._terms is None:
                self._terms = unpacked(self._payload)
                prepare(self._device, self._threads)
        except Exception as problem:
            self._said.put({"say": "broken", "why": f"{type(problem).__name__}: {problem}"})
            return
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if variables else {}
        with surroundings({**variables, **ranks}), written(output):
            self._said.put({"say": "began"})
            run_job(job, self._terms, self._device, rank, self._ask, self._tell)
        self._said.put({"say": "idle", "worn": worn(self._device)})

    def _ask(self, report: Reported) -> bool:
        self._said.put({"say": "event", "event": event_message(report)})
        return self._answers.get()

    def _tell(self, ended: Ended) -> None:
        self._said.put({"say": "event", "event": event_message(ended)})
