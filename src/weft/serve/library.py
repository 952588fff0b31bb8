"""All documents by address: made on demand, and kept until a file changes."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote

from weft.errors import ConfigError, WeftError, nearest
from weft.serve import overview, runs
from weft.serve.event_log import Lru

log = logging.getLogger("weft.serve")

VIEWS = ("curves", "pipeline", "search", "tune")
"""The views of a run."""

MODULES = {"tune": "study"}
"""The modules under weft.serve.views that make their documents, where their names differ."""


class NotFound(WeftError):
    """An address that leads to nothing."""


@dataclass(frozen=True, slots=True)
class Document:
    """JSON, and a tag that only equal JSON has."""

    body: bytes
    tag: str


@dataclass(frozen=True, slots=True)
class RunSource:
    """The directory of a run, from which its documents are made."""

    path: Path

    def signature(self) -> str:
        """A text that changes whenever a document would."""
        return runs.signature(self.path)

    def summary(self, name: str) -> dict[str, Any]:
        """The line about the run in the list."""
        with errors_as_weft("the run"):
            runs.signature(self.path)  # a run with a link that leads out is not read
            views = [view for view in VIEWS if _present(view, self.path)]
            return overview.summary(self.path, name, views)

    def details(self) -> dict[str, Any]:
        """The configuration and the manifest of the run."""
        return overview.details(self.path)

    def view(self, view: str, query: Mapping[str, Any]) -> dict[str, Any]:
        """The document of a view."""
        with errors_as_weft(view):
            runs.signature(self.path)
            found: dict[str, Any] = _module(view).document(self.path, **query)
            return found


@contextmanager
def errors_as_weft(what: str) -> Iterator[None]:
    """Turns every error of reading the files of a run into a WeftError of one line."""
    try:
        yield
    except WeftError:
        raise
    except Exception as problem:
        log.debug("%s cannot be shown", what, exc_info=True)
        raise WeftError(f"{what} cannot be shown: {type(problem).__name__}: {problem}") from problem


def encode(value: Any) -> Document:
    """The document of a value; numbers that JSON lacks become null."""
    body = json.dumps(safe(value), separators=(",", ":"), allow_nan=False).encode()
    return Document(body, hashlib.sha256(body).hexdigest()[:32])


def safe(value: Any) -> Any:
    """The same value in the types of JSON.

    >>> safe({"loss": float("nan"), "at": (1, Path("a"))})
    {'loss': None, 'at': [1, 'a']}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [safe(item) for item in value]
    return safe(value.tolist()) if hasattr(value, "tolist") else str(value)


def parse_query(view: str, query: Mapping[str, str]) -> dict[str, Any]:
    """The query of a view; `NotFound` if there is no such view, `ConfigError` if a value cannot be read.

    >>> parse_query("pipeline", {"from": "1.5", "color": "red"})
    {'from': 1.5}
    """
    if view not in VIEWS:
        raise NotFound(f"there is no view '{view}'{nearest(view, VIEWS)}")
    known = QUERY.get(view, {})
    return {name: known[name](value) for name, value in query.items() if name in known}


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"'{text[:40]}' is no number of seconds: write it like from=1.5")
    return value


QUERY: dict[str, dict[str, Callable[[str], Any]]] = {
    "pipeline": {"from": _seconds, "to": _seconds},
    "search": {"name": str},
}
"""The queries of each view and how they are read; others are ignored."""


def _present(view: str, run: Path) -> bool:
    try:
        return bool(_module(view).present(run))
    except ImportError:
        raise
    except Exception:  # the files of this view are damaged; those of others may be good
        log.debug("%s of '%s' cannot be shown", view, run, exc_info=True)
        return False


def _module(view: str) -> Any:
    return import_module(f"weft.serve.views.{MODULES.get(view, view)}")


MANY = 20
"""With more runs than this, an error suggests no other name."""

Address = tuple[str, ...]
"""The parts of a path after `/api`: ("runs",), ("runs", "conv"), ("runs", "conv", "curves") or ("plans", "gpt")."""


def url(address: Address) -> str:
    """The path of an address as the page writes it (encodeURIComponent).

    >>> url(("runs", "a b", "curves"))
    '/api/runs/a%20b/curves'
    """
    return "/".join(["/api", *(quote(part, safe="!*'()") for part in address)])


