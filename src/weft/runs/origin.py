"""Where a run comes from: versions, machine, commit and command, as its manifest keeps them."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def origin() -> dict[str, Any]:
    """The facts about this process that a run's manifest states; what cannot be known is None."""
    return {
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in ("weft", "torch", "numpy")},
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "git": _commit(),
        "command": sys.argv,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


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
