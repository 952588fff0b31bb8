"""What a run's manifest says of its configuration: written when the run begins, compared when it is resumed, and read
back when it is loaded."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from weft import zoo
from weft.data import Data, Normalise, ShiftFlip
from weft.engine import losses
from weft.engine.bilevel import Bilevel
from weft.engine.consistency import Exact
from weft.engine.layer_state import tensors_digest
from weft.engine.optimizer import GlobalNorm, Optimizer
from weft.engine.train_step import TrainStep
from weft.errors import CheckpointError, RunError, WeftError
from weft.runs import Run
from weft.runs.run import without_modules
from weft.space import make_stream
from weft.supernet import Chain
from weft.trainer.checkpointing import initial_weights
from weft.trainer.config import Execution, Parts, RunConfig, TrainConfig, merge_fields, prefers_channels_last
from weft.utils.files import to_json

KEY = "train_config"
"""Where the manifest has what decides the bits. In manifests of format 1 it was called ``law``."""


PLAIN = tuple(entry.name for entry in fields(TrainConfig) if entry.type in ("int", "str"))
"""Fields that a manifest has as they are."""

AUGMENTATIONS: Mapping[str, Any] = {"Normalise": Normalise, "ShiftFlip": ShiftFlip}


def describe_run(
    chain: Chain, data: Data, step: TrainStep, execution: Execution, init_from: Any = None
) -> dict[str, Any]:
    """Everything that decides the bits of a run, as plain values."""
    device, laid_out = torch.device(execution.device), execution.channels_last
    described = {
        **{name: getattr(step, name) for name in PLAIN},
        "stream": step.stream.to_json(),
        "space": chain.space.id,
        "layers": len(chain.layers),
        "data": data.fingerprint(),
        "loss": name_of(step.loss),
        "optimizer": _optimizer(step.optimizer),
        "channels_last": prefers_channels_last(chain, device) if laid_out is None else laid_out,
        "device": device.type,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "augment": None if step.augment is None else name_of(step.augment),
        "consistency": {name: str(c) for name, c in sorted(step.consistency.items()) if c != Exact()},
    }
    if chain.ties:
        described["ties"] = [f"{first} = {second}" for first, second in chain.ties]
    if step.distill is not None:
        described["distill"] = name_of(step.distill)
    if step.architecture_search is not None:
        described["architecture_search"] = step.architecture_search.describe()
    if init_from is not None:
        described["init_from"] = tensors_digest(initial_weights(init_from))
    return described


def name_of(thing: Any) -> str:
    """A function or class by its module and name, anything else as it prints; weft's own without their modules."""
    name = getattr(thing, "__qualname__", None)
    # An address in memory is another one in the process that resumes, and a script is called otherwise in its children.
    text = f"{thing.__module__}.{name}" if name else re.sub(r" at 0x[0-9a-fA-F]+", "", repr(thing))
    return str(without_modules(text.replace("__mp_main__", "__main__")))


def open_run(run: RunConfig, described: Mapping[str, Any], device: torch.device, resume: bool) -> Run:
    """The run's directory: a new one, or on resume the one that is there, which must have been made alike."""
    if resume and run.name is None:
        raise RunError("resume needs the name of the run: give run='...'")
    if resume and (Path(run.folder) / str(run.name) / "manifest.json").exists():
        existing = Run.open(Path(run.folder) / str(run.name), keep=run.keep_checkpoints)
        _refuse_other(existing, described)
        return existing
    manifest = {
        "config": run.source,
        KEY: described,
        "metrics": {name: name_of(metric) for name, metric in run.metrics.items()},
        "seed": described["seed"],
        "device": str(device),
        "data": described["data"],
        "space": described["space"],
        "threads": torch.get_num_threads(),
    }
    return Run.create(run.folder, run.name, manifest=manifest, keep=run.keep_checkpoints)


@contextmanager
def opened(
    run: RunConfig, described: Mapping[str, Any], device: torch.device, resume: bool
) -> Iterator[tuple[Run, int | None]]:
    """The run's directory, locked, and the step that it goes on from; None where it begins anew."""
    directory = open_run(run, described, device, resume)
    with directory.locked():
        step = directory.checkpoints.newest() if resume and directory.checkpoints.steps() else None
        if step is not None:
            directory.checkpoints.drop_after(step)
        if resume:
            directory.events.drop_from(step or 0)
        yield directory, step


