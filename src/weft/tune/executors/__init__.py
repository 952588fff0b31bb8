"""Where trials run: processes of this machine, or Ray. ``Executor`` is the interface, for executors of your own."""

from weft.tune.jobs import Device, Ended, Event, Executor, Fit, Job, Lost, Reported
from weft.tune.training.run_job import StudySpec

__all__ = ["Device", "Ended", "Event", "Executor", "Fit", "Job", "Lost", "Reported", "StudySpec"]
