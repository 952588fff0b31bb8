"""What ``weft plan`` plans: the model, or the supernet, that the command line names."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.arguments import AsJson, joined, read_target
from weft.cli.output import console, print_json, show
from weft.errors import ConfigError, PlanError, nearest

if TYPE_CHECKING:
    from torch import nn

    from weft.config import Config
    from weft.plan.supernet import ChainPlan
    from weft.supernet import Chain

Subject = tuple["nn.Module", Any, Any]
"""A model, a batch that it takes, and a loss or None."""


def subject(spec: str, batch: int, length: int, folder: Path) -> Subject:
    """The model that a user names, without its weights where that can be.

    ``module:attribute`` (or ``file.py:attribute``) is a function that returns a model and a batch, and perhaps a loss;
    a path to a ``config.json``, or to a folder with one, is a model of transformers; a bare name is one of its kinds of
    models with its default sizes.
    """
    if batch < 1 or length < 1:
        raise PlanError(f"a batch has at least 1 sample of length 1, not {batch} of {length}")
    if ":" in spec:
        return _own(spec, folder)
    path = Path(spec)
    if path.is_dir() and (path / "config.json").is_file():
        path /= "config.json"
    if path.suffix == ".json":
        return _transformer(_read(path), batch, length)
    return _transformer({"model_type": spec}, batch, length)


def place_of(name: str, folder: Path) -> Path:
    """Where a plan is saved: a path as it is, and a bare name among the plans of the runs in a folder, where
    ``weft serve`` finds it."""
    if Path(name).suffix or "/" in name or "\\" in name:
        return Path(name)
    if not re.fullmatch(r"\w[\w+=@-]*", name):
        raise PlanError(f"a plan cannot be called '{name}'; use letters, digits and any of _ + = @ -, or give a path")
    return folder / "runs" / "plans" / f"{name}.json"


def is_supernet(spec: str) -> bool:
    """Whether the command line names the config of a supernet, and not a model."""
    return spec.endswith(".toml")


def plan_config(config: Config, folder: Path, machine: str, devices: int, dtype: str | None) -> tuple[ChainPlan, Chain]:
    """Where the chain that a config names is cut into stages, for a batch of its data."""
    import numpy as np

    from weft.cli import build
    from weft.plan.supernet import plan_chain
    from weft.supernet import initialise

    data = build.data_of(config, folder)
    chain = initialise(build.supernet_of(config, folder, data), config.train.seed)
    batch = data.train.take(np.arange(min(config.train.batch_size, len(data.train))))
    return plan_chain(chain, batch, machine, devices=devices, dtype=dtype or "float32"), chain


def _own(spec: str, folder: Path) -> Subject:
    from torch import nn

    from weft.config import locate

    name, _, attribute = spec.partition(":")
    if name.endswith(".py"):
        folder, name = Path(name).parent, Path(name).stem
    made = locate(f"{name}:{attribute}", folder)
    made = made() if callable(made) and not isinstance(made, nn.Module) else made
    if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module)):
        raise PlanError(f"'{spec}' gives {type(made).__name__}: it must return (model, batch) or (model, batch, loss)")
    return made[0], made[1], made[2] if len(made) == 3 else None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"'{path}' cannot be read as a model's configuration: {error}") from error
    if not isinstance(found, dict) or "model_type" not in found:
        raise PlanError(f"'{path}' is no configuration of transformers: it has no 'model_type'")
    return found


def _transformer(values: Mapping[str, Any], batch: int, length: int) -> Subject:
    try:
        import transformers as library
    except ImportError as error:
        raise PlanError(
            "models by name need transformers: pip install transformers, or name a function of yours, module:build"
        ) from error
    import torch

    kind = str(values["model_type"])
    known = library.CONFIG_MAPPING
    if kind not in known:
        raise PlanError(
            f"'{kind}' is no model that transformers has{nearest(kind, list(known))}; a function of yours is named "
            "as module:build"
        )
    config = known[kind].from_dict({k: v for k, v in values.items() if k != "model_type"})
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    heads = ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageClassification", "AudioClassification")
    makers = [getattr(library, f"AutoModelFor{head}") for head in heads] + [library.AutoModel]
    maker = next((m for m in makers if type(config) in m._model_mapping), None)
    if maker is None:
        raise PlanError(f"'{kind}' has no model that can be made from its configuration alone")
    try:
        with torch.device("meta"):
            model = maker.from_config(config)
    except Exception as error:  # its own code, with figures that nobody gave
        raise PlanError(
            f"transformers cannot make a '{kind}' of this configuration ({type(error).__name__}: {error}): give a "
            "config.json with all that it needs"
        ) from error
    return model.train(), _batch(model, config, batch, length), None


def _batch(model: nn.Module, config: Any, batch: int, length: int) -> dict[str, Any]:
    import torch

    name = str(getattr(model, "main_input_name", "input_ids"))
    with torch.device("meta"):
        if name == "pixel_values":
            side = getattr(config, "image_size", None) or 224
            high, wide = side if isinstance(side, list | tuple) else (side, side)
            found = {name: torch.zeros(batch, getattr(config, "num_channels", 3), high, wide)}
            classifies = type(model).__name__.endswith("ForImageClassification")
            return {**found, "labels": torch.zeros(batch, dtype=torch.long)} if classifies else found
        if name == "input_features":
            frames = 2 * int(getattr(config, "max_source_positions", length))
            found = {name: torch.zeros(batch, int(getattr(config, "num_mel_bins", 80)), frames)}
            return {**found, "decoder_input_ids": torch.zeros(batch, length, dtype=torch.long)}
        if name == "input_values":
            return {name: torch.zeros(batch, 16000)}
        ids = torch.zeros(batch, length, dtype=torch.long)
        return {name: ids, "labels": ids} if "labels" in inspect.signature(model.forward).parameters else {name: ids}


# The verbs that split a model over devices: `plan` it, and `calibrate` the machine that it is planned for.


def plan(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="module:function that returns (model, batch), a config.json of transformers, a kind of its models, or "
            "the config.toml of a supernet, perhaps with settings.",
            metavar="MODEL|CONFIG",
        ),
    ],
    devices: Annotated[int, typer.Option(help="How many devices.")],
    machine: Annotated[str, typer.Option(help="A preset, or a file that `weft calibrate` wrote.")] = "h100",
    memory: Annotated[
        str | None, typer.Option(help="What each device has, such as 80GiB; the machine's if not.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Samples of a step, for models by name.")] = 64,
    length: Annotated[int, typer.Option(help="Tokens of a sample, for models by name.")] = 512,
    optimizer: Annotated[str, typer.Option(help="sgd, momentum, adam, adamw, nadam or muon.")] = "adamw",
    dtype: Annotated[str | None, typer.Option(help="Of matrix products: float32, tf32, bfloat16, float16.")] = None,
    stages: Annotated[int | None, typer.Option(help="Pipeline stages; chosen if not given.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Parts of a batch; chosen if not given.")] = None,
    recompute: Annotated[bool | None, typer.Option(help="Recompute activations; chosen if not given.")] = None,
    keep: Annotated[
        list[str] | None, typer.Option(help="What may be split in a module: 'lm_head=n', '*.wte=replicated'.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="What the search may take; the plan tells what was left untried.", min=0.0)
    ] = 60.0,
    load: Annotated[str | None, typer.Option(help="A plan that was saved, to be priced anew.")] = None,
    save: Annotated[
        str | None, typer.Option(help="The file to save the plan in, or a name: runs/plans/NAME.json, for weft serve.")
    ] = None,
    html: Annotated[
        str | None, typer.Option(help="Write a page with the plan, which opens from disk.", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say how a model is best split over devices, what that takes, and what others would do."""
    from weft.cli import plan as planning
    from weft.plan import shown
    from weft.plan.planner import plan as make

    rules = {name: rule for name, _, rule in (part.partition("=") for part in keep or [])}
    if bad := [name for name, rule in rules.items() if not rule]:
        raise ConfigError(f"--keep takes a module and what may be split there, such as 'lm_head=n', not '{bad[0]}'")
    if planning.is_supernet(model):
        _plan_supernet(model, context, machine, devices, dtype, as_json)
        return
    known = [option for parameter in context.command.params for option in parameter.opts if option[:2] == "--"]
    if settings := joined(context.args, [*known, "--help"]):
        raise ConfigError(f"'{settings[0]}' is a setting of a config.toml, and '{model}' is none")
    place = planning.place_of(save, Path()) if save else None
    source = planning.place_of(load, Path()) if load and not Path(load).is_file() else load
    net, example, loss = planning.subject(model, batch, length, Path())
    made = make(
        net,
        example,
        machine,
        devices=devices,
        memory=memory,
        loss=loss,
        optimizer=optimizer,
        dtype=dtype,
        stages=stages,
        microbatches=microbatches,
        recompute=recompute,
        seconds=seconds,
        keep=rules,
        load=source,
    )
    if place:
        made.save(place)
    if html:
        from weft.serve.report import write_plan

        write_plan(made, Path(html))
    if as_json:
        print_json({**made.to_json(), "reasons": made.reasons(), **({"html": html} if html else {})})
        return
    shown.show(made, console)
    if place:
        console.print(f"saved in {place}: edit its splits, and price it with --load {place}", soft_wrap=True)
    if html:
        console.print(f"written to {html}: open it in a browser", soft_wrap=True)


