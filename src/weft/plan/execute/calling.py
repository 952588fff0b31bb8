"""How a captured program is called: the inputs that it takes, and the form of what it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from weft.errors import PlanError
from weft.plan.capture import Captured
from weft.plan.execute.reading import Reading, Value


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor of the batch: its place among the arguments or its keyword, and what it was when captured."""

    key: int | str
    value: Value
    shape: tuple[int, ...]
    dtype: torch.dtype

    def check(self, given: Any, shape: tuple[int, ...], part: str = "") -> Tensor:
        """Refuses what is not like the captured input, or the part of it of this shape."""
        if not isinstance(given, Tensor):
            raise PlanError(
                f"the model was captured with a tensor as argument {self.key!r}, but is called with {given!r}"
            )
        if tuple(given.shape) != shape or given.dtype != self.dtype:
            raise PlanError(
                f"argument {self.key!r} was captured as {self.dtype} of shape {self.shape}{part}, "
                f"but is {given.dtype} of shape {tuple(given.shape)}; give it so, or capture anew"
            )
        return given


@dataclass(frozen=True, slots=True)
class Calling:
    """Inputs in the order of the program; outputs are values, or constants in a tuple of one, in the form ``tree``."""

    inputs: tuple[Input, ...]
    outputs: tuple[Value | tuple[Any], ...]
    tree: Any

    @classmethod
    def of(cls, captured: Captured, reading: Reading) -> Calling:
        held = {node.name: node.meta["val"] for node in captured.nodes.nodes if node.name in captured.inputs}
        inputs = tuple(
            Input(key, reading.value(node), tuple(held[node].shape), held[node].dtype)
            for node, key in captured.inputs.items()
        )
        program = captured.program
        if isinstance(program, ExportedProgram):
            found, tree = program.graph_signature.user_outputs, program.call_spec.out_spec
        else:
            one = captured.results[0] if len(captured.results) == 1 else list(captured.results)
            found, tree = pytree.tree_flatten(one)
        outputs = tuple(reading.value(each) if isinstance(each, str) else (each,) for each in found)
        return cls(inputs, outputs, tree)

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """What is given for each input. What was no tensor when captured is part of the program, and not looked at."""
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(kwargs)
        known = {each.key for each in self.inputs}
        for key, value in given.items():
            if isinstance(value, Tensor) and key not in known:
                raise PlanError(f"the model was captured without a tensor as argument {key!r}; capture it with one")
        return [given.get(each.key) for each in self.inputs]

    def result(self, leaves: list[Any]) -> Any:
        return pytree.tree_unflatten(leaves, self.tree)
