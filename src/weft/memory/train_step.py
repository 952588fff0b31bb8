"""A training step on fake tensors, traced from the first allocation of the weights to the end of the second step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.errors import PlanError, WeftError, nearest
from weft.hardware.gpus import CPU, Kernels
from weft.memory.gpu_dispatch import autocast_as_cuda, dispatch_as_gpu
from weft.memory.timeline import AllocationTimeline
from weft.memory.tracer import AllocationTracer, Work, WorkCounter
from weft.nn import fake
from weft.nn.batch import call_model, loss_of, tensors_in
from weft.nn.checkpointing import recompute
from weft.nn.fake import clear_polluted_caches

# Kernels of the whole process are replaced while a step is traced: one trace at a time.
_TRACE_LOCK = threading.RLock()


@dataclass(frozen=True)
class StepTrace:
    """The timeline of two steps, the work of the second, and values that were assumed."""

    timeline: AllocationTimeline
    work: Work
    assumptions: tuple[str, ...]


def trace(
    training: StepSpec, batch: Any, size: int | None = None, other: int | None = None, steps: int = 2
) -> StepTrace:
    """Traces two steps with this batch, with ``other`` samples in place of ``size`` if given; or the first step alone,
    which has all blocks of the second."""
    tracer, counter = AllocationTracer(training.kernels), WorkCounter()
    with ExitStack() as stack:
        stack.enter_context(_TRACE_LOCK)
        if training.kernels != CPU:
            stack.enter_context(dispatch_as_gpu(training.kernels, tracer.in_place_sums))
            stack.enter_context(autocast_as_cuda())
        stack.enter_context(fake.hide_fake_tensors())
        stack.enter_context(clear_polluted_caches(training.model, training.loss, training.step))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model = fake.fake_model(training.model)
        model.train(training.model.training)
        again = training.recompute
        if again:
            (recompute if again is True else again)(model)
        given = fake.fake_batch(batch, size, other)
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
        found = tracer.timeline()
    return StepTrace(found, counter.work, tuple(dict.fromkeys(tracer.assumptions)))


def _steps(
    training: StepSpec, model: nn.Module, batch: Any, tracer: AllocationTracer, counter: WorkCounter, count: int
) -> None:
    recurrent = {name for name, module in model.named_modules() if isinstance(module, nn.RNNBase)}
    for name, group in groupby(fake.tensors_in_order(model), key=itemgetter(0)):
        weights = [tensor for _, tensor in group]
        # A recurrent module's weights are moved one by one, and then into the block that they share.
        moved = (
            [torch.empty_like(tensor) for tensor in weights] if name in recurrent and training.kernels != CPU else []
        )
        for tensor in weights:
            tracer.register(tensor, "weights", name)
        del moved
    for tensor in tensors_in(batch):
        tracer.register(tensor, "batch")
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(training, parameters)
    owners = {id(p): name for name, module in model.named_modules() for p in module.parameters(recurse=False)}
    step_of_torch, backward_of_torch = optimizer.step, torch.Tensor.backward

    def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        tracer.begin_phase("backward")
        tracer.module = ""
        backward_of_torch(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]
        for parameter in parameters:
            if parameter.grad is not None:
                tracer.register(parameter.grad, "gradients", owners.get(id(parameter), ""))
        tracer.begin_phase("forward")  # of the next micro-batch, if there is one

    def update(*args: Any, **kwargs: Any) -> Any:
        tracer.begin_phase("optimizer")
        result = step_of_torch(*args, **kwargs)
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, Tensor) and value.dim():
                    tracer.register(value, "optimizer", owners.get(id(parameter), ""))
        return result

    optimizer.step = update  # type: ignore[method-assign]
    torch.Tensor.backward = backward  # type: ignore[assignment, method-assign]
    try:
        with _track_modules(model, tracer):
            for number in range(count):
                tracer.counter = counter if number else None
                tracer.begin_phase("forward")
                (training.step or default_step(training))(model, optimizer, batch)
                if tracer.phase != "optimizer":
                    tracer.begin_phase("optimizer")
    finally:
        torch.Tensor.backward = backward_of_torch  # type: ignore[method-assign]


@contextmanager
def _track_modules(model: nn.Module, tracer: AllocationTracer) -> Iterator[None]:
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


# How a model trains, as a value: loss, optimizer, dtype and step.

Loss = Callable[[Any, Any], Tensor]
Step = Callable[[nn.Module, torch.optim.Optimizer, Any], Any]
OPTIMIZERS = {
    "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}  # fmt: skip
_DTYPES = {"float32": None, "fp32": None, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class StepSpec:
    """How a model trains, apart from the batch."""

    model: nn.Module
    kernels: Kernels
    loss: Loss | None = None
    inputs: Sequence[str] | None = None
    optimizer: str | Callable[[list[nn.Parameter]], torch.optim.Optimizer] = "adamw"
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    recompute: bool | Callable[[nn.Module], None] = False
    accumulate: int = 1
    step: Step | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise PlanError(f"the model is a {type(self.model).__name__}: it must be an nn.Module")
        if self.dtype not in _DTYPES:
            raise PlanError(f"unknown dtype '{self.dtype}'{nearest(self.dtype, _DTYPES)}")
        if isinstance(self.optimizer, str) and self.optimizer.lower() not in OPTIMIZERS:
            raise PlanError(f"unknown optimizer '{self.optimizer}'{nearest(self.optimizer.lower(), OPTIMIZERS)}")
        if self.accumulate < 1:
            raise PlanError(f"a step accumulates at least 1 micro-batch, not {self.accumulate}")


def default_step(training: StepSpec) -> Step:
    """The usual step: gradients are dropped before the forward, and outputs and loss are not kept."""
    low = _DTYPES[training.dtype]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        for _ in range(training.accumulate):
            context: AbstractContextManager[Any] = torch.autocast("cpu", low) if low else nullcontext()
            with context:
                # In one expression: a name would keep the outputs alive during the backward.
                value = loss_of(
                    call_model(model, batch, training.inputs, targets=training.loss is None), batch, training.loss
                )
            value.backward()  # type: ignore[no-untyped-call]
            del value
        optimizer.step()

    return step


def make_optimizer(training: StepSpec, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer as it works on the device: on a GPU over lists of tensors, unless it was told otherwise."""
    if isinstance(training.optimizer, str):
        kind, options = OPTIMIZERS[training.optimizer.lower()], {"lr": 1e-3} | dict(training.options)
        try:
            made: torch.optim.Optimizer = kind(parameters, **options)
        except (TypeError, ValueError) as error:
            name = training.optimizer
            raise PlanError(f"optimizer '{name}' cannot be had with these options: {error}") from error
    else:
        made = training.optimizer(parameters)
    for group in made.param_groups:
        if training.kernels != CPU and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    return made