def _plan_supernet(
    config: str, context: typer.Context, machine: str, devices: int, dtype: str | None, as_json: bool
) -> None:

    from weft.plan import shown

    found, chain = plan_config(*read_target(config, context), machine, devices, dtype)
    print_json(asdict(found)) if as_json else shown.show_chain(found, chain, console)


def calibrate(
    out: Annotated[str, typer.Argument(help="The file to write the machine in.", metavar="FILE.json")],
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is one.")] = None,
    devices: Annotated[int, typer.Option(help="Between how many devices of this host links are measured.", min=1)] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repeats.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine's devices and links, for `weft plan --machine FILE.json`."""
    import torch

    from weft.plan.calibrate import calibrate as measure
    from weft.utils.files import write_json

    found = measure(device or ("cuda" if torch.cuda.is_available() else "cpu"), devices, quick)
    write_json(Path(out), found.to_json())
    if as_json:
        print_json({"file": out, **found.to_json()})
        return
    rates = {f"peak_{name}": f"{peak / 1e9:,.0f} GFLOP/s" for name, peak in found.device.peak.items()}
    links = {
        f"link_{level.name}": f"{level.bandwidth / 1e9:,.2f} GB/s, {level.latency * 1e6:,.0f} us"
        for level in found.levels
    }
    show(
        {"file": out, **rates, "memory_bandwidth": f"{found.device.bandwidth / 1e9:,.1f} GB/s", **links},
        False,
        found.name,
    )
