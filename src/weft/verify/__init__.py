"""weft verify: trains one run on several numbers of stages, compares bit for bit, and says where and why they part."""

from weft.verify.compare import verify_run

__all__ = ["verify_run"]
