"""Errors that a user can act on: each message gives the rule, the values and a remedy that works."""

from __future__ import annotations

import difflib
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path


class WeftError(Exception):
    """Base of every error that is the user's to fix; the command line prints it as one line and exits 2."""


class SpaceError(WeftError):
    """A space, a subnet or an expression that cannot be."""


class StreamError(WeftError):
    """A stream that cannot be drawn from its space."""


class SupernetError(WeftError):
    """A chain, block or layer that breaks a rule of supernets."""


class ConsistencyError(WeftError):
    """A layer's consistency that cannot be kept in this run."""


class DataError(WeftError):
    """Data that is absent, malformed or too small."""


class RunError(WeftError):
    """A run directory that cannot be used as asked."""


class CheckpointError(RunError):
    """A checkpoint that is damaged, incomplete or of another supernet."""


class TrainError(WeftError):
    """Training that cannot start or go on."""


class NonFiniteError(TrainError):
    """A loss that is not a number; names the step, the subnet and the layer."""


class PipelineError(TrainError):
    """Stages that cannot work together: one is lost, hangs, or disagrees with the others."""


class PlanError(WeftError):
    """A model that cannot be planned, a machine that is not one, or a plan that cannot be had or run."""


class SearchError(WeftError):
    """A search that cannot be run as asked."""


class TuneError(WeftError):
    """A study, a trial or an executor that cannot be had or go on as asked."""


class ConfigError(WeftError):
    """A configuration with an unknown key, a wrong type or a value out of range."""


def place_in_own_code(problem: BaseException) -> str | None:
    """The innermost line of the user's own code that an error went through, if it did."""
    others = ("<", str(Path(__file__).parent), sysconfig.get_paths()["stdlib"])
    for frame in reversed(traceback.extract_tb(problem.__traceback__)):
        if not frame.filename.startswith(others) and "-packages" not in frame.filename:
            return f"{frame.filename}, line {frame.lineno}, in {frame.name}"
    return None


SHOWN = 12
"""Names that are listed of many more."""


def install_extra(extra: str) -> str:
    """How to install the packages of an extra; PyPI's `weft` is another project.

    >>> install_extra("onnx")
    "pip install -e '.[onnx]' in the checkout of weft"
    """
    return f"pip install -e '.[{extra}]' in the checkout of weft"


def nearest(word: str, words: Iterable[str]) -> str:
    """A hint for a mistyped name, ready to append to a message.

    >>> nearest("microbatch", ["steps", "microbatches"])
    "; did you mean 'microbatches'?"
    >>> nearest("zzz", ["a", "b"])
    '; known: a, b'
    >>> nearest("zzz", "abcdefghijklmnopqrstuvwxy")
    '; known: a, b, c, d, e, f, g, h, i, j, k, l and 13 more'
    """
    known = sorted(words)
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"; did you mean '{close[0]}'?"
    if len(known) <= 2 * SHOWN:
        return f"; known: {', '.join(known)}" if known else ""
    return f"; known: {', '.join(known[:SHOWN])} and {len(known) - SHOWN} more"
