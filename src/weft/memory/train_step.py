"""A training step on fake tensors, traced from the first allocation of the weights to the end of the second step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.errors import PlanError, WeftError
from weft.plan.memory import fakes
from weft.plan.memory.autocast import as_on_cuda
from weft.plan.memory.caches import emptied
from weft.plan.memory.recompute import recompute
from weft.plan.memory.seconds import Counter, Work
from weft.plan.memory.substitutes import as_on_gpu
from weft.plan.memory.tape import Tape
from weft.plan.memory.tracer import Tracer
from weft.plan.memory.training import Training, make_optimizer, tensors, usual_step

# Kernels of the whole process are replaced while a step is traced: one trace at a time.
_ALONE = threading.RLock()


@dataclass(frozen=True)
class Trace:
    """The tape of two steps, the operators of the second, and what had to be assumed."""

    tape: Tape
    work: Work
    assumed: tuple[str, ...]


def trace(training: Training, batch: Any, size: int | None = None, other: int | None = None, steps: int = 2) -> Trace:
    """Two steps of the training with this batch, with ``other`` samples in place of ``size`` if given; or the first
    alone, which is all that the sizes of blocks depend on."""
    tracer, counter = Tracer(training.kernels), Counter()
    with ExitStack() as stack:
        stack.enter_context(_ALONE)
        stack.enter_context(as_on_gpu(training.kernels, tracer.adding))
        stack.enter_context(as_on_cuda())
        stack.enter_context(fakes.unnoticed())
        stack.enter_context(emptied(training.model, training.loss, training.step))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model = fakes.fake_model(training.model)
        model.train(training.model.training)
        again = training.recompute
        if again:
            (recompute if again is True else again)(model)
        given = fakes.fake_batch(batch, size, other)
        stack.enter_context(tracer)
        try:
            _steps(training, model, given, tracer, counter, steps)
        except WeftError:
            raise
        except Exception as error:
            where = f" in module '{tracer.module}'" if tracer.module else ""
            raise PlanError(
                f"the step cannot be traced without data: {type(error).__name__}{where}: {str(error)[:300]}"
            ) from error
        found = tracer.tape()
    return Trace(found, counter.work, tuple(dict.fromkeys(tracer.assumed)))


def _steps(training: Training, model: nn.Module, batch: Any, tracer: Tracer, counter: Counter, count: int) -> None:
    recurrent = {name for name, module in model.named_modules() if isinstance(module, nn.RNNBase)}
    for name, group in groupby(fakes.in_order(model), key=itemgetter(0)):
        weights = [tensor for _, tensor in group]
        # A recurrent module's weights are moved one by one, and then into the block that they share.
        moved = [torch.empty_like(tensor) for tensor in weights] if name in recurrent else []
        for tensor in weights:
            tracer.own(tensor, "weights", name)
        del moved
    for tensor in tensors(batch):
        tracer.own(tensor, "batch")
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(training, parameters)
    names = {id(parameter): name for name, parameter in _named(model)}
    original = optimizer.step
    phases: dict[str, Any] = {}

    def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        tracer.begin("backward")
        tracer.module = ""
        phases["backward"](tensor, *args, **kwargs)
        for parameter in parameters:
            if parameter.grad is not None:
                tracer.own(parameter.grad, "gradients", names.get(id(parameter), ""))
        tracer.begin("forward")  # of the next micro-batch, if there is one

    def update(*args: Any, **kwargs: Any) -> Any:
        tracer.begin("optimizer")
        result = original(*args, **kwargs)
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, Tensor) and value.dim():
                    tracer.own(value, "optimizer", names.get(id(parameter), ""))
        return result

    phases["backward"] = torch.Tensor.backward
    optimizer.step = update  # type: ignore[method-assign]
    torch.Tensor.backward = backward  # type: ignore[assignment, method-assign]
    try:
        with _modules(model, tracer):
            for number in range(count):
                tracer.counter = counter if number else None
                tracer.begin("forward")
                (training.step or usual_step(training))(model, optimizer, batch)
                if tracer.phase != "optimizer":
                    tracer.begin("optimizer")
    finally:
        torch.Tensor.backward = phases["backward"]  # type: ignore[method-assign]


@contextmanager
def _modules(model: nn.Module, tracer: Tracer) -> Iterator[None]:
    """Within the block the tracer knows which module's forward is running."""
    stack: list[str] = []
    handles = []

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            stack.append(tracer.module)
            tracer.module = name

        return hook

    def leave(*_: Any) -> None:
        tracer.module = stack.pop()

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            yield name, parameter
