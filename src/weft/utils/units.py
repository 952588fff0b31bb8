"""Sizes in bytes, formatted for people and parsed from what they write."""

from __future__ import annotations

import math
import re

from weft.errors import WeftError

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}ib": 2 ** (10 * (power + 1)) for power, prefix in enumerate("kmgt")}
_UNITS |= {f"{prefix}b": 10 ** (3 * (power + 1)) for power, prefix in enumerate("kmgt")}


def format_bytes(number: float) -> str:
    """Bytes for a person.

    >>> format_bytes(3 * 2**20)
    '3.0 MiB'
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min((max(int(number), 1).bit_length() - 1) // 10, len(units) - 1)
    return f"{number / 1024**power:.{int(power > 0)}f} {units[power]}"


def parse_bytes(text: str | float, error: type[WeftError] = WeftError) -> float:
    """Bytes from a number or from text; raises ``error`` for text that is not a size.

    >>> parse_bytes("80GiB") == 80 * 2**30, parse_bytes("1.5 GB"), parse_bytes("512")
    (True, 1500000000.0, 512.0)
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)\s*", str(text).lower())
    if not match or match[2] not in _UNITS:
        raise error(f"'{text}' is not a size: write 80GiB, 24GB or a number of bytes")
    number = float(match[1]) * _UNITS[match[2]]
    if not 0 < number < math.inf:
        raise error(f"a size is above 0, and finite, not '{text}'")
    return number
