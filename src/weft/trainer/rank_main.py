"""weft.train on several stages: a parent that starts them, and what each of them does."""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from weft.distributed.env import DistEnv, read_env
from weft.distributed.heartbeat import Heartbeat
from weft.distributed.remote_call import Call, pickled
from weft.distributed.store import (
    PARENT,
    ControlStore,
    EventsToParent,
    asked_to_stop,
    connect,
    report,
    report_death,
    report_self,
    set_hang,
)
from weft.distributed.transport import PeerLost, Transport
from weft.errors import RunError, TrainError, WeftError, place_in_own_code
from weft.offload.layer_memory import MemoryBlock
from weft.runs import Run
from weft.runs.events import Callback
from weft.trace.recorder import TraceRecorder
from weft.trainer.checkpointing import load_initial
from weft.trainer.config import checkpoint_every, validation_of
from weft.trainer.manifest import describe_run, opened
from weft.trainer.partitioning import LaunchSpec, RankPart, partition
from weft.trainer.pipeline_engine import PipelineEngine, RankLoop
from weft.trainer.trainer import Trainer, stop_requests

log = logging.getLogger("weft.pipeline")

LOST = 70
"""The exit code of a stage that stops because another one is lost; all of them are then started again."""

SILENCE = "WEFT_SILENCE"
"""The variable that says after how many seconds without a sign of life a stage is given up; 20 if not set."""

GRACE = 0.3
"""Seconds before a stage follows one that is lost, so that whoever started them sees which was the first."""

_WAIT = timedelta(minutes=30)


