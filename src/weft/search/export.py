"""From a searched run to files: the chosen subnet, extracted, checked and written with where it came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from weft.errors import RunError, SearchError, nearest
from weft.search.front import Front
from weft.search.scorer import Scorer
from weft.space import Subnet
from weft.supernet import export
from weft.trainer.api import TrainedRun
from weft.utils.files import read_json


class ExportRequest(Protocol):
    """Which subnet, in which formats."""

    @property
    def subnet(self) -> str | None: ...
    @property
    def limits(self) -> Mapping[str, float]: ...
    @property
    def formats(self) -> str | tuple[str, ...]: ...


class Searched(Protocol):
    """How it was searched."""

    @property
    def name(self) -> str: ...
    @property
    def bn_batches(self) -> int: ...
    @property
    def batch_size(self) -> int: ...


def export_subnet(trained: TrainedRun, wanted: ExportRequest, searched: Searched, command: str = "") -> dict[str, Path]:
    """Writes the subnet under ``results/<its id>`` of the run, in the formats asked for, after checking each.

    This is the end of the way, so here the subnet meets the test data, where there is any; the run records it.
    """
    subnet, scores = choose(trained, wanted, searched.name)
    scorer = Scorer(trained, searched.bn_batches, searched.batch_size)
    tested = scorer.test(subnet) if trained.data.test is not None else None
    if tested is not None:
        trained.run.record_test(subnet.id, tested)
        trained.run.events.close()
    plain = scorer.extract(subnet).cpu()
    inputs = tuple(tensor.cpu() for tensor in scorer.inputs(subnet))
    metadata = {
        "subnet": subnet.to_json(),
        "id": subnet.id,
        "scores": dict(scores),
        "test": tested,
        "run": trained.run.name,
        "command": command,
    }
    return export(plain, inputs, trained.path / "results" / subnet.id, wanted.formats, metadata)


def choose(trained: TrainedRun, wanted: ExportRequest, name: str) -> tuple[Subnet, Mapping[str, float]]:
    """The subnet that is named (by id on the front, or as JSON of its values), else the best one within the limits."""
    space = trained.chain.space
    if not space.choices and wanted.subnet is None:
        return space.subnet(), {}
    if wanted.subnet and wanted.subnet.lstrip().startswith("{"):
        try:
            values = json.loads(wanted.subnet)
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
    if wanted.subnet is None:
        for limit in wanted.limits:
            if limit not in front.metrics:
                raise SearchError(f"export.limits: no metric '{limit}' on the front{nearest(limit, front.metrics)}")
        best = front.best(None, **wanted.limits)
        return best.subnet, best.scores
    named = [member for member in front if member.subnet.id.startswith(wanted.subnet)]
    if not named:
        raise SearchError(f"no subnet '{wanted.subnet}' on the front: it has {', '.join(m.subnet.id for m in front)}")
    if len(named) > 1 or not wanted.subnet:
        raise SearchError(f"'{wanted.subnet}' begins several ids: {', '.join(m.subnet.id for m in named)}")
    return named[0].subnet, named[0].scores


def same_bits(trained: TrainedRun, scorer: Scorer, subnet: Subnet, batch: Mapping[str, Any]) -> bool:
    """Whether the extracted module gives the supernet's outputs to the last bit."""
    from weft.trainer.evaluate import recalibrated

    plain = scorer.extract(subnet)
    with torch.inference_mode(), recalibrated(trained.chain, subnet, scorer.calibration):
        ours = trained.chain(batch, subnet)
        theirs = plain(*scorer.inputs(subnet, batch))
    pairs = [(ours, theirs)] if isinstance(ours, torch.Tensor) else list(zip(ours, theirs, strict=True))
    return all(torch.equal(a, b) for a, b in pairs)
