"""docs/pictures/front.svg: what a search finds, judged by the published accuracies of every network of the space.

python docs/scripts/front.py DATA            # train, search and draw: two minutes on a GPU
python docs/scripts/front.py DATA --draw     # draw what benchmarks/results/front.json holds

DATA holds `cifar10-jpeg/cifar10_jpeg_36k.npz` and `nas-bench-macro/nas-bench-macro_cifar10.json`, in which Su et al.
(CVPR 2021) trained each of the 6,561 networks three times. weft trains one supernet, scores subnets on validation
images and never sees the table; only the picture does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "front.json"
PICTURE = ROOT / "docs" / "pictures" / "front.svg"

BUDGET = 1000
"""Subnets that the search scores."""

LIMIT = 1.2e8
"""FLOPs that the picked network may take."""

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 54, 24, 66, 46
X, Y = (25.0, 215.0), (82.0, 94.0)
"""What the axes show: million FLOPs and percent."""

STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#57606a}.h{font-size:15px;font-weight:600;fill:#1f2328}"
    ".a{fill:#b4bec9}.f{fill:#1d6fd1}.l{stroke:#1d6fd1;stroke-width:1.5;fill:none}.p{fill:#cf4a1f}"
    ".t{stroke:#6e7781;stroke-width:1.5;stroke-dasharray:4 3;fill:none}.g{stroke:#8c959f;stroke-opacity:.25}"
    ".k{fill:#cf4a1f;font-weight:600;font-size:15px}"
    ".k,.o,.b{paint-order:stroke;stroke:#fff;stroke-width:5px}.c{stroke:#cf4a1f;fill:none}"
    "@media (prefers-color-scheme:dark){text{fill:#9da7b3}.h{fill:#e6edf3}.a{fill:#4d5661}.f{fill:#5aa2f2}"
    ".l{stroke:#5aa2f2}.p,.k{fill:#f0835c}.t{stroke:#8c959f}.k,.o,.b{stroke:#0d1117}.c{stroke:#f0835c}}"
)


def measure(data: Path, steps: int, device: str) -> dict[str, Any]:
    """Train the supernet, search it, and look the front up in the table."""
    import weft
    from weft.data import load
    from weft.zoo import macro_key, nas_bench_macro

    images = load(data / "cifar10-jpeg" / "cifar10_jpeg_36k.npz", validation=0.2).to(device)
    published = table(data)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        trained = weft.train(
            nas_bench_macro,
            images,
            steps=steps,
            batch_size=256,
            optimizer=weft.Optimizer("sgd", lr=0.1, momentum=0.9, weight_decay=5e-4, warmup_steps=200),
            augment=weft.ShiftFlip("image", padding=4),
            metrics={"accuracy": weft.accuracy},
            device=device,
            folder=folder,
        )
        trained_in = time.perf_counter() - began
        front = weft.search(trained, minimize=("loss", "flops"), budget=BUDGET)
        seconds = {"training": trained_in, "search": time.perf_counter() - began - trained_in}
    members = [
        {"key": (key := macro_key(one.subnet)), **one.scores, "published": published[key]["mean_acc"]} for one in front
    ]
    return {"steps": steps, "budget": BUDGET, "seconds": seconds, "members": members}


def table(data: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((data / "nas-bench-macro" / "nas-bench-macro_cifar10.json").read_text())
    return found


def picture(found: Mapping[str, Any], published: Mapping[str, Any]) -> str:
    """All networks as dots, the front that was found as a line through its members, and the one that is picked."""
    # The table counts multiply-adds, weft counts both.
    flops = {key: 2 * entry["flops"] / 1e6 for key, entry in published.items()}
    accuracy = {key: entry["mean_acc"] for key, entry in published.items()}
    members = sorted((one["key"] for one in found["members"]), key=lambda key: flops[key])
    # As front.best(flops=LIMIT) picks: the table has no say.
    picked = min((one for one in found["members"] if one["flops"] <= LIMIT), key=lambda one: one["loss"])["key"]
    within = [key for key in published if 1e6 * flops[key] <= LIMIT]
    seconds = sum(found["seconds"].values())
    dots = {_at(flops[key], accuracy[key], 2) for key in published if accuracy[key] >= Y[0]}
    line = best_so_far([(flops[key], accuracy[key]) for key in published if accuracy[key] >= Y[0]])
    x, y = _at(flops[picked], accuracy[picked])
    at_limit = _at(LIMIT / 1e6, Y[0])[0]
    shown = [_at(flops[key], accuracy[key]) for key in members if accuracy[key] >= Y[0]]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="front">',
        f"<style>{STYLE}</style>",
        f'<text class="h" x="8" y="20">The front of {len(published):,} networks, found in {seconds:.0f} seconds '
        "on one GPU</text>",
        '<text x="8" y="40">Each network stands at the accuracy that it has when it is trained alone '
        "(published; weft never sees it).</text>",
        *_axes(),
        f'<path class="a" d="{"".join(f"M{a} {b}h2v2h-2z" for a, b in sorted(dots))}"/>',
        f'<path class="t" d="{_steps(line)}"/>',
        f'<path class="g" style="stroke-opacity:.8" d="M{at_limit} {TOP}V{HEIGHT - BOTTOM}"/>',
        f'<text x="{at_limit + 5}" y="{HEIGHT - BOTTOM - 8}">limit: {LIMIT / 1e6:.0f} million</text>',
        *(f'<circle class="f" cx="{a}" cy="{b}" r="4"/>' for a, b in shown),
        f'<circle class="p" cx="{x}" cy="{y}" r="7"/>',
        f'<path class="c" d="M{x + 5} {y + 7}L{at_limit + 14} {y + 72}"/>',
        f'<text class="k" x="{at_limit + 16}" y="{y + 86}">picked by weft: {accuracy[picked]:.1f} %</text>',
        f'<text class="o" x="{at_limit + 16}" y="{y + 105}">best of the {len(within):,} within the limit: '
        f"{max(accuracy[key] for key in within):.1f} %</text>",
        *_legend(),
        "</svg>\n",
    ]
    return "\n".join(parts)


def best_so_far(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The true front: where each network is better than all that cost less."""
    found: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not found or y > found[-1][1]:
            found.append((x, y))
    return found


