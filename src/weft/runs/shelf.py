"""The folders of checkpoints on disk: put in place by one rename, told apart from what a killed writer left."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from weft.errors import CheckpointError
from weft.runs.files import room, sync_folder

# step-00001200/        a checkpoint
# .step-00001200.tmp/   being written; becomes step-00001200 by one rename
# .step-00001200.old/   was step-00001200 and is being replaced; it counts while step-00001200 is not there
# .step-00001200.gone/  being removed
NAME = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.(tmp|old|gone)")


class Shelf:
    """A folder of folders, one a step. Reading never changes it; only `work`, `put`, `drop` and `tidy` do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> list[int]:
        return sorted({step for step, kind in self._entries() if kind in ("", "old")})

    def find(self, step: int) -> Path | None:
        """Where this step's folder is now, also while it is being replaced."""
        return next((path for path in (self._path(step), self._path(step, "old")) if path.is_dir()), None)

    def work(self, step: int) -> Path:
        """The hidden folder in which a step is prepared."""
        path = self._path(step, "tmp")
        with room(path, 0):
            path.mkdir(parents=True, exist_ok=True)
        return path

    def put(self, step: int) -> Path:
        """Put the prepared folder in place of any older one; at no moment does `find` return neither."""
        work, final, old = self._path(step, "tmp"), self._path(step), self._path(step, "old")
        with room(final, 0):
            sync_folder(work)
            self.tidy(before=step)
            if final.is_dir():
                os.rename(final, old)
            os.rename(work, final)
            sync_folder(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        return final

    def drop(self, step: int) -> None:
        """Remove a step's folder; it vanishes in one rename, so a kill in the middle leaves no half of it."""
        gone = self._path(step, "gone")
        shutil.rmtree(gone, ignore_errors=True)
        shutil.rmtree(self._path(step, "old"), ignore_errors=True)
        with room(gone, 0):
            os.rename(self._path(step), gone)
        shutil.rmtree(gone, ignore_errors=True)

    def discard(self, step: int) -> None:
        """Forget what was prepared for a step."""
        shutil.rmtree(self._path(step, "tmp"), ignore_errors=True)

    def tidy(self, before: int | None = None) -> None:
        """Bring back what was being replaced and remove what a killed writer left.

        With `before`, folders in preparation for this and later steps stay: other processes may be writing them.
        """
        for step, kind in list(self._entries()):
            path = self._path(step, kind)
            if kind == "old" and not self._path(step).is_dir():
                os.rename(path, self._path(step))
            elif kind in ("old", "gone") or (kind == "tmp" and (before is None or step < before)):
                shutil.rmtree(path, ignore_errors=True)

    def _path(self, step: int, kind: str = "") -> Path:
        if step < 0:
            raise CheckpointError(f"step {step}: a checkpoint's step is 0 or more")
        return self.folder / (f".step-{step:08d}.{kind}" if kind else f"step-{step:08d}")

    def _entries(self) -> Iterator[tuple[int, str]]:
        if self.folder.is_dir():
            for name in os.listdir(self.folder):
                if match := NAME.fullmatch(name):
                    yield int(match[1] or match[2]), match[3] or ""
