"""The checkpoints of a run: each whole or absent, hashed, the last few kept, the newest good one found."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from weft.errors import CheckpointError
from weft.runs import shards
from weft.runs.files import plain, write_json
from weft.runs.shards import ShardEntry
from weft.runs.shelf import Shelf

log = logging.getLogger("weft.runs")

FORMAT = 1
T = TypeVar("T")


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
        self._shelf = Shelf(self.folder)
        self._clean = False

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, damaged or not, in ascending order."""
        return self._shelf.steps()

    def save(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
        """Write and publish a checkpoint of one shard. A failure leaves the earlier checkpoints as they were."""
        if not self._clean:
            self.clean()
        try:
            return self.publish(step, [self.write_shard(step, "shard0", tensors)], meta)
        except BaseException:
            self._shelf.discard(step)
            raise

    def write_shard(self, step: int, name: str, tensors: Mapping[str, Tensor]) -> ShardEntry:
        """Write one shard, durable but not yet part of a checkpoint; several processes may each write theirs."""
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise CheckpointError(f"a shard cannot be called '{name}'; use letters, digits, '-', '_' and '.'")
        return shards.write(self._shelf.work(step) / f"{name}.safetensors", tensors)

    def publish(self, step: int, entries: Sequence[ShardEntry], meta: Mapping[str, Any]) -> Path:
        """Make the written shards a checkpoint, all at once, and drop the oldest beyond `keep`.

        Steps are published in ascending order: what was prepared for an earlier one is removed. A checkpoint of the
        same step is replaced; until the new one is in place, the old one is found.
        """
        twice = [
            name for name, count in Counter(name for entry in entries for name in entry.names).items() if count > 1
        ]
        if not entries or twice:
            what = f"'{twice[0]}' is in two" if twice else "there are none"
            raise CheckpointError(f"step {step}: a checkpoint has shards, and each tensor is in one of them; {what}")
        work = self._shelf.work(step)
        for entry in entries:
            shards.check(work / entry.file, entry, content=False)
        for path in work.iterdir():  # a killed writer of the same step may have left other shards
            if path.name not in {entry.file for entry in entries}:
                path.unlink()
        body = plain({"format": FORMAT, "step": step, "meta": meta, "shards": entries})
        write_json(work / "manifest.json", {**body, "sha256": _digest(body)})
        final = self._shelf.put(step)
        for other in self.steps()[: -self.keep]:
            if other != step:
                self._shelf.drop(other)
        return final

    def load(
        self, step: int | None = None, verify: bool = True, only: Callable[[str], bool] | None = None
    ) -> Checkpoint:
        """Read a checkpoint, or only those of its tensors whose names `only` accepts.

        Without `step`, the newest that is whole, as `newest` finds it. With `step`, a damaged or missing one raises
        `CheckpointError`; the shards that are read are verified, the others are not touched.
        """
        if step is None:
            step, verify = self.newest(verify), False

        def read(folder: Path, body: dict[str, Any], entries: list[ShardEntry]) -> Checkpoint:
            tensors: dict[str, Tensor] = {}
            for entry in entries:
                names = [name for name in entry.names if only is None or only(name)]
                if names or only is None:
                    shards.check(folder / entry.file, entry, content=verify)
                    tensors.update(shards.read(folder / entry.file, names))
            return Checkpoint(body["step"], body["meta"], tensors)

        return self._steady(step, read)

    def newest(self, verify: bool = True) -> int:
        """The newest step whose checkpoint is whole: every hash is right or, with verify=False, every size.

        Each damaged one that is passed over is logged. All shards are looked at, so every process finds the same.
        """
        wrong: list[str] = []
        for step in reversed(self.steps()):
            try:
                self.check(step, verify)
            except CheckpointError as error:
                wrong.append(str(error))
                continue
            for what in wrong:
                log.warning("%s; using the checkpoint of step %d instead", what, step)
            return step
        if wrong:
            raise CheckpointError(f"no whole checkpoint in '{self.folder}': " + "; ".join(wrong))
        raise CheckpointError(f"no checkpoint in '{self.folder}'; train first, or name another run")

    def check(self, step: int, verify: bool = True) -> None:
        """`CheckpointError` that says what is wrong, unless this checkpoint is whole."""

        def whole(folder: Path, body: dict[str, Any], entries: list[ShardEntry]) -> None:
            for entry in entries:
                shards.check(folder / entry.file, entry, content=verify)

        self._steady(step, whole)

    def names(self, step: int) -> list[str]:
        """The names of the tensors in a checkpoint, read from its manifest alone."""
        return self._steady(step, lambda _, body, entries: sorted(name for entry in entries for name in entry.names))

    def drop_after(self, step: int) -> None:
        """For a resume at `step`: forget the checkpoints of later steps."""
        self.clean()
        for other in self.steps():
            if other > step:
                self._shelf.drop(other)

    def clean(self) -> None:
        """Remove what a killed writer left. Only for the run's one writer, before any process prepares a shard."""
        self._shelf.tidy()
        self._clean = True

    def _steady(self, step: int, use: Callable[[Path, dict[str, Any], list[ShardEntry]], T]) -> T:
        """What `use` makes of a checkpoint, done again if the checkpoint was replaced meanwhile."""
        while True:
            folder, raw = mark = self._mark(step)
            if folder is None:
                there = ", ".join(map(str, self.steps())) or "none"
                raise CheckpointError(f"no checkpoint of step {step} in '{self.folder}'; there are: {there}")
            try:
                result = use(folder, *_parse(step, raw))
            except CheckpointError as error:
                if self._mark(step) == mark:
                    raise CheckpointError(f"the checkpoint of step {step} is damaged: {error}") from error
            else:
                if self._mark(step) == mark:
                    return result

    def _mark(self, step: int) -> tuple[Path | None, bytes | None]:
        folder = self._shelf.find(step)
        try:
            return folder, (folder / "manifest.json").read_bytes() if folder else None
        except OSError:
            return folder, None


def _parse(step: int, raw: bytes | None) -> tuple[dict[str, Any], list[ShardEntry]]:
    if raw is None:
        raise CheckpointError("it has no manifest.json")
    try:
        body = json.loads(raw)
        said = body.pop("sha256")
        if body["format"] > FORMAT:
            raise CheckpointError(f"it has format {body['format']} and this weft reads {FORMAT}: use a newer weft")
        if said != _digest(body) or body["step"] != step:
            raise CheckpointError("its manifest.json has other content than was saved")
        entries = [
            ShardEntry(item["file"], item["bytes"], item["sha256"], {k: tuple(v) for k, v in item["layers"].items()})
            for item in body["shards"]
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"its manifest.json is malformed ({type(error).__name__}: {error})") from error
    if any(Path(entry.file).name != entry.file for entry in entries):
        raise CheckpointError("its manifest.json names files outside the checkpoint")
    return body, entries


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
