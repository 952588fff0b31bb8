"""Many at once: studies, what their trials need, how they are packed onto the devices there are, where they run."""

from weft.tune.api import tune
from weft.tune.jobs import Device, Executor, Fit, Job
from weft.tune.recipe import Recipe
from weft.tune.result import StudyResult
from weft.tune.training.run_job import StudySpec
from weft.tune.training.trainer import Pruned
from weft.tune.trial import Trial
from weft.utils.imports import make_callable

__all__ = ["Device", "Executor", "Fit", "Job", "Pruned", "Recipe", "StudyResult", "StudySpec", "Trial", "tune"]

make_callable(__name__, tune)