def run_stages(
    count: int, job: LaunchSpec, open_it: Callable[[], Run], callbacks: Sequence[Callback]
) -> tuple[Run, str]:
    """Starts the stages of a job on this machine; the run, which is opened once all is ready, and its fingerprint."""
    call = Call(_work, (job, bool(callbacks)))
    pickled(call)  # a mistake shows before there is a run
    cores = os.cpu_count() or 1
    enough = max(1, cores // count)
    if job.threads > enough and job.execution.device == "cpu":
        shares = f"{count} stages of {job.threads} threads share {cores} cores"
        log.warning("%s; torch.set_num_threads(%d) before training would be faster", shares, enough)
    from weft.distributed.launcher import launch  # with torch elastic, which a run on one device does not need

    run = open_it()
    new = not run.events.path.exists()
    restarts = job.execution.max_restarts
    try:
        outcome = launch(count, call, restarts=restarts, threads=job.threads, callbacks=callbacks)
    except BaseException:
        if new and not run.events.path.exists():  # nothing has begun that could go on, and the name is free again
            shutil.rmtree(run.path, ignore_errors=True)
        raise
    return run, str(outcome["fingerprint"])


def _work(job: LaunchSpec, sends_events: bool) -> None:
    me = read_env()
    assert me is not None
    try:
        run_stage(job, me, [EventsToParent(connect())] if sends_events and me.rank == 0 else ())
    except (WeftError, OSError, dist.DistError):
        raise  # of these, all but the first may be gone at the next start
    except Exception as problem:
        if os.environ.get("WEFT_DEBUG"):
            log.exception("rank %d failed", me.rank)
        place = place_in_own_code(problem)
        where = f" ({place})" if place else "; WEFT_DEBUG=1 shows where"
        text = " ".join(str(problem).split())
        raise TrainError(f"rank {me.rank} failed: {type(problem).__name__}: {text}{where}") from problem


def run_stage(job: LaunchSpec, me: DistEnv, callbacks: Sequence[Callback] = ()) -> tuple[Path, str]:
    """Trains one stage of a job to its end; the run's directory and the fingerprint, the same on every stage.

    Raises KeyboardInterrupt after a checkpoint where the user stopped the run. A lost neighbour ends the process with
    exit code 70, since whoever started the stages has to start all of them again.
    """
    torch.set_num_threads(job.threads)
    quiet = silence()
    # Measuring a large supernet takes its time; a stage that hangs is seen by the heartbeat.
    store = connect(timeout=3600.0)
    report_self(store, me.rank)

    def give_up(rank: int, message: str) -> None:
        """A stage hangs: this one cannot go on either, whatever it waits for."""
        with suppress(Exception):  # nothing may keep it from its end
            log.error("%s; rank %d stops", message, me.rank)
            if rank >= 0:
                set_hang(store.clone(), rank, message)  # type: ignore[attr-defined]
        os._exit(LOST)

    try:
        with closing(Heartbeat(store, me.rank, me.world, give_up, silence=quiet)) as heartbeat:
            return _take_part(job, me, callbacks, ControlStore(store, me.rank, me.world), heartbeat)
    except PeerLost as lost:
        _leave(me.rank, lost, store)


def _take_part(
    job: LaunchSpec, me: DistEnv, callbacks: Sequence[Callback], store: ControlStore, heartbeat: Heartbeat
) -> tuple[Path, str]:
    """Divides the supernet with the others, finds them, and trains."""
    device = _device(torch.device(job.execution.device), me)
    part = partition(job, store, device, restarted=me.restarts > 0)
    described = describe_run(part.chain, part.data, part.config, part.execution, job.config.init_from)
    divided = {"cut": part.cut, "max_in_flight": [policy.max_in_flight for policy in part.policies]}
    store.assert_same_config({**described, **divided, "torch": torch.__version__})
    engine = PipelineEngine(part.chain, part.data, part.config, part.execution, store, part.cut, part.policies)
    trainer = Trainer(part.chain, part.data, part.config, engine, store, part.extremes, validation_of(job.run))
    load_initial(part.chain, job.config.init_from, partial=True)
    engine.start_offload(trainer.subnets)
    transport = _connect(store.store, me, device)
    with _opened(job, me, store, described, device) as (run, step), stop_requests() as asked:
        trainer.open(run, callbacks if me.rank == 0 else (), step)
        tracer = _start_tracer(run, me, part, engine) if part.execution.trace else None
        engine.loop = RankLoop(transport, heartbeat, tracer, partial(_stop_wanted, store.store))
        try:
            digest = trainer.run_to_end(checkpoint_every(job.config, job.run), asked)
        except KeyboardInterrupt:
            transport.close()
            raise
        finally:
            if tracer is not None:
                tracer.close()
        if me.rank == 0 and PARENT in os.environ:
            report(store.store, {"run": str(run.path), "fingerprint": digest})
    transport.close()
    return run.path, digest


def _start_tracer(run: Run, me: DistEnv, part: RankPart, engine: PipelineEngine) -> TraceRecorder:
    tracer = TraceRecorder(run.path / "traces" / f"stage{me.rank}.jsonl", me.rank)
    spans = part.simulated if me.rank == 0 else None
    tracer.start(me.restarts, me.world, part.cut, part.config.microbatches, spans)
    if engine.offload is not None:
        device = engine.offload.device

        def changed(state: str, block: MemoryBlock) -> None:
            if block is block.layer.main:
                tracer.memory(block.layer.weights.layer.name, state, time.time(), device.usage())

        device.on_change = changed
    return tracer


@contextmanager
def _opened(
    job: LaunchSpec, me: DistEnv, store: ControlStore, described: Mapping[str, Any], device: torch.device
) -> Iterator[tuple[Run, int | None]]:
    """The run's directory, locked by stage 0, and the step that it goes on from (None: it begins)."""
    if me.rank > 0:
        found = store.get("run")
        yield Run.open(found["path"], keep=job.run.keep_checkpoints), found["step"]
        return
    restarted = me.restarts > 0
    if restarted and job.run.name is None:
        raise RunError("the stages were started again, but the run has no name to be found by: give run='...'")
    with opened(job.run, described, device, job.resume or restarted) as (run, step):
        store.set("run", {"path": str(run.path.resolve()), "step": step})
        yield run, step


def _device(asked: torch.device, me: DistEnv) -> torch.device:
    if asked.type != "cuda":
        return asked
    # More stages than devices share them in turn.
    device = torch.device("cuda", me.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _stop_wanted(store: Any) -> bool:
    """After a signal: True if the user wants to stop; if all stages are about to start again, this one ends."""
    if asked_to_stop(store):
        return True
    raise SystemExit(LOST)


def _connect(store: c10d.Store, me: DistEnv, device: torch.device) -> Transport:
    try:
        meeting = c10d.PrefixStore("gloo", store)
        dist.init_process_group("gloo", store=meeting, rank=me.rank, world_size=me.world, timeout=_WAIT)
        # NCCL wants a device for every process; stages that share one go through the host.
        own = device.type == "cuda" and me.local_world <= torch.cuda.device_count() and dist.is_nccl_available()
        everywhere = all(ControlStore(store, me.rank, me.world).gather("own device", own))
        return Transport(me.rank, me.world, device, "nccl" if everywhere else None)
    except RuntimeError as problem:  # another stage ended meanwhile; gloo does not say which
        log.error("rank %d found no way to the others and stops: %s", me.rank, str(problem).splitlines()[0])
        os._exit(LOST)


def silence() -> float:
    """Seconds without a sign of life after which a stage counts as lost."""
    text = os.environ.get(SILENCE, "20")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1.0 < seconds < math.inf:  # a stage gives a sign every second
        raise TrainError(f"{SILENCE}={text!r} in the environment: it is a number of seconds above 1")
    return seconds


def _leave(stage: int, lost: PeerLost, store: c10d.Store) -> NoReturn:
    """A neighbour is gone, and this stage with it."""
    with suppress(Exception):  # the parent may be gone as well
        if not store.check(["error"]):  # else the neighbour has said why, and nothing is started again
            log.error("%s; rank %d stops. All go on from the last checkpoint when they are started again", lost, stage)
            report_death(store, stage, lost)
            time.sleep(GRACE)
    logging.shutdown()
    os._exit(LOST)  # torch's own goodbye would wait for the dead
