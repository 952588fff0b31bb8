"""What a training run begins with: its directory, new or gone on with, and the supernet laid out as it asks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from weft.errors import RunError
from weft.offload.setup import attach_for_scoring, move_buffers
from weft.runs import Run
from weft.supernet import Chain
from weft.trainer.config import Settings
from weft.utils.files import to_json
from weft.utils.names import without_modules


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
        before, now = without_modules(found.manifest.get("law") or {}), without_modules(to_json(law))
        for key in sorted({*before, *now}):
            if before.get(key) != now.get(key):
                raise RunError(
                    f"run '{name}' was made with {key} = {before.get(key)}, now it is {now.get(key)}: "
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


def on_device(chain: Chain, settings: Settings) -> Chain:
    """The chain on the run's device; under residency its layers stay on the host until a subnet is scored."""
    if settings.residency is None:
        return chain.to(settings.device)
    move_buffers(chain, settings.device)
    attach_for_scoring(chain, settings.device, settings.residency)
    return chain


def to_memory_format(chain: Chain, settings: Settings) -> Chain:
    """The chain with its filters laid out as the settings say; activations follow the filters."""
    return chain.to(memory_format=torch.channels_last) if settings.channels_last else chain  # type: ignore[call-overload]
