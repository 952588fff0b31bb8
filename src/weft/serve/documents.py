"""Documents about one run: JSON, a pure function of what lies in its directory, be it live, over or in a report."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from weft.errors import ConfigError, WeftError, nearest
from weft.serve import listing, overview

log = logging.getLogger("weft.serve")

VIEWS = {"curves": "curves", "pipeline": "pipeline.document", "search": "search.document", "tune": "study.document"}
"""The views of a run, and the modules under weft.serve that make their documents."""


class Absent(WeftError):
    """There is nothing at an address."""


@dataclass(frozen=True, slots=True)
class Document:
    """JSON, and a tag that only equal JSON has."""

    body: bytes
    tag: str


class Source(Protocol):
    """What documents are made from: the directory of a run, or a study that lies elsewhere."""

    def signature(self) -> str:
        """A word that changes whenever a document would."""

    def summary(self, name: str) -> dict[str, Any]:
        """One line, listed under this name."""

    def details(self) -> dict[str, Any]:
        """What is said beside the line where one run is looked at."""

    def view(self, view: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The document of a view."""


@dataclass(frozen=True, slots=True)
class Directory:
    """A run, by its directory."""

    path: Path

    def signature(self) -> str:
        return listing.signature(self.path)

    def summary(self, name: str) -> dict[str, Any]:
        with told("the run"):
            listing.signature(self.path)  # nothing is read of a run with a link that leads out
            views = [view for view in VIEWS if _present(view, self.path)]
            return overview.summary(self.path, name, views)

    def details(self) -> dict[str, Any]:
        return overview.details(self.path)

    def view(self, view: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        with told(view):
            listing.signature(self.path)
            found: dict[str, Any] = _module(view).document(self.path, **asked)
            return found


@contextmanager
def told(what: str) -> Iterator[None]:
    """Around what reads the files of a run: whatever is wrong in them becomes one line."""
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


def asked_of(view: str, query: Mapping[str, str]) -> dict[str, Any]:
    """What is asked of a view; `Absent` if there is no such view, `ConfigError` if a value cannot be read.

    >>> asked_of("pipeline", {"from": "1.5", "color": "red"})
    {'from': 1.5}
    """
    if view not in VIEWS:
        raise Absent(f"there is no view '{view}'{nearest(view, VIEWS)}")
    known = QUERY.get(view, {})
    return {name: known[name](value) for name, value in query.items() if name in known}


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"'{text[:40]}' stands where seconds are expected, such as from=1.5")
    return value


QUERY: dict[str, dict[str, Callable[[str], Any]]] = {
    "pipeline": {"from": _seconds, "to": _seconds},
    "search": {"name": str},
}
"""What may be asked of a view, and how it is read; other words are passed over."""


def _present(view: str, run: Path) -> bool:
    try:
        return bool(_module(view).present(run))
    except ImportError:
        raise
    except Exception:  # its files are damaged, and the others may be whole
        log.debug("%s of '%s' cannot be shown", view, run, exc_info=True)
        return False


def _module(view: str) -> Any:
    return import_module(f"weft.serve.{VIEWS[view]}")
