"""Running a plan: a captured model on a mesh of devices, or in stages of such meshes, each computing its parts."""

from weft.plan.execute.applied import Applied, apply
from weft.plan.execute.check import executable
from weft.plan.execute.outline import staged_reasons
from weft.plan.execute.stages import Staged
from weft.plan.execute.staging import apply_stages
from weft.plan.execute.transfer import microbatch_of

__all__ = ["Applied", "Staged", "apply", "apply_stages", "executable", "microbatch_of", "staged_reasons"]
