"""The verbs that split a model over devices: ``weft plan``, and ``weft calibrate`` for the machine it plans for."""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from weft.cli.arguments import AsJson, read_target, settings_of
from weft.cli.output import console, print_json, show
from weft.errors import ConfigError, PlanError, nearest
from weft.utils.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from weft.plan.chain import ChainPlan
    from weft.plan.plan import Plan
    from weft.supernet import Chain

_RENAMED = {"--keep": "--constrain", "--load": "--from-plan", "--seconds": "--time-limit"}

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


def path_of(name: str, folder: Path) -> Path:
    """Where a plan is saved: a path as it is, and a bare name among the plans of the runs in a folder, where
    ``weft serve`` finds it."""
    if Path(name).suffix or "/" in name or "\\" in name:
        return Path(name)
    if not re.fullmatch(r"\w[\w+=@-]*", name):
        raise PlanError(f"a plan cannot be called '{name}'; use letters, digits and any of _ + = @ -, or give a path")
    return folder / "runs" / "plans" / f"{name}.json"


def _own(spec: str, folder: Path) -> Subject:
    from torch import nn

    from weft.utils.imports import import_object

    name, _, attribute = spec.partition(":")
    if name.endswith(".py"):
        folder, name = Path(name).parent, Path(name).stem
    made = import_object(f"{name}:{attribute}", folder)
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
    devices: Annotated[
        int | None, typer.Option(help="How many devices; those of the saved plan if it is read.")
    ] = None,
    machine: Annotated[
        str | None, typer.Option(help="A preset, or a file that `weft calibrate` wrote; h100 if not given.")
    ] = None,
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
    constrain: Annotated[
        list[str] | None, typer.Option(help="What may be split in a module: 'lm_head=n', '*.wte=replicated'.")
    ] = None,
    time_limit: Annotated[
        float, typer.Option(help="Seconds that the search may take; the plan tells what was left untried.", min=0.0)
    ] = 60.0,
    from_plan: Annotated[str | None, typer.Option(help="A plan that was saved, to be priced anew.")] = None,
    save: Annotated[
        str | None, typer.Option(help="The file to save the plan in, or a name: runs/plans/NAME.json, for weft serve.")
    ] = None,
    html: Annotated[
        str | None, typer.Option(help="Write a page with the plan, which opens from disk.", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find out how a model is best split over devices."""
    from weft.plan.planner import load
    from weft.plan.planner import plan as make

    constraints = {name: rule for name, _, rule in (part.partition("=") for part in constrain or [])}
    if bad := [name for name, rule in constraints.items() if not rule]:
        raise ConfigError(f"--constrain takes a module and what may be split there, as 'lm_head=n', not '{bad[0]}'")
    is_supernet = model.endswith(".toml")
    if devices is None and (from_plan is None or is_supernet):
        raise ConfigError("say how many devices there are: --devices N")
    if is_supernet:
        assert devices is not None
        _plan_supernet(model, context, machine or "h100", devices, dtype, as_json)
        return
    for word in context.args:
        if now := _RENAMED.get(word.partition("=")[0]):
            raise ConfigError(f"'{word.partition('=')[0]}' is now '{now}'")
    if settings := settings_of(context):
        raise ConfigError(f"'{settings[0]}' is a setting of a config.toml, and '{model}' is none")
    file = path_of(save, Path()) if save else None
    net, example, loss = subject(model, batch, length, Path())
    if from_plan:
        source = Path(from_plan) if Path(from_plan).is_file() else path_of(from_plan, Path())
        made = load(source, net, example, loss, machine=machine)
        if devices not in (None, made.devices + made.unused_devices):
            raise PlanError(f"the plan is for {made.devices} devices, and {devices} are asked for")
    else:
        assert devices is not None
        made = make(
            net,
            example,
            machine or "h100",
            devices=devices,
            loss=loss,
            memory=memory,
            optimizer=optimizer,
            dtype=dtype,
            stages=stages,
            microbatches=microbatches,
            recompute=recompute,
            time_limit=time_limit,
            constraints=constraints,
        )
    if file:
        made.save(file)
    if html:
        from weft.serve.report import write_plan

        write_plan(made, Path(html))
    if as_json:
        print_json({**made.to_json(), "reasons": made.unsupported(), **({"html": html} if html else {})})
        return
    show_plan(made, console)
    if file:
        console.print(f"saved in {file}: edit its splits, and price it with --from-plan {file}", soft_wrap=True)
    if html:
        console.print(f"written to {html}: open it in a browser", soft_wrap=True)


def _plan_supernet(
    target: str, context: typer.Context, machine: str, devices: int, dtype: str | None, as_json: bool
) -> None:
    """Where the chain that a config names is cut into stages, for a batch of its data."""
    import numpy as np

    from weft.cli import build
    from weft.plan.chain import plan_chain
    from weft.supernet import initialise

    config, folder = read_target(target, context)
    data = build.data_of(config, folder)
    chain = initialise(build.supernet_of(config, folder, data), config.train.seed)
    batch = data.train.take(np.arange(min(config.train.batch_size, len(data.train))))
    found = plan_chain(chain, batch, machine, devices=devices, dtype=dtype or "float32")
    print_json(asdict(found)) if as_json else show_chain(found, chain, console)


def calibrate(
    out: Annotated[str, typer.Argument(help="The file to write the machine in.", metavar="FILE.json")],
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is one.")] = None,
    devices: Annotated[int, typer.Option(help="Between how many devices of this host links are measured.", min=1)] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repeats.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine, for weft plan --machine."""
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
    bandwidth = f"{found.device.bandwidth / 1e9:,.1f} GB/s"
    show({"file": out, **rates, "memory_bandwidth": bandwidth, **links}, False, found.name)


def show_plan(plan: Plan, console: Console) -> None:
    """The plan as a person reads it: what was chosen, layer by layer, what it costs, and what others would."""
    cost = plan.cost
    facts = Table(title=f"{plan.model} on {plan.devices} x {plan.machine}", show_header=False, title_justify="left")
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    facts.add_row("mesh", f"{plan.mesh}" + (f", in each of {plan.stages} stages" if plan.stages > 1 else ""))
    if plan.unused_devices:
        text = "a device is idle" if plan.unused_devices == 1 else f"{plan.unused_devices} devices are idle"
        facts.add_row("", f"{text}: {plan.devices} are faster than {plan.devices + plan.unused_devices}")
    if plan.microbatches > 1 or plan.recompute:
        more = ", activations recomputed" if plan.recompute else ""
        facts.add_row("batch", f"in {plan.microbatches} micro-batches{more}")
    facts.add_row(
        "step", f"{_ms(cost.step_time)}: {_ms(cost.compute)} computing, {_ms(cost.communication)} communicating"
    )
    if plan.stages > 1:
        facts.add_row("", f"{_ms(cost.bubble)} filling, draining and waiting for the slowest stage")
    else:
        best = "the best with this mesh" if plan.gap < 1e-9 else f"within {plan.gap:.1%} of the best with this mesh"
        facts.add_row("proof", best)
    if plan.untried_configs:
        facts.add_row("", f"the time was up: {plan.untried_configs} other configurations might be faster")
    facts.add_row(
        "memory",
        f"{format_bytes(int(cost.memory))} of {format_bytes(int(plan.memory_limit))} a device: "
        f"{format_bytes(int(cost.parameters))} parameters, {format_bytes(int(cost.activations))} activations",
    )
    if unknown := plan.graph.unknown:
        facts.add_row("without rule", ", ".join(f"{name} ({count})" for name, count in sorted(unknown.items())))
    reasons = plan.unsupported()
    facts.add_row("can be run", f"no: {reasons[0]}" if reasons else "yes")
    console.print(facts)
    console.print(_layers(plan))
    if plan.comparisons:
        console.print(_comparisons(plan))


def _layers(plan: Plan) -> Table:
    """Operators with parameters, alike layers together."""
    from weft.plan.graph import layer_of

    table = _table("strategy", ["layer", "operator", "split"], ["times"])
    counts: Counter[tuple[str, str, str]] = Counter()
    for op, operator in enumerate(plan.graph.operators):
        computes = operator.kind not in ("parameter", "input", "constant", "view") and operator.known
        if not (computes and operator.flops > 0 and any(dim.parts > 1 for dim in operator.dims)):
            continue
        layer = layer_of(operator.module)
        shown = operator.module.replace(layer, layer.rsplit(".", 1)[0] + ".*", 1) if layer else operator.module
        counts[shown, operator.kind, _split(plan, op)] += 1
    weighty = {
        key: n for key, n in counts.items() if key[1] in ("matmul", "conv", "attention", "embedding", "mean_loss")
    }
    for (layer, kind, split), count in (weighty or counts).items():
        table.add_row(layer, kind, split, str(count))
    return table


def _split(plan: Plan, op: int) -> str:
    """Such as ``m/8``, or ``m/4 n/2``."""
    parts: dict[str, int] = {}
    for size, name in zip(plan.mesh.sizes, plan.names(op), strict=True):
        if name != "-":
            parts[name] = parts.get(name, 1) * size
    return " ".join(f"{name}/{count}" for name, count in parts.items()) or "whole on each device"


def _comparisons(plan: Plan) -> Table:
    table = _table("compared with", ["", "mesh"], ["step", "memory", "fits", "plan is faster by"])
    for row in plan.comparisons:
        if row.cost is None:
            table.add_row(row.name, "", row.why, "", "", "")
            continue
        fits = "yes" if row.cost.memory <= plan.memory_limit else "no"
        times = f"{row.cost.step_time / plan.cost.step_time:.2f}x"
        table.add_row(row.name, row.mesh, _ms(row.cost.step_time), format_bytes(int(row.cost.memory)), fits, times)
    return table


def _table(title: str, words: list[str], figures: list[str]) -> Table:
    """An empty table; figures are columns whose cells end at the right."""
    table = Table(*words, title=title, title_justify="left")
    for name in figures:
        table.add_column(name, justify="right")
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 10 else f"{seconds:,.3g} s"


def show_chain(plan: ChainPlan, chain: Chain, console: Console) -> None:
    """The stages of a supernet: which blocks, how long, how much memory."""
    title = f"{len(chain.blocks)} blocks on {len(plan.seconds)} x {plan.machine}"
    table = _table(title, ["stage", "blocks"], ["expected step", "weights, gradients, state"])
    bounds = [0, *plan.cut, len(chain.blocks)]
    for stage, (first, last) in enumerate(pairwise(bounds)):
        names = [chain.blocks[first].name, chain.blocks[last - 1].name]
        shown = names[0] if first == last - 1 else f"{names[0]} to {names[1]}"
        table.add_row(str(stage), shown, _ms(plan.seconds[stage]), format_bytes(plan.memory[stage]))
    console.print(table)
    use = f"weft.train(stages={len(plan.seconds)}, cut={[*plan.cut]})"
    console.print(f"{plan.balance:.0%} of the time the mean stage computes; use it by {use}", soft_wrap=True)
