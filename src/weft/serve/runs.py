"""Which runs lie in a directory, and whether one has changed, from the names, sizes and times of its files alone."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from weft.errors import RunError
from weft.runs import run as lock
from weft.runs.run import PARTS

FILES = ("manifest.json", "events.jsonl", "lock", "study.db", "study.db-wal")
FOLDERS = ("results", "traces")
"""The files that documents are made from; checkpoints are not among them, and their changes are events."""

DEEP, MOST = 2, 2000
"""How deep folders are looked into, and the most entries of one."""

MANIFEST = 4 << 20
"""The most bytes of a manifest."""


def runs_in(root: Path) -> dict[str, Path]:
    """The directories under `root` that hold a run, damaged ones included, by name; none if there is no `root`."""
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    home = root.resolve()
    return {
        entry.name: Path(entry.path)
        for entry in entries
        if _is_text(entry.name) and _is_folder(entry, home) and any(os.path.lexists(f"{entry.path}/{p}") for p in PARTS)
    }


def signature(run: Path) -> str:
    """A text that changes whenever a file of the run does, or the process ends that held its lock.

    `RunError` if one of the files is a link that leads out, no plain file, or too large: then nothing is to be read.
    """
    home = run.parent.resolve()
    facts = {name: _facts(run / name, home) for name in FILES}
    if (manifest := facts["manifest.json"]) is not None and manifest[1] > MANIFEST:
        raise RunError(f"manifest.json has {manifest[1]} bytes, more than the {MANIFEST} of any manifest; restore it")
    found: list[object] = [facts]
    for name in FOLDERS:
        found += _inside(run / name, home, DEEP)
    found.append(facts["lock"] is not None and lock.is_held(run / "lock"))
    return digest(found)


def folder_signature(folder: Path) -> str:
    """A text that changes with the files of a folder that is no run."""
    return digest(list(_inside(folder, folder.parent.resolve(), 0)))


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:20]


def _inside(folder: Path, home: Path, deep: int) -> Iterator[object]:
    if _facts(folder, home, folder=True) is None:
        return
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name)[:MOST]:
        if entry.is_dir():
            if deep:
                yield from _inside(Path(entry.path), home, deep - 1)
        else:
            yield (entry.name, _facts(Path(entry.path), home))


def _facts(path: Path, home: Path, folder: bool = False) -> tuple[int, ...] | None:
    try:
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            if not path.resolve().is_relative_to(home):
                raise RunError(f"'{path.name}' is a link that leads out of the runs, so it is not read; copy it here")
            found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RunError(f"'{path.name}' cannot be read ({error.strerror})") from error
    if not (stat.S_ISDIR if folder else stat.S_ISREG)(found.st_mode):
        raise RunError(f"'{path.name}' is not a {'folder' if folder else 'plain file'}, so it is not read; remove it")
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def _is_folder(entry: os.DirEntry[str], home: Path) -> bool:
    try:
        return entry.is_dir() and (not entry.is_symlink() or Path(entry.path).resolve().is_relative_to(home))
    except (OSError, RuntimeError):  # RuntimeError for links in a circle
        return False


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