def read_described(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What decided the bits of a run, in today's words whatever the manifest's format."""
    if manifest.get(KEY):
        return dict(without_modules(manifest[KEY]))
    old = dict(without_modules(manifest.get("law") or {}))
    for before, now in (("nonfinite", "on_nonfinite"), ("distil", "distill"), ("bilevel", "architecture_search")):
        if before in old:
            old[now] = old.pop(before)
    if "schedule" in old:
        schedule, _, warmup = str(old.pop("schedule")).rpartition(", warm-up ")
        old["optimizer"] = {
            **old["optimizer"],
            "schedule": schedule,
            "warmup_steps": int(warmup),
            "clip": old.pop("clip", None),
        }
    return old


def config_of(run: Run, chain: Chain, options: Mapping[str, Any]) -> Parts:
    """The configuration that a run was made with, from its manifest; ``options`` take the place of single fields.

    Code of the user's own is never imported because a file names it: raises CheckpointError unless ``options`` has it.
    """
    described = read_described(run.manifest)
    metrics = run.manifest.get("metrics") or {}
    execution = Execution(channels_last=described.get("channels_last"))
    kept = RunConfig(name=run.name, folder=run.path.parent)
    values: dict[str, Any] = {name: described[name] for name in PLAIN if name in described}
    if "stream" in described:
        values["stream"] = make_stream(chain.space, described["stream"])
    if "consistency" in described:
        values["consistency"] = {name: described["consistency"].get(name, "exact") for name in chain.layers}
    for name in ("loss", "augment", "distill"):
        if described.get(name) is not None and name not in options:
            values[name] = _code(run, name, described[name])
    if "optimizer" in described and "optimizer" not in options:
        values["optimizer"] = _read_optimizer(run, described["optimizer"])
    if described.get("architecture_search") and "architecture_search" not in options:
        search = dict(described["architecture_search"])
        values["architecture_search"] = Bilevel(**{**search, "optimizer": _read_optimizer(run, search["optimizer"])})
    if "metrics" not in options:
        kept = replace(kept, metrics={name: _code(run, f"metrics['{name}']", text) for name, text in metrics.items()})
    config = TrainConfig(**{name: value for name, value in values.items() if name not in options})
    return merge_fields((config, execution, kept), options)


def _refuse_other(run: Run, described: Mapping[str, Any]) -> None:
    before, now = read_described(run.manifest), dict(without_modules(to_json(described)))
    if KEY not in run.manifest:
        now.pop("init_from", None)  # which older manifests do not have
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise RunError(
                f"run '{run.name}' was made with {name} = {before.get(name)}, now it is {now.get(name)}: "
                "resume it as it was, or choose another name"
            )


def _optimizer(optimizer: Optimizer) -> dict[str, Any]:
    schedule, clip = optimizer.schedule, optimizer.clip
    return {
        **optimizer.describe(),
        "schedule": schedule if isinstance(schedule, str) else name_of(schedule),
        "warmup_steps": optimizer.warmup_steps,
        "clip": str(clip) if isinstance(clip, GlobalNorm) else clip,
    }


def _read_optimizer(run: Run, described: Mapping[str, Any]) -> Optimizer:
    values = dict(described)
    kind, others = str(values.pop("kind")), values.pop("others", None)
    try:
        return Optimizer(kind.lower(), others=None if others is None else _read_optimizer(run, others), **values)
    except WeftError:
        raise _needs(run, "optimizer", f"{kind}({values})") from None


def _code(run: Run, name: str, text: str) -> Any:
    """A function of weft by its name, or one of its augmentations with plain arguments."""
    short = str(without_modules(text)).removeprefix("weft.")
    for place in (losses, zoo):
        if re.fullmatch(r"\w+", short) and callable(getattr(place, short, None)):
            return getattr(place, short)
    try:
        call = ast.parse(short, mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
            if call.func.id == "InPlaceDistillation":
                return True
            return AUGMENTATIONS[call.func.id](
                **{str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
            )
    except (SyntaxError, ValueError, TypeError, KeyError):
        pass
    raise _needs(run, name, text)


def _needs(run: Run, name: str, text: str) -> CheckpointError:
    option = name.partition("[")[0]
    return CheckpointError(
        f"run '{run.name}' was made with {name} = {text}, which is code of your own: give load_run({option}=...) too"
    )
