"""What a training run begins with: its directory, new or gone on with, and the supernet laid out as it asks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from weft.errors import RunError
from weft.pipeline.residency.entry import make_readable, prepare
from weft.pipeline.settings import Settings
from weft.runs import Run
from weft.runs.files import plain
from weft.supernet import Chain


def open_run(
    runs: Path | str,
    name: str | None,
    resume: bool,
    law: Mapping[str, Any],
    config: Mapping[str, Any] | None,
    device: torch.device,
    keep: int,
) -> Run:
    """The run's directory: a new one, or on resume the one that is there, which must be a run of the same law."""
    if resume and name is None:
        raise RunError("resume needs the name of the run: give run='...'")
    if resume and (Path(runs) / str(name) / "manifest.json").exists():
        found = Run.open(Path(runs) / str(name), keep=keep)
        before = found.manifest.get("law") or {}
        for key in sorted({*before, *law}):
            if before.get(key) != plain(law.get(key)):
                raise RunError(
                    f"run '{name}' was made with {key} = {before.get(key)}, now it is {law.get(key)}: "
                    "resume it as it was, or choose another name"
                )
        return found
    manifest = {
        "config": config,
        "law": law,
        "seed": law["seed"],
        "device": str(device),
        "data": law["data"],
        "space": law["space"],
        "threads": torch.get_num_threads(),
    }
    return Run.create(runs, name, manifest=manifest, keep=keep)


def existing(path: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


def on_device(chain: Chain, settings: Settings) -> Chain:
    """The chain on the run's device; under residency its layers stay on the host until a subnet is scored."""
    if settings.residency is None:
        return chain.to(settings.device)
    prepare(chain, settings.device)
    make_readable(chain, settings.device, settings.residency)
    return chain


def lay_out(chain: Chain, settings: Settings) -> Chain:
    """The chain with its filters laid out as the settings say; activations follow the filters."""
    return chain.to(memory_format=torch.channels_last) if settings.channels_last else chain  # type: ignore[call-overload]
