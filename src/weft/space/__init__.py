"""What may vary: choices and derived dimensions, the subnets picked from them, and streams of subnets."""

from weft.space.choice import Categorical, Choice, Floats, Integers
from weft.space.expression import Expr, Value, maximum, minimum
from weft.space.permutation_streams import Fair, Spaced
from weft.space.space import Space
from weft.space.streams import Fixed, FromFile, Iid, Sandwich, Shrinking, Stream, make_stream
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
