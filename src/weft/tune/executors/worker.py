"""A worker: a process that takes jobs as lines of JSON, runs one after another, and tells what happens."""

from __future__ import annotations

import gc
import os
import pickle
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from weft.distributed.remote_call import Call, pickled
from weft.errors import TrainError, TuneError
from weft.tune.devices import use_expandable_segments
from weft.tune.executors.connection import JsonConnection, event_message, job_of
from weft.tune.executors.processes import lead, surroundings
from weft.tune.jobs import Ended, Job, Reported

LEFT = 128 * 2**20
"""Bytes of a device that a worker may keep between two jobs: workspaces of libraries stay for good."""


def packed(terms: Any) -> bytes:
    """What a worker needs once, for multiprocessing's own pipe; TuneError names what another process cannot import."""
    try:
        return pickled(Call(_same, (terms.objective, terms)))
    except TrainError as problem:
        raise TuneError(str(problem).replace("more than one stage means new processes", _WHY)) from None


def unpacked(payload: bytes) -> Any:
    """The terms that ``packed`` packed, in the process that they were made for."""
    return pickle.loads(payload).args[1]


def serve(end: socket.socket, payload: bytes, device: str, threads: int | None) -> None:
    """What the process does, until it is told to quit or the other end of its line is gone."""
    lead()
    line = JsonConnection(end)
    try:
        terms = unpacked(payload)
        prepare(device, threads)
    except Exception as problem:
        line.send({"say": "broken", "why": f"{type(problem).__name__}: {problem}"})
        return
    with suppress(OSError):
        line.send({"say": "ready"})
        while (message := line.receive()) is not None and message["say"] == "job":
            with surroundings(message["environment"]), written(message["output"]):
                job = job_of(message["job"])
                line.send({"say": "began", "job": job.id})
                _take(job, terms, device, message["rank"], line)
            line.send({"say": "idle", "job": job.id, "worn": worn(device)})


def prepare(device: str, threads: int | None) -> None:
    """Before the first job: the number of threads, which results may depend on, and the device."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    if device.startswith("cuda"):
        use_expandable_segments()
        torch.cuda.set_device(device)
    gc.freeze()  # what is imported stays: to look through it after every trial takes longer than many a trial


def worn(device: str) -> bool:
    """Whether the last job left memory behind that cannot be given back, such as that of a capture which broke off."""
    if not device.startswith("cuda"):
        return False
    import torch

    return int(torch.cuda.memory_reserved(device)) > LEFT


def _take(job: Job, terms: Any, device: str, rank: int, line: JsonConnection) -> None:
    from weft.tune.training.run_job import run_job

    def ask(report: Reported) -> bool:
        line.send({"say": "event", "event": event_message(report)})
        answer = line.receive()
        if answer is None:
            os._exit(1)  # the driver is gone
        return bool(answer["prune"])

    def tell(ended: Ended) -> None:
        sys.stdout.flush()
        line.send({"say": "event", "event": event_message(ended)})

    run_job(job, terms, device, rank, ask, tell)


@contextmanager
def written(path: str | None) -> Iterator[None]:
    """What is printed, even by code that is not Python, goes to the end of a file; nowhere if None."""
    kept = [os.dup(number) for number in (1, 2)]
    try:
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for number in (1, 2):
            os.dup2(handle, number)
        os.close(handle)
        yield
    finally:
        for stream, number, old in zip((sys.stdout, sys.stderr), (1, 2), kept, strict=True):
            with suppress(Exception):
                stream.flush()
            os.dup2(old, number)
            os.close(old)


def _same(*given: Any) -> Any:
    return given


_WHY = "trials run in processes of their own"
