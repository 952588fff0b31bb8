"""Optimizers by layer: any class of torch.optim, one call for all the layers of a step, every other layer untouched.

torch.optim keeps its state per parameter, so one optimizer over all layers that is shown only the parameters of the
layers in question behaves exactly as one optimizer per layer, at the cost of one call.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import TrainError, nearest

Groups = Callable[[str, nn.Parameter], Mapping[str, Any]]
"""Options of torch.optim that a parameter gets beside the common ones, by its global name."""


def matrices(name: str, parameter: nn.Parameter) -> Mapping[str, Any]:
    """Weight decay for what has two dimensions or more; none for biases and the weights of norms."""
    return {} if parameter.dim() >= 2 else {"weight_decay": 0.0}


Schedule = Callable[[int, int], float]
"""``schedule(step, steps)`` gives the factor of the base learning rate; nothing else may influence it."""

SGD: Mapping[str, float] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}
"""The options of an optimizer without a kind."""

GROUPS: Mapping[str, Groups] = {"matrices": matrices}


@dataclass(frozen=True, slots=True)
class GlobalNorm:
    """Clip by the norm of the gradient of all layers together, as ``torch.nn.utils.clip_grad_norm_`` does."""

    limit: float

    def __str__(self) -> str:
        return f"global:{self.limit:g}"


def make_clip(clip: float | str | GlobalNorm | None) -> float | GlobalNorm | None:
    """What ``clip`` means: a number for the norm of each layer, ``global:1.0`` for that of all together."""
    parsed: float | GlobalNorm | None = None if isinstance(clip, str) else clip
    if isinstance(clip, str):
        word, _, number = clip.partition(":")
        try:
            parsed = GlobalNorm(float(number)) if word == "global" else float(clip)
        except ValueError:
            raise TrainError(
                f"clip='{clip}': write a number for the largest norm of a layer's gradient, or global:1.0 for that of "
                "all layers together"
            ) from None
    limit = parsed.limit if isinstance(parsed, GlobalNorm) else parsed
    if limit is not None and not limit > 0:
        raise TrainError(f"clip={clip}: the largest norm of a gradient is above 0")
    return parsed


@dataclass(frozen=True)
class Optimizer:
    """Which optimizer, with which options: ``Optimizer("adamw", lr=3e-4, weight_decay=0.1, schedule="cosine")``.

    ``kind`` is the name of a class of torch.optim in any case, or the class itself; without it the options change
    single values of SGD at a rate of 0.05, with momentum 0.9 and weight decay 5e-4. Muon takes the matrices, and
    ``others`` (AdamW if not given) what is not a matrix. ``groups`` gives single parameters other options; "matrices"
    leaves weight decay to those of two dimensions or more.

    ``schedule`` is ``cosine``, ``linear`` or ``constant``, one that ends at a part of the rate such as ``cosine:0.1``,
    or a function of (step, steps), after ``warmup_steps`` in which the rate rises from 0. ``clip`` is the largest norm
    of each layer's gradient, or ``global:1.0`` for that of all layers together.
    """

    kind: str | type[torch.optim.Optimizer] = "sgd"
    options: Mapping[str, Any] = field(default_factory=dict)
    schedule: str | Schedule = "cosine"
    warmup_steps: int = 0
    clip: float | GlobalNorm | None = None
    groups: Groups | None = None
    others: Optimizer | None = None

    def __init__(
        self,
        kind: str | type[torch.optim.Optimizer] | None = None,
        *,
        schedule: str | Schedule = "cosine",
        warmup_steps: int = 0,
        clip: float | str | GlobalNorm | None = None,
        groups: Groups | str | None = None,
        others: Optimizer | None = None,
        **options: Any,
    ) -> None:
        make_schedule(schedule, warmup_steps)
        if isinstance(groups, str) and groups not in GROUPS:
            raise TrainError(f"unknown groups '{groups}' of parameters{nearest(groups, GROUPS)}")
        values: dict[str, Any] = {
            "kind": "sgd" if kind is None else kind,
            "options": {**SGD, **options} if kind is None else dict(options),
            "schedule": schedule,
            "warmup_steps": warmup_steps,
            "clip": make_clip(clip),
            "groups": GROUPS[groups] if isinstance(groups, str) else groups,
            "others": others,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        accepted = inspect.signature(self.cls).parameters
        for name in options:
            if name not in accepted:
                own = {*accepted, "schedule", "warmup_steps", "clip", "groups", "others"} - {"params", "self"}
                raise TrainError(f"{self.cls.__name__} has no option '{name}'{nearest(name, own)}")

    @property
    def cls(self) -> type[torch.optim.Optimizer]:
        if isinstance(self.kind, type):
            return self.kind
        known = {
            name.lower(): cls
            for name, cls in vars(torch.optim).items()
            if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
        }
        if self.kind.lower() not in known or self.kind.lower() == "lbfgs":
            raise TrainError(f"unknown optimizer '{self.kind}'{nearest(self.kind.lower(), set(known) - {'lbfgs'})}")
        return known[self.kind.lower()]

    def lr_factor(self, step: int, steps: int) -> float:
        """What the learning rate is multiplied by in a step of a run of ``steps``."""
        return make_schedule(self.schedule, self.warmup_steps)(step, steps)

    def with_schedule(self, schedule: str | Schedule) -> Optimizer:
        """The same under another schedule, without a warm-up."""
        return Optimizer(
            self.kind, schedule=schedule, clip=self.clip, groups=self.groups, others=self.others, **self.options
        )

    def describe(self) -> dict[str, Any]:
        """For a run's manifest."""
        described: dict[str, Any] = {"kind": self.cls.__name__, **self.options}
        if name := next((name for name, groups in GROUPS.items() if groups is self.groups), None):
            described["groups"] = name
        if self.others is not None:
            described["others"] = self.others.describe()
        return described


