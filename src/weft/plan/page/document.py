"""A plan as one HTML file that needs nothing else."""

from __future__ import annotations

from html import escape

from weft.plan.machine import Machine
from weft.plan.page.bars import Bar, Part, bars, key
from weft.plan.page.boxes import boxes
from weft.plan.page.figures import costs, memory
from weft.plan.page.groups import groups
from weft.plan.page.prices import prices
from weft.plan.page.strategy import strategy
from weft.plan.page.style import SCRIPT, STYLE
from weft.plan.page.words import seconds
from weft.plan.plan import Cost, Plan
from weft.units import size

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"  # nothing is fetched

_UNPRICED = "Seconds and bytes of single layers are not told: the machine is no preset, or the splits were edited."


def page(plan: Plan, machine: Machine | None = None) -> str:
    """The plan as HTML. ``machine`` is what it was made for, where that is no preset: without it the seconds and bytes
    of single operators are left out."""
    found = prices(plan, machine)
    drawn = boxes(plan.graph, {*(found.moved if found else ()), *sent(plan)})
    layers = groups(plan, drawn)
    title = escape(f"{plan.model} on {plan.devices} x {plan.machine}")
    sections = [
        ("Strategy", strategy(plan, drawn, layers, found)),
        ("Memory of a device", memory(plan, found)),
        ("Cost by layer", costs(plan, drawn, layers, found) if found else f"<p>{_UNPRICED}</p>"),
        ("Compared with", _compared(plan) if plan.rows else ""),
    ]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{title}: plan</title>\n<style>{STYLE}</style></head>",
            f"<body><main><h1>{title}</h1>",
            _head(plan),
            *(f"<section><h2>{name}</h2>\n{body}</section>" for name, body in sections if body),
            f"</main><script>{SCRIPT}</script></body></html>\n",
        ]
    )


def sent(plan: Plan) -> set[tuple[int, int]]:
    """The edges along which a stage sends to another; what no gradient flows through is made anew in each."""
    return {
        (read.source, place)
        for place, operator in enumerate(plan.graph.operators)
        for read in operator.reads
        if plan.stage[read.source] != plan.stage[place] and read.tensor.gradient
    }


def _head(plan: Plan) -> str:
    cost = plan.cost
    parts = [
        Part(name, max(value, 0.0), seconds(value))
        for name, value in (
            ("computing", cost.compute),
            ("communicating", cost.communication),
            ("bubble", cost.bubble),
        )
        if plan.stages > 1 or name != "bubble"
    ]
    words = [f"{part.name} {part.words} ({part.value / cost.step if cost.step else 0:.0%})" for part in parts]
    facts = [
        ("model", plan.model),
        ("machine", f"{plan.devices} x {plan.machine}"),
        ("mesh", f"{plan.mesh}" + (f" in each of {plan.stages} stages" if plan.stages > 1 else "")),
        ("stages", str(plan.stages)),
        ("micro-batches", str(plan.microbatches)),
        ("activations", "recomputed" if plan.recompute else "kept"),
        ("proof", "the best with this mesh" if plan.gap < 1e-9 else f"within {plan.gap:.1%} of the best so cut"),
    ]
    if plan.within is not None and not plan.untried:
        facts.append(("others", f"no other way to use the devices is faster by more than {plan.within:.0%}"))
    if plan.untried:
        facts.append(("untried", f"the time was up: {plan.untried} other ways to use the devices might be faster"))
    if plan.graph.unknown:
        names = (f"{name} ({count})" for name, count in sorted(plan.graph.unknown.items()))
        facts.append(("without rule", ", ".join(names)))
    reasons = plan.reasons()
    facts.append(("can be run", f"no: {'; '.join(reasons)}" if reasons else "yes"))
    cells = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    step = bars([Bar("step", parts, seconds(cost.step))], cost.step)
    return f'<section><dl class="facts">{cells}</dl>{step}{key(words)}</section>'


def _compared(plan: Plan) -> str:
    """What others would do with the same devices."""
    known = [plan.cost.step, *(row.cost.step for row in plan.rows if row.cost)]
    longest = max(known) or 1.0
    names = ("", "mesh", "step", "", "memory", "fits", "plan is faster by")
    lines: list[tuple[str, str, Cost | None, str]] = [("this plan", str(plan.mesh), plan.cost, "")]
    lines += [(row.name, row.mesh, row.cost, row.why) for row in plan.rows]
    body = []
    for number, (name, mesh, cost, why) in enumerate(lines):
        if cost is None:
            body.append(f'<tr><th scope="row">{escape(name)}</th><td colspan="6">{escape(why)}</td></tr>')
            continue
        fits = cost.memory <= plan.limit
        bar = bars([Bar("", [Part("computing", cost.step, seconds(cost.step))], "")], longest)
        cells = [
            escape(mesh),
            seconds(cost.step),
            f'<div class="short">{bar}</div>',
            size(cost.memory),
            '<span class="yes">yes</span>' if fits else '<span class="no">no</span>',
            f"{cost.step / plan.cost.step:.2f}x" if number and plan.cost.step else "",
        ]
        body.append(
            f'<tr class="{"other" if number else "own"}"><th scope="row">{escape(name)}</th>'
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + "</tr>"
        )
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="comparison"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )
