"""Why a model could not be captured, in one line: what went wrong, in which operator, at which line of the model."""

from __future__ import annotations

import linecache
import os
import re
import traceback

import torch

_BRANCH = re.compile(r"data-dependent|dynamic control flow|control flow|is_nonzero|_local_scalar_dense|Guard")


def refusal(problem: BaseException) -> str:
    """
    >>> refusal(ValueError("7 heads do not divide 64\\nmore"))
    '7 heads do not divide 64 (ValueError)'
    """
    text = str(problem).strip()
    first = next((line.strip() for line in text.split("\n") if line.strip()), "") or type(problem).__name__
    operator = re.search(r"aten[.:]+\w+(?:\.\w+)?", text)
    named = f" in {operator.group().replace('::', '.')}" if operator and operator.group() not in first else ""
    where = _line(problem)
    at = f", at {where}" if where else ""
    if is_branch(problem):
        return f"it decides by the values of tensors (data-dependent control flow){named}{at or ': ' + first}"
    return f"{first} ({type(problem).__name__}{named}){at}"


def is_branch(problem: BaseException) -> bool:
    """Whether tracing failed because the model decides by the values of tensors."""
    text = str(problem)
    kinds = {"GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException"}
    return type(problem).__name__ in kinds or (
        type(problem).__name__ in ("UserError", "Unsupported", "TorchRuntimeError") and bool(_BRANCH.search(text))
    )


def _line(problem: BaseException) -> str:
    """The innermost line of code that is neither torch's nor this package's."""
    own = (
        os.path.dirname(torch.__file__),
        os.path.dirname(os.path.dirname(os.path.dirname(__file__))),
        "<",
        os.path.dirname(os.__file__) + os.sep + "contextlib",
    )
    for frame in reversed(traceback.extract_tb(problem.__traceback__)):
        if not frame.filename.startswith(own):
            code = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
            return f"{os.path.basename(frame.filename)}:{frame.lineno} `{code}`"
    return ""
