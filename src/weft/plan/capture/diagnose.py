"""Why a model could not be captured, in one line: what went wrong, in which operator, at which line of the model."""

from __future__ import annotations

import linecache
import os
import re
import traceback

import torch

_BRANCHES = {"GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException"}
_BRANCH = re.compile(r"data-dependent|dynamic control flow|control flow|is_nonzero|_local_scalar_dense|Guard")
_OUTSIDE = (  # where the files lie that are not the model's
    os.path.dirname(torch.__file__),
    os.path.dirname(os.path.dirname(os.path.dirname(__file__))),
    "<",
    os.path.dirname(os.__file__) + os.sep + "contextlib",
)


def diagnose(problem: BaseException) -> str:
    """
    >>> diagnose(ValueError("7 heads do not divide 64\\nmore"))
    '7 heads do not divide 64 (ValueError)'
    """
    text = str(problem).strip()
    first = next((line.strip() for line in text.split("\n") if line.strip()), "") or type(problem).__name__
    operator = re.search(r"aten[.:]+\w+(?:\.\w+)?", text)
    named = f" in {operator.group().replace('::', '.')}" if operator and operator.group() not in first else ""
    where = _line(problem)
    at = f", at {where}" if where else ""
    if missing := _missing(problem):
        name, function = missing
        return f"'{name}' is None where {function} needs a tensor ({first}){at}: give it in the batch"
    kind = type(problem).__name__
    maybe = kind in ("UserError", "Unsupported", "TorchRuntimeError") and _BRANCH.search(text)
    if kind in _BRANCHES or maybe:
        return f"it decides by the values of tensors (data-dependent control flow){named}{at or ': ' + first}"
    return f"{first} ({kind}{named}){at}"


def _missing(problem: BaseException) -> tuple[str, str] | None:
    """The argument that was None where a tensor was needed, as the outermost function that passed it on calls it, and
    the function that needed it."""
    if not (isinstance(problem, (AttributeError, TypeError)) and "NoneType" in str(problem)):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(problem.__traceback__)]
    lines = [entry.line or "" for entry in traceback.extract_tb(problem.__traceback__)]
    found = None
    for frame, line in zip(reversed(frames), reversed(lines), strict=True):
        code = frame.f_code
        if code.co_filename.startswith(_OUTSIDE):
            break
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        words = re.findall(r"\w+", line)
        name = next((word for word in words if word in given and frame.f_locals.get(word, 0) is None), None)
        if name is None:
            break
        found = name, found[1] if found else code.co_name
    return found


def _line(problem: BaseException) -> str:
    """The innermost line of code that is neither torch's nor this package's."""
    for frame in reversed(traceback.extract_tb(problem.__traceback__)):
        if not frame.filename.startswith(_OUTSIDE):
            code = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
            return f"{os.path.basename(frame.filename)}:{frame.lineno} `{code}`"
    return ""
