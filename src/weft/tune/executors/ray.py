"""Jobs on the nodes of a Ray cluster: actors in the placement group of a node's devices run them.

    placement group of node A   | bundle 0: GPU 0 |  | bundle 1: GPU 1 |     one bundle a device, all on one node
    actors in the bundles       | actor actor     |  | actor           |     a trial on two devices: an actor in each

Ray counts whole devices and their memory, and gives them to no one else; the packer decides how trials share one.
Results and messages are JSON text. The study's directory must lie where every node sees it.
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
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from weft.errors import TuneError, install_extra
from weft.tune.executors.local import RunningJob
from weft.tune.executors.worker import (
    has_leaked_memory,
    open_rendezvous,
    pack_spec,
    prepare_worker,
    run_attempt,
    unpack_spec,
)
from weft.tune.jobs import (
    Device,
    Ended,
    Event,
    Job,
    Lost,
    Reported,
    event_from_json,
    event_to_json,
    job_from_json,
)

MEMORY = "weft_memory_mib"
"""The custom resource of a node that says how much memory each of its devices has, in MiB."""

LOOK = 2.0
"""Seconds between two looks at which nodes there are."""

DOUBT = 5.0
"""Seconds for which a device whose actor cannot be reached is left alone."""

log = logging.getLogger("weft.tune")


class RayExecutor:
    """An `Executor` on a Ray cluster: the one at RAY_ADDRESS, or a new one on this machine.

    A node's devices are its GPUs, or one CPU device where it has none; a node that comes later brings more.
    """

    def __init__(self, spec: Any, *, threads: int = 1) -> None:
        self._ray = _ray()
        self._own = not self._ray.is_initialized()
        if self._own:
            quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": None}
            try:
                self._ray.init(**quiet)
            except (ConnectionError, ValueError, RuntimeError) as problem:
                reason = " ".join(str(problem).split())[:200]
                raise TuneError(f"no Ray cluster can be reached or started: {reason}; check RAY_ADDRESS") from None
        self._payload, self._threads = pack_spec(spec), threads
        self._devices: list[_RayDevice] = []
        self._jobs: dict[str, _RunningRayJob] = {}
        self._events: list[Event] = []
        self._looked = -math.inf
        self._discover()
        if not self._devices:
            raise TuneError("the Ray cluster has no node with a CPU or GPU that is free for trials")

    @property
    def devices(self) -> Sequence[Device]:
        if time.monotonic() - self._looked > LOOK:
            self._discover()
        return tuple(device.device for device in self._devices)

    def start(self, job: Job) -> None:
        actors = []
        for index in job.devices:
            idle = self._devices[index].idle
            actors.append(idle.pop() if idle and len(job.devices) == 1 else self._start_actor(index))
        running = self._jobs[job.id] = _RunningRayJob(job, actors)
        rendezvous: Any = actors[0].rendezvous.remote(len(actors)) if len(actors) > 1 else {}
        for rank, actor in enumerate(actors):
            actor.start.remote(json.dumps(asdict(job)), rank, rendezvous)
        running.polls = {actor.poll.remote(): rank for rank, actor in enumerate(actors)}

    def answer(self, job: str, trial: int, prune: bool) -> None:
        if job in self._jobs:
            self._jobs[job].workers[0].answer.remote(prune)

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
                    self._receive(refs[ref], ref)
            else:
                time.sleep(max(0.0, min(due - now, 0.2)))
            self._check_time()
            if time.monotonic() >= until:
                break
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        for running in list(self._jobs.values()):
            self._kill(running)
        self._jobs.clear()
        for device in self._devices:
            for actor in device.idle:
                self._kill_actor(actor)
            with suppress(Exception):
                self._ray.util.remove_placement_group(device.group)
        self._devices.clear()
        if self._own:
            self._ray.shutdown()

    def _receive(self, running: _RunningRayJob, ref: Any) -> None:
        rank = running.polls.pop(ref)
        try:
            messages = json.loads(self._ray.get(ref))
        except Exception as problem:  # the actor, its worker or its node is gone, in Ray's many words
            self._lose(running, problem)
            return
        idle = leaked = False
        for message in messages:
            kind = message["type"]
            if kind == "began":
                running.begin()
            elif kind == "broken":
                raise TuneError(
                    f"a node cannot import what it is to run: {message['reason']}; install it on every node"
                )
            elif kind == "idle":
                idle, leaked = True, message["leaked"]
            else:
                self._handle(running, event_from_json(message["event"]))
        if leaked and len(running.workers) == 1:
            self._kill_actor(running.workers[0])
        elif idle and len(running.workers) == 1:
            self._devices[running.job.devices[0]].idle.append(running.workers[0])
        elif not idle:
            running.polls[running.workers[rank].poll.remote()] = rank

    def _handle(self, running: _RunningRayJob, event: Event) -> None:
        if running.job.id not in self._jobs:
            return
        if isinstance(event, Ended) and event.state == "failed" and len(running.workers) > 1:
            try:  # it may only have noticed that another of its processes is gone
                self._ray.get([actor.pid.remote() for actor in running.workers], timeout=5)
            except Exception as problem:
                self._lose(running, problem)
                return
        self._events.append(event)
        if running.is_over(event):
            del self._jobs[running.job.id]
            if len(running.workers) > 1:
                self._kill(running)

    def _lose(self, running: _RunningRayJob, problem: Exception) -> None:
        if self._jobs.pop(running.job.id, None) is not None:
            reason = next(iter(str(problem).strip().splitlines()), type(problem).__name__)
            self._events.append(Lost(running.job.id, f"its actor is gone: {reason[:160]}"))
        self._kill(running)
        if isinstance(problem, self._ray.exceptions.ActorUnavailableError):
            # Mostly its whole node is gone, which Ray will know in a while: nothing is started there until then.
            for device in running.job.devices:
                self._devices[device].doubted = time.monotonic() + DOUBT
        self._looked = -math.inf

    def _check_time(self) -> None:
        now = time.monotonic()
        for running in list(self._jobs.values()):
            if now >= running.deadline:
                self.stop(running.job.id)
                self._events += running.timeouts(now)
        if now - self._looked > LOOK:
            self._discover()

    def _start_actor(self, index: int) -> Any:
        found = self._devices[index]
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=found.group, placement_group_bundle_index=found.bundle
        )
        gpu = found.device.name.startswith("cuda")
        options = {"num_cpus": 0, "num_gpus": 1 / 64 if gpu else 0, "max_concurrency": 4, "max_restarts": 0}
        actor = self._ray.remote(JobActor).options(**options, scheduling_strategy=strategy)
        return actor.remote(self._payload, "cuda:0" if gpu else "cpu", None if gpu else self._threads)

    def _kill(self, running: _RunningRayJob) -> None:
        running.polls.clear()
        for actor in running.workers:
            self._kill_actor(actor)

    def _kill_actor(self, actor: Any) -> None:
        with suppress(Exception):
            self._ray.kill(actor, no_restart=True)

    def _discover(self) -> None:
        """The devices of nodes that are gone stay, marked as away; those of new nodes come at the end."""
        self._looked = time.monotonic()
        nodes = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        for device in self._devices:
            gone = device.device.node not in nodes or device.doubted > self._looked
            device.device = replace(device.device, gone=gone)
            if device.device.gone:
                device.idle.clear()
        known = {device.device.node for device in self._devices}
        for id, node in nodes.items():
            if id not in known:
                self._devices += self._reserve(id, node["Resources"])

    def _reserve(self, node: str, resources: dict[str, float]) -> list[_RayDevice]:
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
        return [_RayDevice(Device(name, size, node), group, index) for index, name in enumerate(names)]


@dataclass(eq=False)
class _RayDevice:
    device: Device
    group: Any
    bundle: int
    idle: list[Any] = field(default_factory=list)
    doubted: float = -math.inf


@dataclass(eq=False)
class _RunningRayJob(RunningJob):
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


class JobActor:
    """The class of the actors: runs one job at a time in a thread of its own; its methods are called from others, and
    take and return JSON text."""

    def __init__(self, payload: bytes, device: str, threads: int | None) -> None:
        self._payload, self._device, self._threads = payload, device, threads
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._spec: Any = None
        self._store: Any = None

    def pid(self) -> int:
        return os.getpid()

    def rendezvous(self, world: int) -> dict[str, str]:
        """The variables by which the processes of a split job, all on this node, find each other."""
        variables, self._store = open_rendezvous(world)
        return variables

    def start(self, job: str, rank: int, rendezvous: dict[str, str]) -> None:
        given = (job_from_json(json.loads(job)), rank, rendezvous)
        threading.Thread(target=self._run, args=given, name="weft-trial", daemon=True).start()

    def answer(self, prune: bool) -> None:
        self._answers.put(prune)

    def poll(self, timeout: float = 10.0) -> str:
        """The messages since the last call, waited for if there are none."""
        found = []
        try:
            found.append(self._messages.get(timeout=timeout))
            while True:
                found.append(self._messages.get_nowait())
        except queue.Empty:
            return json.dumps(found)

    def _run(self, job: Job, rank: int, rendezvous: dict[str, str]) -> None:
        try:
            if self._spec is None:
                self._spec = unpack_spec(self._payload)
                prepare_worker(self._device, self._threads)
        except Exception as problem:
            self._messages.put({"type": "broken", "reason": f"{type(problem).__name__}: {problem}"})
            return
        self._messages.put({"type": "began"})
        run_attempt(job, self._spec, self._device, rank, rendezvous, self._ask, self._tell)
        self._messages.put({"type": "idle", "leaked": has_leaked_memory(self._device)})

    def _ask(self, report: Reported) -> bool:
        self._messages.put({"type": "event", "event": event_to_json(report)})
        return self._answers.get()

    def _tell(self, ended: Ended) -> None:
        self._messages.put({"type": "event", "event": event_to_json(ended)})