class LayerOptimizer:
    """Applies updates to the parameters it was made with; a parameter that an update does not name stays as it is."""

    def __init__(
        self,
        spec: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        separate: Mapping[str, Optimizer] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """``separate`` names parameters with an optimizer of their own, whose learning rate stays as it is; ``aliases``
        gives parameters another name by which ``groups`` knows them."""
        self.parameters = dict(parameters)
        self._aliases = dict(aliases or {})
        self._optimizers: list[torch.optim.Optimizer] = []
        self._group: dict[int, tuple[int, int]] = {}
        self._base: list[list[float]] = []
        separate = separate or {}
        common = {name: p for name, p in self.parameters.items() if name not in separate}
        if issubclass(spec.cls, getattr(torch.optim, "Muon", ())):
            matrices = {name: p for name, p in common.items() if p.dim() == 2}
            rest = {name: p for name, p in common.items() if p.dim() != 2}
            self._make(spec, matrices)
            self._make(spec.others or Optimizer("adamw", lr=spec.options.get("lr", 1e-3)), rest)
        else:
            self._make(spec, common)
        self._scheduled = len(self._optimizers)
        for own in {id(own): own for own in separate.values()}.values():
            self._make(own, {name: self.parameters[name] for name, other in separate.items() if other is own})

    def _make(self, spec: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        if not parameters:
            return
        kinds: list[Mapping[str, Any]] = []
        members: list[list[nn.Parameter]] = []
        for name, parameter in parameters.items():
            kind = spec.groups(self._aliases.get(name, name), parameter) if spec.groups else {}
            if kind not in kinds:
                kinds.append(kind)
                members.append([])
            members[kinds.index(kind)].append(parameter)
        options = dict(spec.options)
        if fuses(spec.cls, options, parameters.values()):
            options.setdefault("fused", True)
        groups = [{"params": list(group), **kind} for group, kind in zip(members, kinds, strict=True)]
        try:
            optimizer = spec.cls(groups, **options)
        except (TypeError, ValueError, RuntimeError) as problem:
            raise TrainError(f"{spec.cls.__name__} refuses its options: {problem}") from problem
        for index, group in enumerate(members):
            for parameter in group:
                self._group[id(parameter)] = (len(self._optimizers), index)
        self._optimizers.append(optimizer)
        self._base.append([float(group["lr"]) for group in optimizer.param_groups])

    def apply(self, parameters: Sequence[nn.Parameter], gradients: Iterable[Tensor], factor: float) -> None:
        shown: dict[tuple[int, int, bool], list[nn.Parameter]] = {}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            # Fused kernels walk over memory, and autograd may hand out a gradient that lies turned or expanded there.
            alike = gradient.stride() == parameter.stride()
            parameter.grad = gradient if alike else torch.empty_like(parameter).copy_(gradient)
            number, index = self._group[id(parameter)]
            # Fused kernels take either parameters that all have state or parameters that all have none.
            known = bool(self._optimizers[number].state.get(parameter))
            shown.setdefault((number, index, known), []).append(parameter)
        for number, optimizer in enumerate(self._optimizers):
            for known in (False, True):
                used = False
                for index, group in enumerate(optimizer.param_groups):
                    group["params"] = shown.get((number, index, known), [])
                    group["lr"] = self._base[number][index] * (factor if number < self._scheduled else 1.0)
                    used = used or bool(group["params"])
                if used:
                    optimizer.step()
        for parameter in parameters:
            parameter.grad = None

    def optimizer(self, parameter: nn.Parameter) -> tuple[torch.optim.Optimizer, int]:
        number, index = self._group[id(parameter)]
        return self._optimizers[number], index

    @property
    def rate(self) -> float:
        """The base learning rate of the common optimizer."""
        return self._base[0][0]

    def direction(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Where plain gradient descent with the optimizer's weight decay and momentum would go, without going."""
        directions = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            optimizer, index = self.optimizer(parameter)
            group = optimizer.param_groups[index]
            direction = gradient + float(group.get("weight_decay") or 0.0) * parameter.detach()
            velocity = optimizer.state.get(parameter, {}).get("momentum_buffer")
            directions.append(direction if velocity is None else direction + float(group["momentum"]) * velocity)
        return directions

    def state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The optimizer's state of a parameter, plain numbers under names with a "!"; empty before its first update."""
        entry: Mapping[str, Any] = self.optimizer(parameter)[0].state.get(parameter, {})
        tensors = {key: value for key, value in entry.items() if isinstance(value, Tensor)}
        numbers = {key: value for key, value in entry.items() if isinstance(value, int | float)}
        return tensors | {
            f"{key}!": torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
            for key, value in numbers.items()
        }

    def load(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Puts back what ``state`` gave, by parameter name."""
        # Not by load_state_dict, which would cast every state, such as NAdam's product, to the parameter's type.
        for name, p in self.parameters.items():
            if saved := states.get(name):
                optimizer, index = self.optimizer(p)
                group = optimizer.param_groups[index]
                counts_on_device = bool(group.get("capturable") or group.get("fused"))
                restored = {key: _restored(key, value, p, counts_on_device) for key, value in saved.items()}
                optimizer.state[p] = {key.removesuffix("!"): value for key, value in restored.items()}


def fuses(kind: type[torch.optim.Optimizer], options: Mapping[str, Any], parameters: Iterable[nn.Parameter]) -> bool:
    """Whether an optimizer with these options has one kernel for all of these parameters, which are then real."""
    known = "fused" in inspect.signature(kind).parameters and "foreach" not in options
    return known and all(parameter.is_floating_point() for parameter in parameters)


def _restored(key: str, value: Tensor, parameter: nn.Parameter, counts_on_device: bool) -> Any:
    if key.endswith("!"):
        return value.item()
    if key == "step" and not counts_on_device:
        return value.cpu().clone()
    moved = value.to(parameter.device, copy=True)
    if moved.dim() < 2 or moved.shape != parameter.shape:
        return moved
    # Kernels over many tensors want a parameter and its state to lie in memory alike (channels last, for example).
    return torch.empty_like(parameter, dtype=moved.dtype).copy_(moved)


# Learning-rate schedules: a factor of the base rate as a pure function of the step.


def constant(step: int, steps: int) -> float:
    return 1.0


def linear(step: int, steps: int) -> float:
    """From 1 down to 0 after the last step."""
    return 1.0 - step / steps


def cosine(step: int, steps: int) -> float:
    """From 1 down to 0 after the last step, along half a cosine."""
    return 0.5 * (1.0 + math.cos(math.pi * step / steps))


_KINDS: dict[str, Schedule] = {"constant": constant, "linear": linear, "cosine": cosine}


def is_named(text: str) -> bool:
    """Whether a text has the form of a schedule's name, such as ``cosine`` or ``cosine:0.1``, and not of code."""
    return _FORM.fullmatch(text) is not None


def make_schedule(kind: str | Schedule, warmup_steps: int = 0) -> Schedule:
    """A named schedule, or a function as it is, with a linear warm-up over the first steps.

    ``cosine:0.1`` and ``linear:0.1`` go down to a tenth of the base rate instead of to 0.

    >>> schedule = make_schedule("cosine", warmup_steps=2)
    >>> [round(schedule(step, 6), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    base = kind if callable(kind) else _named(kind)
    if warmup_steps < 0:
        raise TrainError(f"warmup_steps={warmup_steps}: a number of steps, 0 or more")

    def schedule(step: int, steps: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return max(base(step - warmup_steps, max(steps - warmup_steps, 1)), 0.0)

    # Checkpoints of trials name their schedule so.
    schedule.__qualname__ = f"{getattr(base, '__qualname__', base)}(warmup={warmup_steps}, floor=0.0)"
    return schedule


_FORM = re.compile(r"(\w+)(?::(\d*\.?\d*(?:e-?\d+)?))?")


@cache
def _named(text: str) -> Schedule:
    form = _FORM.fullmatch(text)
    kind, end = (form[1], form[2]) if form else (text, None)
    if kind not in _KINDS:
        raise TrainError(f"unknown schedule '{text}'{nearest(kind, _KINDS)}")
    if end is None:
        return _KINDS[kind]
    if kind == "constant" or not end.strip(".") or not 0.0 <= float(end) <= 1.0:
        raise TrainError(f"schedule '{text}': write the part of the rate to go down to, 0 to 1, as in cosine:0.1")
    base, least = _KINDS[kind], float(end)

    def eased(step: int, steps: int) -> float:
        return least + (1.0 - least) * base(step, steps)

    eased.__qualname__ = text
    return eased
