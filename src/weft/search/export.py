"""Writes a subnet of a searched run to files: extracted, checked, and with its scores and origin."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from weft.errors import RunError, SearchError, nearest
from weft.search.front import Front
from weft.search.scorer import Scorer
from weft.space import Subnet
from weft.supernet import export
from weft.trainer.api import TrainedRun
from weft.trainer.evaluate import recalibrated
from weft.utils.files import read_json


def export_subnet(
    run: TrainedRun,
    subnet: str | None,
    limits: Mapping[str, float],
    formats: str | tuple[str, ...],
    *,
    search_name: str = "search",
    bn_batches: int = 2,
    batch_size: int = 256,
    command: str = "",
) -> dict[str, Path]:
    """Writes a subnet under ``results/<its id>`` of the run, in the formats asked for, after checking each.

    The subnet is scored on the test data, where there is any, and the run records that. ``command`` is kept with the
    files.
    """
    chosen, scores = choose(run, subnet, limits, search_name)
    scorer = Scorer(run, bn_batches, batch_size)
    tested = scorer.test(chosen) if run.data.test is not None else None
    if tested is not None:
        run.run.record_test(chosen.id, tested)
        run.run.events.close()
    plain = scorer.extract(chosen).cpu()
    inputs = tuple(tensor.cpu() for tensor in scorer.inputs(chosen))
    metadata = {
        "subnet": chosen.to_json(),
        "id": chosen.id,
        "scores": dict(scores),
        "test": tested,
        "run": run.run.name,
        "command": command,
    }
    return export(plain, inputs, run.path / "results" / chosen.id, formats, metadata)


def choose(
    trained: TrainedRun, subnet: str | None, limits: Mapping[str, float], name: str
) -> tuple[Subnet, Mapping[str, float]]:
    """The subnet that is named (by id on the front, or as JSON of its values), else the best one within the limits."""
    space = trained.chain.space
    if not space.choices and subnet is None:
        return space.subnet(), {}
    if subnet and subnet.lstrip().startswith("{"):
        try:
            values = json.loads(subnet)
        except ValueError as problem:
            raise SearchError(f"the subnet is not JSON: {problem}") from None
        return (space.load_subnet(values) if "values" in values else space.subnet(values)), {}
    path = trained.path / "results" / name / "front.json"
    if not path.is_file():
        raise RunError(
            f"run '{trained.run.name}' has no front '{name}' yet: "
            "run `weft search` first, or give --export.subnet='{...}'"
        )
    front = Front.from_json(space, read_json(path))
    if subnet is None:
        for limit in limits:
            if limit not in front.metrics:
                raise SearchError(f"export.limits: no metric '{limit}' on the front{nearest(limit, front.metrics)}")
        best = front.best(None, **limits)
        return best.subnet, best.scores
    named = [member for member in front if member.subnet.id.startswith(subnet)]
    if not named:
        raise SearchError(f"no subnet '{subnet}' on the front: it has {', '.join(m.subnet.id for m in front)}")
    if len(named) > 1 or not subnet:
        raise SearchError(f"'{subnet}' begins several ids: {', '.join(m.subnet.id for m in named)}")
    return named[0].subnet, named[0].scores


def same_bits(trained: TrainedRun, scorer: Scorer, subnet: Subnet, batch: Mapping[str, Any]) -> bool:
    """Whether the extracted module gives the supernet's outputs to the last bit."""
    plain = scorer.extract(subnet)
    with torch.inference_mode(), recalibrated(trained.chain, subnet, scorer.calibration):
        ours = trained.chain(batch, subnet)
        theirs = plain(*scorer.inputs(subnet, batch))
    pairs = [(ours, theirs)] if isinstance(ours, torch.Tensor) else list(zip(ours, theirs, strict=True))
    return all(torch.equal(a, b) for a, b in pairs)
