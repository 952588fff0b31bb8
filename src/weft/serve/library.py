"""All documents there are, by address: made when they are asked for, and kept until a file changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from weft.errors import WeftError, nearest
from weft.serve import listing, overview
from weft.serve.documents import Absent, Directory, Document, Source, asked_of, encode, told
from weft.serve.memo import Memo

MANY = 20

Address = tuple[str, ...]
"""Without its `/api`: ("runs",), ("runs", "conv"), ("runs", "conv", "curves") or ("plans", "gpt")."""


def url(address: Address) -> str:
    """As the page writes it (encodeURIComponent).

    >>> url(("runs", "a b", "curves"))
    '/api/runs/a%20b/curves'
    """
    return "/".join(["/api", *(quote(part, safe="!*'()") for part in address)])


class Library:
    """The documents about those runs that `sources` lists by name, and the plans in `folder`. Threads may share it."""

    def __init__(self, sources: Callable[[], Mapping[str, Source]], title: str, folder: Path | None = None) -> None:
        self.title = title
        self._sources = sources
        self._plans = folder
        self._made: Memo[Document] = Memo(64)
        self._known: Memo[dict[str, Any]] = Memo(4096)
        self._revisions: dict[str, tuple[str, int]] = {}
        self._lock = threading.Lock()

    @classmethod
    def under(cls, root: Path, more: Mapping[str, Source] | None = None) -> Library:
        """Of all runs in a directory, which may come and go, and more that lies elsewhere."""
        return cls(
            lambda: {**(more or {}), **{name: Directory(path) for name, path in listing.runs_in(root).items()}},
            str(root),
            root / "plans",
        )

    def get(self, address: Address, query: Mapping[str, str] | None = None) -> Document:
        """The document at an address; `Absent` if there is none, another `WeftError` if it cannot be made."""
        match address:
            case ("runs",):
                return self._made.get(address, self._all(), lambda: encode(self._list()))
            case ("runs", name):
                self._find(name)
                return self._made.get(address, self._all(), lambda: encode(self._run(name)))
            case ("runs", name, view):
                source, asked = self._find(name), asked_of(view, query or {})
                key = (*address, *sorted(asked.items()))
                return self._made.get(key, _signature(source), lambda: encode(source.view(view, asked)))
            case ("plans", name):
                return self._made.get(address, self.of_plans(), lambda: encode(self._plan(name)))
        raise Absent(f"there is nothing at '{url(address)}'")

    def signatures(self) -> dict[str, str]:
        """A word for each run that changes with its files."""
        return {name: _signature(source) for name, source in self._sources().items()}

    def of_plans(self) -> str:
        """A word that changes with the plans."""
        try:
            return listing.of_folder(self._plans) if self._plans is not None else ""
        except (WeftError, OSError) as problem:
            return str(problem)

    def revision(self, name: str, signature: str) -> int:
        """How often a run was seen to change, counted from 1."""
        with self._lock:
            before, count = self._revisions.get(name, ("", 0))
            self._revisions[name] = (signature, count + (signature != before))
            return self._revisions[name][1]

    def _find(self, name: str) -> Source:
        there = self._sources()
        if name not in there:  # a name is looked up, never made into a path
            raise Absent(f"there is no run '{name}' here{nearest(name, there) if len(there) < MANY else ''}")
        return there[name]

    def _list(self) -> dict[str, Any]:
        return {"root": self.title, "runs": self._lines(), "plans": self._plan_list()}

    def _lines(self) -> list[dict[str, Any]]:
        return overview.marked([self._line(name, source) for name, source in self._sources().items()])

    def _line(self, name: str, source: Source) -> dict[str, Any]:
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
            raise WeftError(line["reason"] if line else f"run '{name}' has just gone")
        with told(f"run '{name}'"):
            return {**line, **self._find(name).details()}

    def _plan_list(self) -> list[dict[str, Any]]:
        from weft.serve.plan import document as plans

        return plans.listed(self._plans) if self._plans is not None else []

    def _plan(self, name: str) -> dict[str, Any]:
        there = {path.stem: path for path in self._plans.glob("*.json")} if self._plans is not None else {}
        if name not in there:
            raise Absent(f"there is no plan '{name}' here{nearest(name, there) if len(there) < MANY else ''}")
        from weft.serve.plan import document as plans

        with told(f"plan '{name}'"):
            return plans.document(there[name])

    def _all(self) -> str:
        return listing.digest((sorted(self.signatures().items()), self.of_plans()))


def _signature(source: Source) -> str:
    try:
        return source.signature()
    except (WeftError, OSError) as problem:
        return f"damaged: {problem}"