class Library:
    """The documents about the runs that `sources` lists by name, and the plans in `folder`. Threads may share it."""

    def __init__(self, sources: Callable[[], Mapping[str, RunSource]], title: str, folder: Path | None = None) -> None:
        self.title = title
        self._sources = sources
        self._plans = folder
        self._made: Lru[Document] = Lru(64)
        self._known: Lru[dict[str, Any]] = Lru(4096)
        self._revisions: dict[str, tuple[str, int]] = {}
        self._lock = threading.Lock()

    @classmethod
    def under(cls, root: Path) -> Library:
        """The library of all runs in a directory, which may come and go."""
        return cls(
            lambda: {name: RunSource(path) for name, path in runs.runs_in(root).items()},
            str(root),
            root / "plans",
        )

    def get(self, address: Address, query: Mapping[str, str] | None = None) -> Document:
        """The document at an address; `NotFound` if there is none, another `WeftError` if it cannot be made."""
        match address:
            case ("runs",):
                return self._made.get(address, self._all(), lambda: encode(self._list()))
            case ("runs", name):
                self._find(name)
                return self._made.get(address, self._all(), lambda: encode(self._run(name)))
            case ("runs", name, view):
                source, options = self._find(name), parse_query(view, query or {})
                key = (*address, *sorted(options.items()))
                return self._made.get(key, _signature(source), lambda: encode(source.view(view, options)))
            case ("plans", name):
                return self._made.get(address, self.plans_signature(), lambda: encode(self._plan(name)))
        raise NotFound(f"there is nothing at '{url(address)}'")

    def signatures(self) -> dict[str, str]:
        """A text for each run that changes with its files."""
        return {name: _signature(source) for name, source in self._sources().items()}

    def plans_signature(self) -> str:
        """A text that changes with the plans."""
        try:
            return runs.folder_signature(self._plans) if self._plans is not None else ""
        except (WeftError, OSError) as problem:
            return str(problem)

    def revision(self, name: str, signature: str) -> int:
        """The number of changes of a run that were seen, counted from 1."""
        with self._lock:
            before, count = self._revisions.get(name, ("", 0))
            self._revisions[name] = (signature, count + (signature != before))
            return self._revisions[name][1]

    def _find(self, name: str) -> RunSource:
        there = self._sources()
        if name not in there:  # a name is looked up and never becomes a path
            raise NotFound(f"there is no run '{name}' here{nearest(name, there) if len(there) < MANY else ''}")
        return there[name]

    def _list(self) -> dict[str, Any]:
        return {"root": self.title, "runs": self._lines(), "plans": self._plan_list()}

    def _lines(self) -> list[dict[str, Any]]:
        return overview.with_duplicates([self._line(name, source) for name, source in self._sources().items()])

    def _line(self, name: str, source: RunSource) -> dict[str, Any]:
        signature = _signature(source)

        def make() -> dict[str, Any]:
            try:
                return source.summary(name)
            except (WeftError, OSError) as problem:
                return overview.damaged(name, str(problem))

        return {**self._known.get(name, signature, make), "revision": self.revision(name, signature)}

    def _run(self, name: str) -> dict[str, Any]:
        line = next((line for line in self._lines() if line["name"] == name), None)
        if line is None or line["state"] == "damaged":
            raise WeftError(line["reason"] if line else f"run '{name}' was just removed")
        with errors_as_weft(f"run '{name}'"):
            return {**line, **self._find(name).details()}

    def _plan_list(self) -> list[dict[str, Any]]:
        from weft.serve.views import plan as plans

        return plans.list_plans(self._plans) if self._plans is not None else []

    def _plan(self, name: str) -> dict[str, Any]:
        there = {path.stem: path for path in self._plans.glob("*.json")} if self._plans is not None else {}
        if name not in there:
            raise NotFound(f"there is no plan '{name}' here{nearest(name, there) if len(there) < MANY else ''}")
        from weft.serve.views import plan as plans

        with errors_as_weft(f"plan '{name}'"):
            return plans.document(there[name])

    def _all(self) -> str:
        return runs.digest((sorted(self.signatures().items()), self.plans_signature()))


def _signature(source: RunSource) -> str:
    try:
        return source.signature()
    except (WeftError, OSError) as problem:
        return f"damaged: {problem}"
