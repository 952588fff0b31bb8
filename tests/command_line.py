"""The command line called in this process, as it would be called in a folder; and on a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from weft.cli import main


@dataclass(frozen=True)
class Done:
    """How a call ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON document on standard output, strictly read; nothing is on standard error."""
        assert (self.code, self.err) == (0, "")
        assert self.out.endswith("\n")
        assert "\n" not in self.out[:-1]
        return json.loads(self.out, parse_constant=pytest.fail)

    @property
    def error(self) -> str:
        """The one line of a mistake, which ends with exit code 2."""
        assert (self.code, self.out) == (2, "")
        assert self.err.startswith("error: ")
        assert self.err.count("\n") == 1
        return self.err


INSTALLED = tuple(map(Path, (sys.prefix, sys.base_prefix, Path(__file__).parents[1])))


@contextmanager
def inside(folder: Path | None = None) -> Iterator[None]:
    """As a process that was started in the folder would be, and afterwards as before."""
    here, paths, modules = Path.cwd(), list(sys.path), set(sys.modules)
    try:
        os.chdir(folder or here)
        yield
    finally:
        os.chdir(here)
        sys.path[:] = paths
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and not any(Path(file).is_relative_to(folder) for folder in INSTALLED):
                del sys.modules[name]  # the user's own code, which lies elsewhere in the next call


def weft(*arguments: object, cwd: Path | None = None) -> Done:
    """Calls the command line."""
    argv, out, err, code = sys.argv, io.StringIO(), io.StringIO(), 0
    with inside(cwd):
        try:
            sys.argv = ["weft", *map(str, arguments)]
            with redirect_stdout(out), redirect_stderr(err):
                main()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.argv = argv
    return Done(code, out.getvalue(), err.getvalue())


def on_terminal(*arguments: object, cwd: Path, **environment: str) -> str:
    """What the command line writes to a terminal, in a process of its own that ends well."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "weft.cli", *map(str, arguments)]
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "140", "LINES": "30", **environment}
    process = subprocess.Popen(command, cwd=cwd, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    written, limit = b"", time.monotonic() + 120
    try:
        while time.monotonic() < limit:
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    written += os.read(ours, 65536)
                except OSError:  # Linux says so when the other side is closed
                    break
        assert process.wait(timeout=10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return written.decode()
