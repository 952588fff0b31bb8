"""How a training that was stopped goes on: what its user is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.errors import ConfigError, WeftError


@contextmanager
def resumable(path: Path, command: str) -> Iterator[None]:
    """Around a training: whoever stops it is told how to go on, and whoever begins it twice, that it is there."""
    try:
        yield
    except KeyboardInterrupt:
        from weft.runs import Checkpoints

        steps = Checkpoints(path / "checkpoints").steps()
        what = f"a checkpoint after {steps[-1]} steps is written" if steps else "there is no checkpoint yet"
        print(f"stopped; {what}. Resume with: {command}", file=sys.stderr)
        raise
    except WeftError as problem:
        if "already holds a run" in str(problem):
            raise ConfigError(f"{problem} (--resume, or --run=NAME)") from None
        raise
