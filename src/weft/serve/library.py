"""All documents by address: made on demand, and kept until a file changes."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from weft.errors import WeftError, nearest
from weft.serve import overview, runs
from weft.serve.event_log import Lru
from weft.serve.views import curves, pipeline, plan, search, study

log = logging.getLogger("weft.serve")

VIEWS: dict[str, Any] = {"curves": curves, "pipeline": pipeline, "search": search, "tune": study}
"""The views of a run, and the modules that make their documents."""

QUERIES = {"pipeline": ("from", "to"), "search": ("name",)}
"""What each view may be asked for; anything else is ignored."""


class NotFound(WeftError):
    """An address that leads to nothing."""


@dataclass(frozen=True, slots=True)
class Document:
    """JSON, and a tag that only equal JSON has."""

    body: bytes
    tag: str


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


Address = tuple[str, ...]
"""The parts of a path after `/api`: ("runs",), ("runs", "conv"), ("runs", "conv", "curves") or ("plans", "gpt")."""


def url(address: Address) -> str:
    """The path of an address as the page writes it (encodeURIComponent).

    >>> url(("runs", "a b", "curves"))
    '/api/runs/a%20b/curves'
    """
    return "/".join(["/api", *(quote(part, safe="!*'()") for part in address)])


class Library:
    """The documents about the runs that `paths` lists by name, and the plans in `folder`. Threads may share it."""

    def __init__(self, paths: Callable[[], Mapping[str, Path]], title: str, folder: Path | None = None) -> None:
        self.title = title
        self._paths = paths
        self._plans = folder
        self._made: Lru[Document] = Lru(64)
        self._known: Lru[dict[str, Any]] = Lru(4096)

    @classmethod
    def under(cls, root: Path) -> Library:
        """The library of all runs in a directory, which may come and go."""
        return cls(lambda: runs.runs_in(root), str(root), root / "plans")

    def get(self, address: Address, query: Mapping[str, str] | None = None) -> Document:
        """The document at an address; `NotFound` if there is none, another `WeftError` if it cannot be made."""
        match address:
            case ("runs",):
                return self._made.get(address, self._all(), lambda: encode(self._list()))
            case ("runs", name):
                self._find(name)
                return self._made.get(address, self._all(), lambda: encode(self._run(name)))
            case ("runs", name, view):
                path = self._find(name)
                if view not in VIEWS:
                    raise NotFound(f"there is no view '{view}'{nearest(view, VIEWS)}")
                options = {word: value for word, value in (query or {}).items() if word in QUERIES.get(view, ())}
                key, signature = (*address, *sorted(options.items())), runs.signature(path)
                return self._made.get(key, signature, lambda: encode(self._view(view, path, options)))
            case ("plans", name):
                return self._made.get(address, self.plans_signature(), lambda: encode(self._plan(name)))
        raise NotFound(f"there is nothing at '{url(address)}'")

    def signatures(self) -> dict[str, str]:
        """A text for each run that changes with its files."""
        return {name: _signature(path) for name, path in self._paths().items()}

    def plans_signature(self) -> str:
        """A text that changes with the plans."""
        try:
            return runs.folder_signature(self._plans) if self._plans is not None else ""
        except (WeftError, OSError) as problem:
            return str(problem)

    def _find(self, name: str) -> Path:
        return _named(name, "run", self._paths())

    def _list(self) -> dict[str, Any]:
        plans = plan.list_plans(self._plans) if self._plans is not None else []
        return {"root": self.title, "runs": self._lines(), "plans": plans}

    def _lines(self) -> list[dict[str, Any]]:
        return overview.with_duplicates([self._line(name, path) for name, path in self._paths().items()])

    def _line(self, name: str, path: Path) -> dict[str, Any]:
        signature = _signature(path)

        def make() -> dict[str, Any]:
            try:
                runs.signature(path)  # a run with a link that leads out is not read
                with errors_as_weft("the run"):
                    return overview.summary(path, name, [view for view in VIEWS if _has_view(view, path)])
            except (WeftError, OSError) as problem:
                return overview.damaged(name, str(problem))

        return {**self._known.get(name, signature, make), "revision": zlib.crc32(signature.encode())}

    def _run(self, name: str) -> dict[str, Any]:
        line = next((line for line in self._lines() if line["name"] == name), None)
        if line is None or line["state"] == "damaged":
            raise WeftError(line["reason"] if line else f"run '{name}' was just removed")
        with errors_as_weft(f"run '{name}'"):
            return {**line, **overview.details(self._find(name))}

    def _view(self, view: str, path: Path, options: Mapping[str, str]) -> dict[str, Any]:
        with errors_as_weft(view):
            found: dict[str, Any] = VIEWS[view].document(path, **options)
            return found

    def _plan(self, name: str) -> dict[str, Any]:
        path = _named(name, "plan", {path.stem: path for path in self._plans.glob("*.json")} if self._plans else {})
        with errors_as_weft(f"plan '{name}'"):
            return plan.document(path)

    def _all(self) -> str:
        return runs.digest((sorted(self.signatures().items()), self.plans_signature()))


def _named(name: str, kind: str, there: Mapping[str, Path]) -> Path:
    if name not in there:  # a name is looked up and never becomes a path
        raise NotFound(f"there is no {kind} '{name}' here{nearest(name, there)}")
    return there[name]


def _has_view(view: str, path: Path) -> bool:
    try:
        return bool(VIEWS[view].present(path))
    except Exception:  # the files of this view are damaged; those of others may be good
        log.debug("%s of '%s' cannot be shown", view, path, exc_info=True)
        return False


def _signature(path: Path) -> str:
    try:
        return runs.signature(path)
    except (WeftError, OSError) as problem:
        return f"damaged: {problem}"
