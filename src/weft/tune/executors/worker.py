"""A worker: a process that gets jobs as lines of JSON, runs one after another, and reports what happens."""

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
from weft.tune.executors.processes import JsonConnection, environment_variables, new_process_group
from weft.tune.jobs import Ended, Job, Reported, event_to_json, job_from_json

LEFTOVER = 128 * 2**20
"""Bytes of a device that a worker may keep between two jobs: workspaces of libraries stay for good."""


def pack_spec(spec: Any) -> bytes:
    """What a worker needs once, for multiprocessing's own pipe; TuneError names what another process cannot import."""
    try:
        return pickled(Call(_same, (spec.objective, spec)))
    except TrainError as problem:
        raise TuneError(str(problem).replace("more than one stage means new processes", _WHY)) from None


def unpack_spec(payload: bytes) -> Any:
    """What ``pack_spec`` packed, in the process that it was packed for."""
    return pickle.loads(payload).args[1]


def run_worker(end: socket.socket, payload: bytes, device: str, threads: int | None) -> None:
    """What the process does, until the other end of its connection is gone."""
    new_process_group()
    connection = JsonConnection(end)
    try:
        spec = unpack_spec(payload)
        prepare_worker(device, threads)
    except Exception as problem:
        connection.send({"type": "broken", "reason": f"{type(problem).__name__}: {problem}"})
        return
    with suppress(OSError):
        connection.send({"type": "ready"})
        while (message := connection.receive()) is not None and message["type"] == "job":
            with environment_variables(message["environment"]), redirect_output(message["output"]):
                job = job_from_json(message["job"])
                connection.send({"type": "began", "job": job.id})
                _run_job(job, spec, device, message["rank"], connection)
            connection.send({"type": "idle", "job": job.id, "leaked": has_leaked_memory(device)})


def prepare_worker(device: str, threads: int | None) -> None:
    """Before the first job: the number of threads, which results may depend on, and the device."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    if device.startswith("cuda"):
        use_expandable_segments()
        torch.cuda.set_device(device)
    gc.freeze()  # what is imported stays: to look through it after every trial takes longer than many a trial


def has_leaked_memory(device: str) -> bool:
    """Whether the last job left memory behind that cannot be given back, such as that of a capture which broke off."""
    if not device.startswith("cuda"):
        return False
    import torch

    return int(torch.cuda.memory_reserved(device)) > LEFTOVER


def _run_job(job: Job, spec: Any, device: str, rank: int, connection: JsonConnection) -> None:
    from weft.tune.training.run_job import run_job

    def ask(report: Reported) -> bool:
        connection.send({"type": "event", "event": event_to_json(report)})
        answer = connection.receive()
        if answer is None:
            os._exit(1)  # the process that runs the study is gone
        return bool(answer["prune"])

    def tell(ended: Ended) -> None:
        sys.stdout.flush()
        connection.send({"type": "event", "event": event_to_json(ended)})

    run_job(job, spec, device, rank, ask, tell)


@contextmanager
def redirect_output(path: str | None) -> Iterator[None]:
    """What is printed, even by code that is not Python, is appended to a file; nowhere if None."""
    originals = [os.dup(number) for number in (1, 2)]
    try:
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for number in (1, 2):
            os.dup2(handle, number)
        os.close(handle)
        yield
    finally:
        for stream, number, old in zip((sys.stdout, sys.stderr), (1, 2), originals, strict=True):
            with suppress(Exception):
                stream.flush()
            os.dup2(old, number)
            os.close(old)


def _same(*given: Any) -> Any:
    return given


_WHY = "trials run in processes of their own"
