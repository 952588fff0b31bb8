"""What the rows of `delays.py` come to: the difference of every cell to `flush` over paired seeds, as table and SVG."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

# The 97.5th percentile of Student's t by degrees of freedom.
T = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

PANEL, HEIGHT, LEFT, TOP, GAP, FOOT = 400, 300, 64, 84, 76, 112
COLOURS = {"adamw": "#4a3aa7", "adamw-clipped": "#c2417c", "muon": "#2fa58e", "nadam": "#d9822b"}
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600; font-size: 15px }
.name { font-weight: 600; font-size: 12px }
.faint { fill: #59636e }
.page { fill: #ffffff }
.frame, .grid { fill: none; stroke: #d1d9e0 }
.zero { stroke: #59636e }
.hollow { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .faint { fill: #9198a1 }
  .page, .hollow { fill: #12161c }
  .frame, .grid { stroke: #3d444d }
  .zero { stroke: #9198a1 }
}
"""


def summed(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry a cell: its losses, and the mean difference to ``flush`` on the same seeds with its 95 % interval.

    Seeds on which a cell diverged are counted and left out of the means.
    """
    cells: dict[tuple[Any, ...], dict[int, float | None]] = {}
    for row in rows:
        key = (row["steps"], row["optimizer"], row["lr"], row["method"], row["depth"], row["k"])
        cells.setdefault(key, {})[row["seed"]] = row["val_loss"]
    found = []
    for (steps, optimizer, lr, method, depth, k), by_seed in cells.items():
        flush = cells.get((steps, optimizer, lr, "flush", None, None), {})
        known = {seed: loss for seed, loss in by_seed.items() if loss is not None}
        exact = {seed: loss for seed, loss in flush.items() if loss is not None}
        pairs = [known[seed] - exact[seed] for seed in known if seed in exact]
        noise = statistics.stdev(exact.values()) if len(exact) > 1 else None
        entry: dict[str, Any] = {"optimizer": optimizer, "lr": lr, "method": method, "depth": depth, "k": k}
        entry |= {"steps": steps, "delay": delay(method, depth, k), "seeds": len(known)}
        entry |= {"diverged": len(by_seed) - len(known), "mean": statistics.fmean(known.values()) if known else None}
        entry["sd"] = statistics.stdev(known.values()) if len(known) > 1 else None
        if method != "flush" and pairs:
            difference = statistics.fmean(pairs)
            half = T[len(pairs) - 1] * statistics.stdev(pairs) / len(pairs) ** 0.5 if 1 < len(pairs) <= len(T) else None
            entry |= {"difference": difference, "interval": half, "flush_sd": noise}
            entry["covers_zero"] = None if half is None else abs(difference) <= half
            entry["below_one_sd"] = None if noise is None else difference < noise
        found.append(entry)
    return sorted(found, key=_order)


def delay(method: str, depth: int | None, k: int | None) -> float:
    """By how many updates the weights of a forward are older than flush's, on the mean over layers."""
    if depth is None or k is None:
        return 1.0 if method == "lagged" else 0.0
    return (depth - 1) / (2 * k)


def _order(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    methods = ("flush", "lagged", "bounded", "stashed")
    return (
        cell["optimizer"],
        -cell["lr"],
        methods.index(cell["method"]),
        cell["depth"] or 0,
        cell["k"] or 0,
        cell["steps"],
    )


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """For a person."""
    lines = [
        "optimizer       rate     method    S    K  delay  seeds    mean     sd   to flush, 95 %    covers 0  < 1 sd"
    ]
    for cell in cells:
        depth, k, sd, half = (cell.get(name) for name in ("depth", "k", "sd", "interval"))
        mean = "diverged" if cell["mean"] is None else f"{cell['mean']:8.4f}"
        line = f"{cell['optimizer']:13} {cell['lr']:.2e}  {cell['method']:8} {depth or '-':>3}  {k or '-':>3}  "
        line += f"{cell['delay']:5.3f}  {cell['seeds']:5} {mean} " + (f"{sd:6.4f}" if sd is not None else "     -")
        if "difference" in cell:
            line += f"   {cell['difference']:+.4f}" + ("" if half is None else f" ± {half:.4f}")
            line += "".join(f"  {told(cell[name]):>8}" for name in ("covers_zero", "below_one_sd"))
        lines.append(line + (f"  {cell['diverged']} diverged" if cell["diverged"] else ""))
    return "\n".join(lines)


def told(answer: bool | None) -> str:
    return "-" if answer is None else "yes" if answer else "no"


def draw(cells: Sequence[Mapping[str, Any]]) -> str:
    """The difference of every cell to ``flush`` by its mean delay, as an SVG that stands alone."""
    shown = [cell for cell in cells if "difference" in cell]
    high = {name: max((c["lr"] for c in shown if c["optimizer"] == name), default=0.0) for name in COLOURS}
    plain = [c for c in shown if c["method"] != "stashed" and c["lr"] == high[c["optimizer"]]]
    other = [c for c in shown if c["optimizer"] == "adamw"]
    series: list[list[tuple[str, str, str, list[Mapping[str, Any]]]]] = [
        [(name, name, COLOURS[name], [c for c in plain if c["optimizer"] == name]) for name in COLOURS],
        [
            (f"{method}, {'chosen' if full else 'a third of the'} rate", mark, colour, chosen)
            for method, full, mark, colour in (
                ("bounded", True, "adamw", "#4a3aa7"),
                ("stashed", True, "stashed", "#2b7bba"),
                ("bounded", False, "adamw", "#c2417c"),
                ("stashed", False, "stashed", "#e3a02f"),
            )
            if (chosen := [c for c in other if c["method"] == method and (c["lr"] == high["adamw"]) == full])
        ],
    ]
    reach = [c["difference"] + sign * (c["interval"] or 0.0) for c in shown for sign in (-1, 1)]
    low, top = min([0.0, *reach]), max([0.0, *reach, 0.01])
    width, height = 2 * LEFT + 2 * PANEL + GAP - 40, TOP + HEIGHT + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-label="validation loss above that of flush, by mean delay">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
        f'<text class="title" x="{LEFT - 40}" y="28">validation loss above that of flush, by mean delay</text>',
        f'<text class="faint" x="{LEFT - 40}" y="46">means over paired seeds, bars: 95 % intervals; '
        "filled: K at least S - 1; delay in updates: (S - 1) / 2K, and 1 for lagged</text>",
    ]
    for index, (name, lines) in enumerate(
        zip(("the optimizers: bounded, and lagged at 1", "AdamW at two rates"), series, strict=True)
    ):
        parts += _panel(LEFT + index * (PANEL + GAP), name, lines, low - 0.05 * (top - low), top + 0.05 * (top - low))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    left: float, name: str, lines: Sequence[tuple[str, str, str, list[Mapping[str, Any]]]], low: float, top: float
) -> list[str]:
    def across(value: float) -> float:
        return value / 1.1 * PANEL

    def down(value: float) -> float:
        return (top - value) / (top - low) * HEIGHT

    parts = [f'<g transform="translate({left} {TOP})">', f'<text class="name" y="-10">{name}</text>']
    parts.append(f'<rect class="frame" width="{PANEL}" height="{HEIGHT}"/>')
    step = _step((top - low) / 6)
    for count in range(math.ceil(low / step), math.floor(top / step) + 1):
        y, kind = down(count * step), "grid" if count else "zero"
        parts.append(f'<path class="{kind}" d="M0 {y:.1f}H{PANEL}"/>')
        parts.append(f'<text class="faint" x="-6" y="{y + 4:.1f}" text-anchor="end">{count * step:.3g}</text>')
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = across(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {HEIGHT}v4"/>')
        parts.append(f'<text class="faint" x="{x:.1f}" y="{HEIGHT + 17}" text-anchor="middle">{value:g}</text>')
    for place, (label, mark, colour, cells) in enumerate(lines):
        aside = 5 * (place - (len(lines) - 1) / 2)  # so that bars at one delay can be told apart
        for cell in cells:
            x, y, half = across(cell["delay"]) + aside, down(cell["difference"]), cell["interval"] or 0.0
            ends = f"M{x:.1f} {down(cell['difference'] - half):.1f}V{down(cell['difference'] + half):.1f}"
            of = "" if cell["depth"] is None else f"({cell['k']}, {cell['depth']})"
            told = f"{cell['optimizer']} {cell['method']}{of}, rate {cell['lr']:.2e}: "
            told += f"{cell['difference']:+.4f} ± {half:.4f}"
            full = cell["depth"] is not None and cell["k"] >= cell["depth"] - 1
            shape = _mark(mark, x, y, f'fill="{colour}"' if full else 'class="hollow"', colour)
            parts.append(f'<g><title>{told}</title><path stroke="{colour}" d="{ends}"/>{shape}</g>')
        row = HEIGHT + 40 + place * 18
        parts.append(_mark(mark, 8, row - 4, f'fill="{colour}"', colour))
        noise = next((c["flush_sd"] for c in cells if c["flush_sd"] is not None), None)
        sd = "" if noise is None else f"<tspan class='faint'> seeds' sd {noise:.4f}</tspan>"
        parts.append(f'<text x="18" y="{row}">{NAMES.get(label, label)}{sd}</text>')
    return [*parts, "</g>"]


NAMES = {"adamw": "AdamW", "adamw-clipped": "AdamW, clipped", "muon": "Muon", "nadam": "NAdam"}


def _mark(kind: str, x: float, y: float, fill: str, colour: str) -> str:
    paths = {
        "muon": f"M{x - 4.5:.1f} {y + 4:.1f}h9l-4.5 -8z",
        "nadam": f"M{x - 3.5:.1f} {y - 3.5:.1f}h7v7h-7z",
        "stashed": f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z",
    }
    path = paths.get(kind) or f"M{x - 4:.1f} {y:.1f}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z"
    return f'<path {fill} stroke="{colour}" stroke-width="1.5" d="{path}"/>'


def _step(about: float) -> float:
    """The next of 1, 2, 5, 10 and so on."""
    power: float = 10.0 ** math.floor(math.log10(about))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= about)
