"""What a model keeps outside of its weights and buffers, where a graph of it does not go."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from weft.tune.complete import example
from weft.tune.drawing import Drawing
from weft.tune.remainder import Remainder, encoded
from weft.tune.setting import Setting


def kept_outside(setting: Setting) -> str | None:
    """The name of an attribute or extra state that every forward in training changes, such as a counter; None if there
    is none. A graph has it as it was when the graph was made.

    It is what the second of two forwards of two samples changes: what the first alone does is a cache that it fills. A
    model that cannot take two samples is not looked at.
    """
    model, batch = setting.bare(), example(setting, min(2, setting.batch_size), "cpu")
    drawing = Drawing(setting.seed, torch.device("cpu"))
    with suppress(Exception), drawing.preserved():
        model(*setting.enter(batch))
        remainder, extra = Remainder(model), _extra(model)
        model(*setting.enter(batch))
        now = _extra(model)
        changed = [*remainder.changed(model)[1], *(name for name in now if now[name] != extra.get(name))]
        return next(iter(changed), None)
    return None


def _extra(model: nn.Module) -> dict[str, tuple[str, list[Any]]]:
    """Extra states as text, with the numbers of their tensors."""
    found = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            tensors: dict[str, Tensor] = {}
            text = json.dumps(encoded(value, tensors, ""))
            found[name] = text, [tensor.tolist() for tensor in tensors.values()]
    return found
