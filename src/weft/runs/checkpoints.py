"""The checkpoints of a run: each whole or absent, hashed, the last few kept, the newest good one found."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from weft.errors import CheckpointError
from weft.runs import shards
from weft.runs.shards import ShardEntry
from weft.utils.files import disk_errors, sync_folder, to_json, write_json

log = logging.getLogger("weft.runs")

FORMAT = 1

# step-00001200/        a checkpoint, whole from the rename that makes it to the one that takes it away
# .step-00001200.tmp/   being written; becomes step-00001200 by one rename
# .step-00001200.gone/  being removed
# .step-00001200.old/   left by an earlier weft that was killed as it replaced a checkpoint of the same step
NAME = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.(tmp|gone|old)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a run before its step `step`; the tensors are on the CPU, by global name."""

    step: int
    meta: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class Checkpoints:
    """A folder of checkpoints, of which the last `keep` are kept. One run writes it; any process may read meanwhile."""

    def __init__(self, folder: Path | str, keep: int = 3) -> None:
        if keep < 1:
            raise CheckpointError(f"keep = {keep}: the newest checkpoint is always kept, so keep must be 1 or more")
        self.folder = Path(folder)
        self.keep = keep
        self._clean = False

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, damaged or not, in ascending order."""
        return sorted(step for step, kind in self._entries() if not kind)

    def save(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
        """Write and publish a checkpoint of one shard. A failure leaves the earlier checkpoints as they were."""
        if not self._clean:
            self.clean()
        self._refuse_twice(step)
        try:
            return self.publish(step, [self.write_shard(step, "shard0", tensors)], meta)
        except BaseException:
            shutil.rmtree(self._path(step, "tmp"), ignore_errors=True)
            raise

    def write_shard(self, step: int, name: str, tensors: Mapping[str, Tensor]) -> ShardEntry:
        """Write one shard, durable but not yet part of a checkpoint; several processes may each write theirs."""
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise CheckpointError(f"a shard cannot be called '{name}'; use letters, digits, '-', '_' and '.'")
        return shards.write(self._work(step) / f"{name}.safetensors", tensors)

    def publish(self, step: int, entries: Sequence[ShardEntry], meta: Mapping[str, Any]) -> Path:
        """Make the written shards a checkpoint, all at once, and drop the oldest beyond `keep`.

        Steps are published in ascending order: what was prepared for an earlier one is removed. A step is published
        once: a run that goes back drops the later checkpoints first.
        """
        self._refuse_twice(step)
        twice = [
            name for name, count in Counter(name for entry in entries for name in entry.names).items() if count > 1
        ]
        if not entries or twice:
            what = f"'{twice[0]}' is in two" if twice else "there are none"
            raise CheckpointError(f"step {step}: a checkpoint has shards, and each tensor is in one of them; {what}")
        work = self._work(step)
        for entry in entries:
            shards.check(work / entry.file, entry, content=False)
        for path in work.iterdir():  # a killed writer of the same step may have left other shards
            if path.name not in {entry.file for entry in entries}:
                path.unlink()
        body = to_json({"format": FORMAT, "step": step, "meta": meta, "shards": entries})
        write_json(work / "manifest.json", {**body, "sha256": _digest(body)})
        final = self._path(step)
        with disk_errors(final, 0):
            sync_folder(work)
            self._tidy(before=step)
            os.rename(work, final)
            sync_folder(self.folder)
        for other in self.steps()[: -self.keep]:
            if other != step:
                self._drop(other)
        return final

    def load(
        self, step: int | None = None, verify: bool = True, only: Callable[[str], bool] | None = None
    ) -> Checkpoint:
        """Read a checkpoint, or only those of its tensors whose names `only` accepts.

        Without `step`, the newest that is whole, as `newest` finds it. With `step`, a damaged or missing one raises
        `CheckpointError`. The shards that are read are verified, with verify=False only their sizes.
        """
        if step is None:
            step, verify = self.newest(), False
        with self._reading(step) as folder:
            body, entries = _manifest(folder, step)
            tensors: dict[str, Tensor] = {}
            for entry in entries:
                names = [name for name in entry.names if only is None or only(name)]
                if names or only is None:
                    shards.check(folder / entry.file, entry, content=verify)
                    tensors.update(shards.read(folder / entry.file, names))
            return Checkpoint(body["step"], body["meta"], tensors)

    def newest(self) -> int:
        """The newest step whose checkpoint is whole: every hash is right.

        Each damaged one that is passed over is logged. All shards are looked at, so every process finds the same.
        """
        wrong: list[str] = []
        for step in reversed(self.steps()):
            try:
                self.check(step)
            except CheckpointError as error:
                wrong.append(str(error))
                continue
            for what in wrong:
                log.warning("%s; using the checkpoint of step %d instead", what, step)
            return step
        if wrong:
            raise CheckpointError(f"no whole checkpoint in '{self.folder}': " + "; ".join(wrong))
        raise CheckpointError(f"no checkpoint in '{self.folder}'; train first, or name another run")

    def check(self, step: int) -> None:
        """`CheckpointError` that says what is wrong, unless this checkpoint is whole."""
        with self._reading(step) as folder:
            for entry in _manifest(folder, step)[1]:
                shards.check(folder / entry.file, entry, content=True)

    def drop_after(self, step: int) -> None:
        """For a resume at `step`: forget the checkpoints of later steps."""
        self.clean()
        for other in self.steps():
            if other > step:
                self._drop(other)

    def clean(self) -> None:
        """Remove what a killed writer left. Only for the run's one writer, before any process prepares a shard."""
        self._tidy()
        self._clean = True

    def _refuse_twice(self, step: int) -> None:
        if self._path(step).is_dir():
            raise CheckpointError(
                f"step {step} has a checkpoint in '{self.folder}' already: a step is published once, and a run that "
                "goes back drops the later ones first"
            )

    @contextmanager
    def _reading(self, step: int) -> Iterator[Path]:
        """The folder of a checkpoint; an error in the block says whether the checkpoint is damaged or missing."""
        folder = self._path(step)
        try:
            yield folder
        except CheckpointError as error:
            if folder.is_dir():
                raise CheckpointError(f"the checkpoint of step {step} is damaged: {error}") from error
            there = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"no checkpoint of step {step} in '{self.folder}'; there are: {there}") from None

    def _path(self, step: int, kind: str = "") -> Path:
        """The folder of a step, there or not; of a `kind`, the hidden one."""
        if step < 0:
            raise CheckpointError(f"step {step}: a checkpoint's step is 0 or more")
        return self.folder / (f".step-{step:08d}.{kind}" if kind else f"step-{step:08d}")

    def _work(self, step: int) -> Path:
        """The hidden folder in which a step is prepared."""
        path = self._path(step, "tmp")
        with disk_errors(path, 0):
            path.mkdir(parents=True, exist_ok=True)
        return path

    def _drop(self, step: int) -> None:
        """Remove a step's folder; it vanishes in one rename, so a kill in the middle leaves no half of it."""
        hidden = self._path(step, "gone")
        shutil.rmtree(hidden, ignore_errors=True)
        with disk_errors(hidden, 0):
            os.rename(self._path(step), hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def _tidy(self, before: int | None = None) -> None:
        """Remove what a killed writer left.

        With `before`, folders in preparation for this and later steps stay: other processes may be writing them.
        """
        for step, kind in list(self._entries()):
            if kind == "old" and not self._path(step).exists():
                os.rename(self._path(step, kind), self._path(step))
            elif kind in ("gone", "old") or (kind == "tmp" and (before is None or step < before)):
                shutil.rmtree(self._path(step, kind), ignore_errors=True)

    def _entries(self) -> Iterator[tuple[int, str]]:
        """The step and kind of each folder, hidden or not."""
        for name in os.listdir(self.folder) if self.folder.is_dir() else ():
            if match := NAME.fullmatch(name):
                yield int(match[1] or match[2]), match[3] or ""


def _manifest(folder: Path, step: int) -> tuple[dict[str, Any], list[ShardEntry]]:
    try:
        body = json.loads((folder / "manifest.json").read_bytes())
        digest = body.pop("sha256")
        if body["format"] > FORMAT:
            raise CheckpointError(f"it has format {body['format']} and this weft reads {FORMAT}: use a newer weft")
        if digest != _digest(body) or body["step"] != step:
            raise CheckpointError("its manifest.json has other content than was saved")
        entries = [ShardEntry.from_json(item) for item in body["shards"]]
    except OSError:
        raise CheckpointError("it has no manifest.json") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"its manifest.json is malformed ({type(error).__name__}: {error})") from error
    if any(Path(entry.file).name != entry.file for entry in entries):
        raise CheckpointError("its manifest.json names files outside the checkpoint")
    return body, entries


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
