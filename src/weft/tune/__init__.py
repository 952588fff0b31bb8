"""Studies: many trainings at once, fitted to devices and packed onto them."""

from weft.tune.api import tune
from weft.tune.config import StudyConfig, StudyExecution
from weft.tune.jobs import Device
from weft.tune.progress import StudyResult
from weft.tune.recipe import Recipe
from weft.tune.training.run_job import Trial
from weft.tune.training.trainer import Pruned
from weft.utils.imports import make_callable

__all__ = ["Device", "Pruned", "Recipe", "StudyConfig", "StudyExecution", "StudyResult", "Trial", "tune"]

make_callable(__name__, tune)
