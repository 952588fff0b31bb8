"""The verbs that train: `train` a supernet, and `verify` that several stages train the same bits."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.arguments import AsJson, Target, read_target, stage_counts
from weft.cli.output import console, errors, print_json, show
from weft.cli.resumption import resumable
from weft.units import size


def train(
    context: typer.Context,
    config: Target,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest good checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be run, and run nothing.")] = False,
    stages: Annotated[int | None, typer.Option(help="On how many processes, each with a part of the chain.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train the supernet that the config names."""
    settings, folder = read_target(config, context, [] if stages is None else [f"--train.stages={stages}"])
    import weft
    from weft import assembly
    from weft.config import to_dict
    from weft.pipeline.ranks import ranks
    from weft.progress import Bar

    assembly.set_threads(settings)
    told = ranks()
    if told is not None and told.rank > 0:  # under torchrun: the first process speaks for all
        console.quiet = errors.quiet = True
    data = assembly.data_of(settings, folder)
    net = assembly.supernet_of(settings, folder, data)
    arguments = assembly.train_arguments(settings, folder)
    path = Path(settings.runs) / str(settings.run)
    if dry_run:
        from weft.dryrun import describe

        show(describe(net, data, arguments, path), as_json, "what would be run")
        return
    arguments |= assembly.extra_arguments(settings, folder)
    saved = {**to_dict(settings), "folder": str(folder.resolve())}
    load = data if (settings.train.stages or 1) == 1 else partial(assembly.data_of, settings, folder.resolve())
    typed = [*context.args, *([] if stages is None else [f"--stages={stages}"]), "--resume"]
    again = shlex.join(["weft", "train", config, *typed])
    ended: dict[str, Any] = {}

    def end(event: Mapping[str, Any]) -> None:
        if event["event"] == "finished":
            ended.update(event)

    with resumable(path, again), Bar(errors, "train", settings.train.steps) as bar:
        trained = weft.train(net, load, **arguments, callbacks=[bar.train, end], resume=resume, config=saved)
    if told is not None and told.rank > 0:
        return
    told_of = {"run": str(trained.path), "steps": settings.train.steps, "fingerprint": trained.fingerprint}
    show({**told_of, **moved(ended.get("residency"), as_json)}, as_json, "trained")


def moved(residency: Any, as_json: bool) -> dict[str, Any]:
    """What is said of layers that lived on the host: of every stage as it is, or in sum for a person."""
    if not residency or as_json:
        return {} if not residency else {"residency": residency}
    stages = [residency] if isinstance(residency, dict) else list(residency)
    uses, misses, brought, sent = (sum(own[key] for own in stages) for key in ("uses", "misses", "brought", "sent"))
    largest = max(stages, key=lambda own: own["peak"])
    beside = f", {size(largest['device_peak'])} with all else" if largest["device_peak"] else ""
    return {
        "layers on the device": f"at most {size(largest['peak'])} of {size(largest['budget'])}{beside}",
        "there in time": f"{100 * (1 - misses / uses) if uses else 100:.1f} % of {uses} uses",
        "moved": f"{size(brought)} to the device, {size(sent)} back",
    }


def verify(
    context: typer.Context,
    config: Target,
    stages: Annotated[str, typer.Option(help="Numbers of stages, separated by commas.")] = "1,2",
    steps: Annotated[int, typer.Option(help="How many steps of the run are trained at most.", min=1)] = 50,
    as_json: AsJson = False,
) -> None:
    """Prove that the run has the same bits on several stages, or say where and why not; exit code 1 if not."""
    settings, folder = read_target(config, context)
    counts = stage_counts(stages)
    from weft import assembly
    from weft.tables import verified
    from weft.verification import verify_run

    assembly.set_threads(settings)
    net, load = assembly.supernet_of(settings, folder), partial(assembly.data_of, settings, folder.resolve())
    arguments = {**assembly.train_arguments(settings, folder), **assembly.extra_arguments(settings, folder)}
    with errors.status("verify") as status:
        found = verify_run(
            net, load, arguments, counts, steps=steps, on_way=lambda way: status.update(f"verify: {way}")
        )
    print_json(found) if as_json else verified(console, found)
    if not found["equal"]:
        raise typer.Exit(1)
