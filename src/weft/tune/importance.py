"""Importances: how much of the difference between good and poor trials each choice explains."""

from __future__ import annotations

from collections.abc import Sequence

from weft.errors import TuneError
from weft.space import Space
from weft.tune.method import optuna_module, quiet
from weft.tune.record import Direction, Record
from weft.tune.view import for_proposal


def importances(
    space: Space, records: Sequence[Record], directions: Sequence[Direction], objective: int = 0
) -> dict[str, float]:
    """By PED-ANOVA over the complete trials, largest first, adding up to 1; of the choices that all these trials have.

    Empty while fewer than two trials differ in the objective. Optuna's default, fANOVA, would need scikit-learn.
    """
    if not 0 <= objective < len(directions):
        raise TuneError(f"there is no objective {objective}: the study has {len(directions)}, counted from 0")
    complete = [record for record in records if record.state == "complete" and record.values is not None]
    if len({record.values[objective] for record in complete if record.values is not None}) < 2:
        return {}
    importance = optuna_module().importance
    with quiet():
        study = for_proposal(space, complete, directions)
        # The evaluator takes lower for better where it is given a target.
        sign = 1.0 if directions[objective] == "minimize" else -1.0
        found = importance.get_param_importances(
            study,
            evaluator=importance.PedAnovaImportanceEvaluator(),
            target=lambda trial: sign * trial.values[objective],
        )
    return {str(name): float(share) for name, share in sorted(found.items(), key=lambda item: (-item[1], item[0]))}
