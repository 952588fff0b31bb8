"""What the log of a run says beside losses and scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.pipeline.settings import Settings
from weft.pipeline.weights import Weights
from weft.runs import Run
from weft.supernet import Chain
from weft.supernet.elastic.mixture import choice_options
from weft.supernet.mixed import MixedChain


def begun(run: Run, chain: Chain, at: int, steps: int) -> dict[str, Any]:
    """What the log says at the start; of a mixture also what each of the numbers stands for that every step tells."""
    told = {"law": dict(run.manifest.get("law") or {}), "at": at, "steps": steps}
    if isinstance(chain, MixedChain):
        told["choices"] = [{"name": name, "options": choice_options(chain.space, name)} for name in chain.order]
    return told


def drift(weights: Mapping[str, Weights]) -> dict[str, dict[str, int]]:
    """For the log: by how many updates backwards were ahead of their forwards, by layer, and how often."""
    return {name: {str(k): count for k, count in sorted(w.drifts.items())} for name, w in weights.items() if w.drifts}


def phase(settings: Settings, step: int) -> dict[str, Any]:
    """What the log says of a step's part in a run of two levels."""
    if settings.bilevel is None:
        return {}
    return {"phase": "architecture" if settings.bilevel.architecture(step) else "weights"}
