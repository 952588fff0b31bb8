"""A switch: a choice between modules within one layer, each with its own weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.elastic.mixture import Mixture, Pick, choice_options
from weft.elastic.module import Module, call
from weft.errors import SupernetError, nearest
from weft.space import Expr, Space, Value


class Switch(Module):
    """Runs the module of the option that a subnet has; under a mixture, the expectation of their outputs.

    The choice, by name or handle, is declared elsewhere, since it may steer many switches. Several options may have
    one module, under a tuple of them: an elastic one that reads the choice itself, such as a convolution whose kernel
    is ``1 + 2 * (op == "conv3")``. Under a mixture that module gets the probabilities on condition that it runs.

    ``partial=k`` is the partial channel connection of PC-DARTS: the first of k parts of the channels goes through the
    modules, the others pass by (pooled to the modules' ``stride``), then the channels are shuffled. That is for
    channels that do not vary, in a number that k divides.
    """

    def __init__(
        self,
        space: Space,
        choice: str | Expr,
        modules: Mapping[Any, nn.Module],
        partial: int | None = None,
        stride: int = 1,
    ) -> None:
        super().__init__()
        self.space = space
        self.choice = _name(space, choice)
        if partial is not None and (isinstance(partial, bool) or partial < 1):
            raise SupernetError(f"a switch with partial={partial!r}: one of how many parts of the channels, 1 or more")
        self.partial, self.stride = partial, stride
        self.candidates = nn.ModuleDict()
        self._places: dict[str, tuple[int, ...]] = {}
        self._labels: dict[Value, str] = {}
        self._reads_choice: dict[str, bool] = {}  # whether the module reads the choice itself
        known = choice_options(space, self.choice)
        for options, module in modules.items():
            options = options if isinstance(options, tuple) else (options,)
            label = "-".join(str(option).replace(".", "_") for option in options)
            for option in options:
                if option not in known:
                    hint = nearest(str(option), map(str, known))
                    raise SupernetError(f"choice '{self.choice}' has no option {option!r}{hint}")
                if option in self._labels:
                    raise SupernetError(f"the switch on '{self.choice}' has two modules for option {option!r}")
                self._labels[option] = label
            if label in self._places:
                raise SupernetError(
                    f"two modules of the switch on '{self.choice}' would both be called '{label}': choose options that "
                    "differ in more than dots and types"
                )
            self._places[label] = tuple(sorted(known.index(option) for option in options))
            self._reads_choice[label] = any(self.choice in p.reads for p in module.modules() if isinstance(p, Module))
            try:
                self.candidates[label] = module
            except (KeyError, TypeError) as problem:
                raise SupernetError(f"the switch on '{self.choice}' cannot hold option '{label}': {problem}") from None
        missing = [option for option in known if option not in self._labels]
        if missing:
            raise SupernetError(f"the switch on '{self.choice}' has no module for option {missing[0]!r}")

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.choice,)

    def forward(self, x: Tensor, pick: Pick) -> Tensor:
        if self.partial is None:
            return self._run(x, pick)
        share = x.shape[1] // self.partial
        through, past = self._run(x[:, :share], pick), x[:, share:]
        if self.stride > 1:
            past = F.max_pool2d(past, self.stride, self.stride, ceil_mode=True)
        return F.channel_shuffle(torch.cat((through, past), 1), self.partial)

    def _run(self, x: Tensor, pick: Pick) -> Tensor:
        if not isinstance(pick, Mixture):
            out: Tensor = call(self.candidates[self._labels[pick[self.choice]]], x, pick=pick)
            return out
        probabilities = pick[self.choice].unbind()
        total: Tensor | None = None
        for label, module in self.candidates.items():
            if isinstance(module, Zero) and len(self.candidates) > 1:
                continue  # adds nothing, whatever its probability
            first, *others = self._places[label]
            probability = probabilities[first]
            for place in others:
                probability = probability + probabilities[place]
            out = call(module, x, pick=self._conditional(label, pick) if self._reads_choice[label] else pick)
            total = probability.to(out.dtype) * out if total is None else total + probability.to(out.dtype) * out
        assert total is not None
        return total

    def _conditional(self, label: str, mixture: Mixture) -> Mixture:
        """The mixture on condition that the choice is one of the module's options."""
        places = self._places[label]

        def make() -> Mixture:
            probabilities = mixture[self.choice]
            marks = torch.zeros_like(probabilities)
            for place in places:  # one by one: a copy from the host would make a GPU wait
                marks[place] = 1.0
            inside = probabilities * marks
            total = inside.sum()
            # Where none of the options can be, the module counts for nothing, but its gradient has to be a number.
            possible = total > 0
            conditional = torch.where(possible, inside / torch.where(possible, total, 1.0), marks / len(places))
            rest = {name: mixture[name] for name in mixture.names}
            return Mixture.unchecked(self.space, {**rest, self.choice: conditional})

        conditional: Mixture = mixture.cached(("conditional", self.choice, places), make)
        return conditional


class Zero(Module):
    """Returns zeros: the option to leave an edge of a cell out."""

    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor, pick: Pick) -> Tensor:
        return torch.zeros_like(x if self.stride == 1 else x[:, :, :: self.stride, :: self.stride])


class Sequential(nn.Sequential, Module):
    """Modules in a row, elastic ones and others; those that take the pick get it."""

    def forward(self, x: Tensor, pick: Pick) -> Tensor:  # type: ignore[override]
        for part in self:
            x = call(part, x, pick=pick)
        return x


def _name(space: Space, choice: str | Expr) -> str:
    if isinstance(choice, Expr):
        if len(choice.program) != 1 or choice.program[0][0] != "name":
            raise SupernetError(f"a switch is on one choice, not on '{choice}'")
        choice = str(choice.program[0][1])
    if choice not in space.choices:
        raise SupernetError(f"a switch on '{choice}', which is no choice of the space{nearest(choice, space.choices)}")
    return choice
