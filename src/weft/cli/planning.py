"""The verbs that split a model over devices: `plan` it, and `calibrate` the machine that it is planned for."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.arguments import AsJson, joined, read_target
from weft.cli.output import console, print_json, show
from weft.errors import ConfigError


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
    html: Annotated[str | None, typer.Option(help="Write the plan as a page.", metavar="FILE")] = None,
    as_json: AsJson = False,
) -> None:
    """Say how a model is best split over devices, what that takes, and what others would do."""
    from weft import planning
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
        from weft.plan.page import page
        from weft.runs.files import write_atomic

        write_atomic(html, page(made))
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
    from weft.planning import plan_config

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
    from weft.runs.files import write_json

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
