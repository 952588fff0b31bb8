"""explanation/versions-*.svg: simulated schedules: four consistencies on one stream, and exact on a spaced one.

stage 0   | 0| 1|     |  0  | ...     a box is an op, as long as it takes; in it its micro-batch, and under that
stage 1      | 0|  0  |  1  | ...     the version of the weights that it sees
"""

from __future__ import annotations

from collections.abc import Hashable
from html import escape

from weft.engine.consistency import parse_consistency, version_schedule
from weft.pipeline.scheduler import SchedulePolicy
from weft.pipeline.simulator import Simulated, simulate
from weft.pipeline.workload import Workload
from weft.trainer.partitioning import default_in_flight

STAGES, STEPS, CHOICES = 4, 10, 6
CUT = (1, 2, 3)
PICTURES = {
    "exact": ("exact", False),
    "delayed": ("delayed(3)", False),
    "lagged": ("lagged(3)", False),
    "bounded": ("bounded(3, 4)", False),
    "spaced": ("exact", True),
}
"""Each picture's consistency, and whether neighbouring steps use other candidates."""

UNIT, ROW, LEFT, TOP, SHOWN = 20, 36, 64, 28, 42
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.s{font-size:11px}"
    ".F{fill:#9cc4f0}.B{fill:#f2c48d}.r{stroke:#8c959f;stroke-opacity:.4}"
    ".g{fill:#fff}"
    "@media (prefers-color-scheme:dark){.g{fill:#1b1f24}text{fill:#d1d7e0}.F{fill:#1f5fa8}.B{fill:#9a5b13}}"
)


def work(consistency: str, spaced: bool) -> Workload:
    """Four blocks, one a stage. Every step uses the one layer of each; or, spaced, one of six candidates in turn."""
    rule = parse_consistency(consistency)

    def picks(n: int) -> list[tuple[int, Hashable]]:
        return [(block, (block, (n + block) % CHOICES if spaced else 0)) for block in range(STAGES)]

    return Workload(STAGES, 1, STEPS, picks, lambda _: rule)


def schedule(name: str) -> Simulated:
    """What the simulator makes of it with the windows that a run would have: forward 1, backward 2."""
    found = work(*PICTURES[name])
    return simulate(found, CUT, [SchedulePolicy(window) for window in default_in_flight(found, CUT, None)])


def versions(name: str, block: int, n: int) -> tuple[int, int]:
    """The versions that forward and backward of a micro-batch see, counted over the layer's own updates."""
    consistency, spaced = PICTURES[name]
    at = version_schedule(parse_consistency(consistency), block, STAGES, 1, STEPS)
    return (n // CHOICES, n // CHOICES) if spaced else (at.forward_reads(n), at.backward_reads(n))


def picture(name: str) -> str:
    """The schedule as SVG, for light and dark."""
    found = schedule(name)
    consistency, spaced = PICTURES[name]
    end = found.time
    wide, high = LEFT + UNIT * SHOWN + 12, TOP + ROW * STAGES + 24
    stream = "every step uses other candidates than the five before it" if spaced else "every step uses every layer"
    head = f"{consistency}, {stream}: {STEPS} steps in a time of {end:.0f}, of which {100 * found.bubble:.0f} % idle"
    head += f" (the first {SHOWN} are shown)" if end > SHOWN else ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high}" width="{wide:.0f}" role="img">',
        # Its own ground, since a page may be dark where the reader's system is light.
        f'<title>{escape(head)}</title><style>{STYLE}</style><rect class="g" width="100%" height="100%" rx="6"/>',
        f'<text x="4" y="14">{escape(head)}</text>',
    ]
    for stage in range(STAGES):
        y = TOP + ROW * stage
        parts.append(f'<text x="4" y="{y + 20}">stage {stage}</text>')
        parts.append(f'<path class="r" d="M{LEFT} {y + ROW - 3}H{wide - 12:.0f}"/>')
    for span in (one for one in found.spans if one.end <= SHOWN):
        x, width = LEFT + UNIT * span.start, UNIT * (span.end - span.start)
        y, n = TOP + ROW * span.op.stage, span.op.microbatch
        version = versions(name, span.op.stage, n)[span.op.kind == "B"]
        word = "forward" if span.op.kind == "F" else "backward"
        title = f"{span.op}: {word} of micro-batch {n} on stage {span.op.stage}, sees version {version}"
        middle = f"{x + width / 2:.1f}"
        parts.append(
            f'<g><title>{title}</title><rect class="{span.op.kind}" x="{x + 0.5:.1f}" y="{y}" width="{width - 1:.1f}" '
            f'height="30" rx="2"/><text class="s" x="{middle}" y="{y + 13}" text-anchor="middle">{n}</text>'
            f'<text class="s" x="{middle}" y="{y + 26}" text-anchor="middle">v{version}</text></g>'
        )
    y = TOP + ROW * STAGES + 6
    for at, kind, word in ((LEFT, "F", "forward"), (LEFT + 90, "B", "backward")):
        parts.append(f'<rect class="{kind}" x="{at}" y="{y}" width="10" height="10" rx="2"/>')
        parts.append(f'<text class="s" x="{at + 14}" y="{y + 9}">{word}</text>')
    parts.append(f'<text class="s" x="{LEFT + 190}" y="{y + 9}">micro-batch, and under it the version it sees</text>')
    return "\n".join([*parts, "</svg>", ""])
