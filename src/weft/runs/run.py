"""A run: one directory with its manifest, events, checkpoints and results."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from weft.errors import RunError, nearest
from weft.runs import events
from weft.runs.checkpoints import Checkpoints
from weft.runs.events import Events
from weft.utils.files import disk_errors, read_json, to_json, write_json
from weft.utils.imports import installed_version
from weft.utils.rng import key

FORMAT = 1
PARTS = frozenset({"manifest.json", "events.jsonl", "checkpoints", "results", "tensorboard", "traces", "lock"})
ASKED = dict.fromkeys(("config", "seed", "device", "data", "space"))
"""What the manifest states from the caller: config, seed, device, data fingerprint, space id."""

State = Literal["running", "finished", "stopped", "failed", "interrupted"]


class Run:
    """Use `Run.create` or `Run.open`. One process at a time writes, inside `locked()`; any number may read."""

    def __init__(self, path: Path, manifest: Mapping[str, Any], keep: int = 3) -> None:
        self.path = path
        self.events = Events(path / "events.jsonl")
        self.checkpoints = Checkpoints(path / "checkpoints", keep)
        self._manifest = dict(manifest)

    @classmethod
    def create(
        cls,
        root: Path | str,
        name: str | None = None,
        *,
        manifest: Mapping[str, Any],
        exist_ok: bool = False,
        keep: int = 3,
    ) -> Run:
        """Make the directory `root/name`; with `exist_ok`, a run that is there is opened as it is.

        The manifest is `manifest` and what `origin` and the clock know. The default name is that of `unique_name`.
        """
        created = time.gmtime()
        name = unique_name("run") if name is None else name
        path = Path(root) / _check_name(name, "run")
        with disk_errors(path, 0):
            path.mkdir(parents=True, exist_ok=True)
        file = path / "manifest.json"
        if exist_ok and file.exists():
            return cls.open(path, keep=keep)
        _check_vacant(path)
        facts = {"format": FORMAT, "name": name, "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", created)}
        with hold(path / "lock"):
            _check_vacant(path)  # another process may have been quicker
            write_json(file, {**ASKED, **origin(), **manifest, **facts})
        return cls.open(path, keep=keep)

    @classmethod
    def open(cls, path: Path | str, *, keep: int = 3) -> Run:
        """The run in a directory; `RunError` if there is none."""
        path = Path(path)
        if not (path / "manifest.json").is_file():
            near = nearest(path.name, (file.parent.name for file in path.parent.glob("*/manifest.json")))
            raise RunError(f"'{path}' is not a run: it has no manifest.json{near}")
        return cls(path, read_manifest(path), keep)

    @property
    def name(self) -> str:
        return str(self._manifest.get("name", self.path.name))

    @property
    def manifest(self) -> Mapping[str, Any]:
        return MappingProxyType(self._manifest)

    @contextmanager
    def locked(self) -> Iterator[Run]:
        """Be the run's one writer for a block, at whose end the events are flushed; `RunError` that names another."""
        with hold(self.path / "lock"):
            self.checkpoints.clean()
            try:
                yield self
            finally:
                self.events.close()

    def update_manifest(self, **fields: Any) -> None:
        """Change or add fields, in one step on disk."""
        changed = {**read_manifest(self.path), **to_json(fields)}
        write_json(self.path / "manifest.json", changed)
        self._manifest = changed

    def result(self, name: str) -> Any:
        """A saved result; `RunError` that names those there are."""
        path = self.path / "results" / f"{_check_name(name, 'result')}.json"
        if not path.is_file():
            there = (file.stem for file in path.parent.glob("*.json"))
            raise RunError(f"run '{self.name}' has no result '{name}'{nearest(name, there)}")
        return read_json(path)

    def save_result(self, name: str, obj: Any) -> Path:
        """Write or replace `results/<name>.json` in one step."""
        path = self.path / "results" / f"{_check_name(name, 'result')}.json"
        with disk_errors(path, 0):
            path.parent.mkdir(exist_ok=True)
        write_json(path, obj)
        return path

    @property
    def test_scores(self) -> dict[str, Any]:
        """Every use of the test set: `{name: {"scores": ..., "time": ...}}`."""
        return dict(self.result("test")) if (self.path / "results" / "test.json").is_file() else {}

    def record_test(self, name: str, scores: Mapping[str, Any]) -> None:
        """Record a score on the test set, and that and when it was used.

        The same score again changes nothing; another one under the same name is refused.
        """
        uses, scores = self.test_scores, to_json(scores)
        if name not in uses:
            uses[name] = {"scores": scores, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
            self.save_result("test", uses)
            self.events.append("test", name=name, scores=scores)
            self.events.flush()
        elif uses[name]["scores"] != scores:
            raise RunError(
                f"the test set was already used for '{name}' on {uses[name]['time']} with {uses[name]['scores']}, "
                f"and now gives {scores}; a test score is taken once: choose another name if the model is another"
            )

    def state(self) -> State:
        """Running means that a process holds the lock, interrupted that it vanished without an end."""
        self.events.flush()
        return state_of(self.path, events.final_event(self.events.path))


def unique_name(prefix: str) -> str:
    """A name that no other run has: `<prefix>-YYYYmmdd-HHMMSS-xxxx`."""
    tag = key("run", os.getpid(), time.time_ns()) & 0xFFFF
    return f"{prefix}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{tag:04x}"


def state_of(path: Path, end: str | None) -> State:
    """The state of the run in a directory whose events end so."""
    if is_held(path / "lock"):
        return "running"
    return next((state for state in ("finished", "stopped", "failed") if state == end), "interrupted")


def read_manifest(path: Path) -> dict[str, Any]:
    """A run's manifest; `RunError` if it is damaged or newer than this weft."""
    file = path / "manifest.json"
    manifest = read_json(file)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise RunError(f"'{file}' is not the manifest of a run; restore it or remove the directory")
    if manifest["format"] > FORMAT:
        raise RunError(f"'{file}' has format {manifest['format']} and this weft reads {FORMAT}; use a newer weft")
    return manifest


_RENAMED = {"Taught": "InPlaceDistillation", "Validate": "Validation", "Residency": "OffloadConfig"}
"""Classes of weft that had other names when older manifests were written."""


def without_modules(value: Any) -> Any:
    """A plain value in which the names of weft's own functions and classes do not say in which module they live.

    A manifest that was written before a module moved then equals one of today.

    >>> without_modules("weft.pipeline.losses.cross_entropy")
    'weft.cross_entropy'
    >>> without_modules({"loss": "weft.engine.losses:cross_entropy", "own": "mycode.nets:loss"})
    {'loss': 'weft:cross_entropy', 'own': 'mycode.nets:loss'}
    """
    if isinstance(value, Mapping):
        return {name: without_modules(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_modules(item) for item in value]
    if not isinstance(value, str):
        return value
    short = re.sub(r"\bweft(?:\.[a-z]\w*)*([.:])(?=\w)", r"weft\1", value)
    return re.sub(r"\b(" + "|".join(_RENAMED) + r")\b(?=\()", lambda match: _RENAMED[match[1]], short)


def _check_vacant(path: Path) -> None:
    if (path / "manifest.json").exists():
        raise RunError(f"'{path}' already holds a run; resume it, or choose another name")
    others = sorted({entry.name for entry in path.iterdir() if not entry.name.startswith(".")} - PARTS)
    if others:
        raise RunError(f"'{path}' holds '{others[0]}', which is not part of a run; choose another name")


def _check_name(name: str, what: str) -> str:
    if not re.fullmatch(r"\w[\w.+=@-]*", name):
        raise RunError(f"a {what} cannot be called '{name}'; use letters, digits and any of . _ + = @ -, but no '/'")
    return name


# The lock of a run: one living process holds it, and it goes with the process however that dies.

TRIES, PAUSE = 20, 0.025
"""How often a taken lock is tried, and the seconds between: someone who only looks holds it for an instant."""

_handles: set[int] = set()


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Hold the lock file for a block; `RunError` that names the holder if another holder lives."""
    with disk_errors(path, 0):
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    _handles.add(handle)
    try:
        _take(handle, path)
        try:
            yield
        finally:
            if handle in _handles:
                os.ftruncate(handle, 0)
    finally:
        if handle in _handles:  # a forked child has let go of it already
            _handles.discard(handle)
            os.close(handle)


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock file."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def _take(handle: int, path: Path) -> None:
    for left in reversed(range(TRIES)):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if left:
                time.sleep(PAUSE)
                continue
            raise RunError(
                f"run '{path.parent}' is in use by {_holder(path)}; wait for it, stop it, or use another run"
            ) from error
    with disk_errors(path, 0):
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_bytes())
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"


def _close_in_child() -> None:
    """In a forked child: close the handles, or it would keep the lock after its parent has died."""
    for handle in _handles:
        os.close(handle)
    _handles.clear()


os.register_at_fork(after_in_child=_close_in_child)


# Where a run comes from: versions, machine, commit and command, as its manifest keeps them.


def origin() -> dict[str, Any]:
    """The facts about this process that a run's manifest states; None for a fact that is not available."""
    return {
        "versions": {"python": platform.python_version()}
        | {name: installed_version(name) for name in ("weft", "torch", "numpy")},
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "git": _commit(),
        "command": sys.argv,
    }


def _commit() -> str | None:
    """The commit of the working directory, with '-dirty' if files differ from it."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


# The runs under a root, one line each: read from the manifest and both ends of the events, so a list is quick.


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One line about a run. `state` is that of `Run.state`, or "damaged" with the `problem`."""

    name: str
    state: str
    done: int
    total: int | None
    loss: float | None
    created: str | None
    path: Path
    problem: str | None = None


def list_runs(root: Path | str) -> list[RunSummary]:
    """A summary of each run in `root`, oldest first; a malformed one is listed as damaged and stops nothing.

    Steps done and loss come from events named `step` (`step` counted from 0, `loss`), the total from the newest event
    with `steps` or from the manifest's `steps` or `config.steps`.
    """
    root = Path(root)
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    summaries = [summary for path in folders if (summary := summarize(path)) is not None]
    return sorted(summaries, key=lambda summary: (summary.created or "", summary.name))


def summarize(path: Path) -> RunSummary | None:
    """The summary of one directory, or None if nothing in it belongs to a run."""
    try:
        if not any((path / part).exists() for part in PARTS):
            return None
        manifest = read_manifest(path)
        last = events.tail(path / "events.jsonl")
        ends = events.head(path / "events.jsonl") + last
        state: str = state_of(path, events.last_end(last))
    except (RunError, OSError) as error:
        return RunSummary(path.name, "damaged", 0, None, None, None, path, str(error))
    config = manifest.get("config")
    totals = [event.get("steps") for event in reversed(ends)]
    totals += [manifest.get("steps"), config.get("steps") if isinstance(config, Mapping) else None]
    created = manifest.get("created")
    steps = [event for event in ends if event.get("event") == "step" and _is_count(event.get("step"))]
    return RunSummary(
        name=str(manifest.get("name", path.name)),
        state=state,
        done=max((event["step"] + 1 for event in steps), default=0),
        total=next((total for total in totals if _is_count(total)), None),
        loss=_loss(steps),
        created=created if isinstance(created, str) else None,
        path=path,
    )


def _loss(steps: Iterable[dict[str, Any]]) -> float | None:
    """The loss of the highest step: a pipeline may finish steps in another order."""
    with_loss = [event for event in steps if "loss" in event]
    try:
        return float(max(with_loss, key=lambda event: event["step"])["loss"]) if with_loss else None
    except (TypeError, ValueError, OverflowError):
        return None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
