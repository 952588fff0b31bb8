"""What may vary: choices and derived dimensions, the subnets picked from them, and streams of subnets."""

from weft.space.choice import Categorical, Choice, Floats, Integers
from weft.space.expr import Expr, Value, maximum, minimum
from weft.space.factory import make_stream
from weft.space.permuted import Fair, Spaced
from weft.space.recorded import FromFile
from weft.space.shrinking import Shrinking
from weft.space.space import Space
from weft.space.stream import Fixed, Iid, Sandwich, Stream
from weft.space.subnet import Subnet

__all__ = [
    "Categorical",
    "Choice",
    "Expr",
    "Fair",
    "Fixed",
    "Floats",
    "FromFile",
    "Iid",
    "Integers",
    "Sandwich",
    "Shrinking",
    "Space",
    "Spaced",
    "Stream",
    "Subnet",
    "Value",
    "make_stream",
    "maximum",
    "minimum",
]
