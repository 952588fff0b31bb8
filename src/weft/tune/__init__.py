"""Many at once: studies, what their trials need, how they are packed onto the devices there are, where they run."""

from weft.callable import make_callable
from weft.tune.attempt import Terms
from weft.tune.entry import tune
from weft.tune.executor import Executor
from weft.tune.job import Device, Fit, Job
from weft.tune.recipe import Recipe
from weft.tune.training import Pruned
from weft.tune.trial import Trial
from weft.tune.tuned import Tuned

__all__ = ["Device", "Executor", "Fit", "Job", "Pruned", "Recipe", "Terms", "Trial", "Tuned", "tune"]

make_callable(__name__, tune)
