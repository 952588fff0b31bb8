"""A function that each stage is to run in a fresh process, and how it gets there."""

from __future__ import annotations

import io
import logging
import os
import pickle
import signal
import socket
import sys
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from weft.distributed.store import ToParent, connect, die_with_parent, report_death, report_error
from weft.errors import TrainError, WeftError

STOPPED = 128 + signal.SIGTERM
"""The exit code of a stage that a signal has stopped."""


@dataclass(frozen=True, slots=True)
class Call:
    """A function of a module, with its arguments; what it returns is dropped: see `report`.

    A WeftError that it raises ends the launch as if by `report_error`. After a SIGTERM it may return or raise
    KeyboardInterrupt, as it likes; Ctrl-C does not reach it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()


def pickled(call: Call) -> bytes:
    """The call as `stage` takes it; TrainError names the part that cannot be sent."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is None and file is not None and not os.path.isfile(file):
        raise TrainError(
            f"more than one stage means new processes, and each imports the script that started it, but '{file}' is "
            "no file: save the script in one"
        )
    try:
        return _dumps(call)
    except Exception as error:
        parts = {"the function": call.function} | {f"argument {index}": part for index, part in enumerate(call.args)}
        what, problem = _culprit(parts) or ("the call", error)
        raise TrainError(_importable(f"{what} cannot be sent to them: {problem}")) from None


def stage(payload: bytes) -> None:
    """What a process that elastic spawned does; the payload comes from the parent by the pipe of multiprocessing."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all, but stopping is the parent's to say
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    logger = logging.getLogger("weft")
    logger.addHandler(ToParent(connect()))
    logger.propagate = False
    try:
        try:
            call: Call = pickle.loads(payload)
        except Exception as problem:
            raise TrainError(_importable(f"they cannot import what they are to run: {problem}")) from None
        call.function(*call.args)
    except WeftError as problem:
        report_error(connect(), problem)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(STOPPED) from None
    except Exception as problem:
        logger.exception("rank %s failed", os.environ["RANK"])
        with suppress(Exception):
            report_death(connect(timeout=10.0), int(os.environ["RANK"]), problem)
        raise SystemExit(1) from None  # torch would leave a pickle of the traceback in the folder of temporary files
    # From here elastic waits for the other stages and would not hear a SIGTERM, neither a later one nor an earlier.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        if signal.SIGTERM in reader.recv(4096):
            raise SystemExit(STOPPED)
    except BlockingIOError:
        pass


class _Pickler(pickle.Pickler):
    """Refuses what is defined where no other process can find it: in a notebook or at a prompt."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType | type) and value.__module__ == "__main__":
            main = sys.modules["__main__"]
            if getattr(main, "__spec__", None) is None and getattr(main, "__file__", None) is None:
                raise pickle.PicklingError(f"'{value.__qualname__}' is in no module, but in this session alone")
        return NotImplemented


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _culprit(parts: Mapping[str, Any]) -> tuple[str, Exception] | None:
    """The first part that cannot be pickled, looked for in values and mappings too, and what is wrong with it."""
    for name, value in parts.items():
        try:
            _dumps(value)
        except Exception as problem:
            inner = {}
            if is_dataclass(value) and not isinstance(value, type):
                inner = {f"'{item.name}'": getattr(value, item.name) for item in fields(value)}
            elif isinstance(value, dict):
                inner = {f"'{key}'": each for key, each in value.items()}
            called = getattr(value, "__qualname__", None)
            what = f"{getattr(value, '__module__', '')}.{called}" if called else f"a {type(value).__name__}"
            return _culprit(inner) or (f"{name}, {what},", problem)
    return None


def _importable(problem: str) -> str:
    return (
        f"more than one stage means new processes, and {problem}; they need importable factories: functions defined in "
        "a module, rather than in a notebook cell, inside another function or as a lambda"
    )
