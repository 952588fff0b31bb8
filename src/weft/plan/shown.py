"""Plans as a person reads them on a terminal."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from weft.plan.layout import REPLICATED
from weft.plan.plan import Plan
from weft.plan.tables import layer_of
from weft.utils.units import format_bytes

if TYPE_CHECKING:
    from weft.plan.supernet import ChainPlan
    from weft.supernet import Chain


def show(plan: Plan, console: Console) -> None:
    """The plan as a person reads it: what was chosen, layer by layer, what it costs, and what others would."""
    cost = plan.cost
    facts = Table(title=f"{plan.model} on {plan.devices} x {plan.machine}", show_header=False, title_justify="left")
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    facts.add_row("mesh", f"{plan.mesh}" + (f", in each of {plan.stages} stages" if plan.stages > 1 else ""))
    if plan.idle:
        told = "a device is idle" if plan.idle == 1 else f"{plan.idle} devices are idle"
        facts.add_row("", f"{told}: {plan.devices} are faster than {plan.devices + plan.idle}")
    if plan.microbatches > 1 or plan.recompute:
        more = ", activations recomputed" if plan.recompute else ""
        facts.add_row("batch", f"in {plan.microbatches} micro-batches{more}")
    facts.add_row("step", f"{_ms(cost.step)}: {_ms(cost.compute)} computing, {_ms(cost.communication)} communicating")
    if plan.stages > 1:
        facts.add_row("", f"{_ms(cost.bubble)} filling, draining and waiting for the slowest stage")
    facts.add_row(
        "proof", "the best with this mesh" if plan.gap < 1e-9 else f"within {plan.gap:.1%} of the best so cut"
    )
    if plan.within is not None and not plan.untried:
        facts.add_row("", f"no other way to use the devices is faster by more than {plan.within:.0%}")
    if plan.untried:
        facts.add_row("", f"the time was up: {plan.untried} other ways to use the devices might be faster")
    facts.add_row(
        "memory",
        f"{format_bytes(int(cost.memory))} of {format_bytes(int(plan.limit))} a device: "
        f"{format_bytes(int(cost.parameters))} parameters, {format_bytes(int(cost.activations))} activations",
    )
    unknown = plan.graph.unknown
    if unknown:
        facts.add_row("without rule", ", ".join(f"{name} ({count})" for name, count in sorted(unknown.items())))
    reasons = plan.reasons()
    facts.add_row("can be run", f"no: {reasons[0]}" if reasons else "yes")
    console.print(facts)
    console.print(_layers(plan))
    if plan.rows:
        console.print(_beside(plan))


def _layers(plan: Plan) -> Table:
    """Operators with parameters, alike layers together."""
    table = Table("layer", "operator", "split", "times", title="strategy", title_justify="left")
    table.columns[3].justify = "right"
    counts: dict[tuple[str, str, str], int] = {}
    for place, operator in enumerate(plan.graph.operators):
        if operator.kind in ("parameter", "input", "constant", "view") or not operator.known:
            continue
        if operator.flops <= 0 or not any(dim.parts > 1 for dim in operator.dims):
            continue
        layer = layer_of(operator.module)
        shown = operator.module.replace(layer, layer.rsplit(".", 1)[0] + ".*", 1) if layer else operator.module
        key = (shown, operator.kind, _split(plan, place))
        counts[key] = counts.get(key, 0) + 1
    weighty = {
        key: n for key, n in counts.items() if key[1] in ("matmul", "conv", "attention", "embedding", "mean_loss")
    }
    for (layer, kind, split), count in (weighty or counts).items():
        table.add_row(layer, kind, split, str(count))
    return table


def _split(plan: Plan, place: int) -> str:
    """Such as ``m/8``, or ``m/4 n/2``."""
    parts: dict[str, int] = {}
    for mesh, dim in zip(plan.mesh.sizes, plan.splits[place], strict=True):
        if dim != REPLICATED:
            name = plan.graph.operators[place].dims[dim].name
            parts[name] = parts.get(name, 1) * mesh
    return " ".join(f"{name}/{count}" for name, count in parts.items()) or "whole on each device"


def _beside(plan: Plan) -> Table:
    table = Table(
        "", "mesh", "step", "memory", "fits", "plan is faster by", title="compared with", title_justify="left"
    )
    for column in table.columns[2:]:
        column.justify = "right"
    for row in plan.rows:
        if row.cost is None:
            table.add_row(row.name, "", row.why, "", "", "")
            continue
        fits = "yes" if row.cost.memory <= plan.limit else "no"
        times = f"{row.cost.step / plan.cost.step:.2f}x"
        table.add_row(row.name, row.mesh, _ms(row.cost.step), format_bytes(int(row.cost.memory)), fits, times)
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 10 else f"{seconds:,.3g} s"


def show_chain(plan: ChainPlan, chain: Chain, console: Console) -> None:
    """The stages of a supernet: which blocks, how long, how much memory."""
    table = Table("stage", "blocks", "expected step", "weights, gradients, state", title_justify="left")
    table.title = f"{len(chain.blocks)} blocks on {len(plan.seconds)} x {plan.machine}"
    for column in table.columns[2:]:
        column.justify = "right"
    bounds = [0, *plan.cut, len(chain.blocks)]
    for stage, (first, last) in enumerate(pairwise(bounds)):
        names = [chain.blocks[first].name, chain.blocks[last - 1].name]
        shown = names[0] if first == last - 1 else f"{names[0]} to {names[1]}"
        table.add_row(str(stage), shown, _ms(plan.seconds[stage]), format_bytes(plan.memory[stage]))
    console.print(table)
    given = ", ".join(map(str, plan.cut))
    console.print(
        f"{plan.balance:.0%} of the time the mean stage computes; use it by weft.train(stages={len(plan.seconds)}, "
        f"cut=[{given}])",
        soft_wrap=True,
    )