def _at(flops: float, accuracy: float, grid: int = 1) -> tuple[int, int]:
    """Where a network is drawn."""
    x = LEFT + (flops - X[0]) / (X[1] - X[0]) * (WIDTH - LEFT - RIGHT)
    y = HEIGHT - BOTTOM - (max(accuracy, Y[0]) - Y[0]) / (Y[1] - Y[0]) * (HEIGHT - TOP - BOTTOM)
    return round(x / grid) * grid, round(y / grid) * grid


def _steps(line: Sequence[tuple[float, float]]) -> str:
    first, *rest = (_at(*point) for point in line)
    return f"M{first[0]} {first[1]}" + "".join(f"H{x}V{y}" for x, y in rest) + f"H{WIDTH - RIGHT}"


def _axes() -> Iterable[str]:
    for value in range(82, 95, 2):
        y = _at(0, value)[1]
        yield f'<path class="g" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{value} %</text>'
    for value in range(50, 201, 50):
        x = _at(value, 0)[0]
        yield f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value}</text>'
    yield f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">cost of one image, million FLOPs</text>'


def _legend() -> Iterable[str]:
    x, y = WIDTH - RIGHT - 200, HEIGHT - BOTTOM - 72
    yield f'<rect class="a" x="{x - 4}" y="{y - 8}" width="8" height="8"/>'
    yield f'<text x="{x + 12}" y="{y}">a network of the space</text>'
    yield f'<path class="t" d="M{x - 10} {y + 18}h18"/>'
    yield f'<text x="{x + 12}" y="{y + 22}">best published up to a cost</text>'
    yield f'<circle class="f" cx="{x}" cy="{y + 40}" r="4"/>'
    yield f'<text x="{x + 12}" y="{y + 44}">front that weft found</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--draw", action="store_true", help="draw only")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if not options.draw:
        import sys

        sys.path.insert(0, str(ROOT / "benchmarks"))
        from machine import write

        write(str(RESULT), **measure(options.data, options.steps, options.device))
    PICTURE.write_text(picture(json.loads(RESULT.read_text()), table(options.data)), encoding="utf-8")


if __name__ == "__main__":
    main()
