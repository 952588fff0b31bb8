"""Golden values: what must be bit-identical before and after a refactoring, as one JSON file.

    PYTHONPATH=OLD/src python -m benchmarks.golden --out before.json --stages
    PYTHONPATH=$PWD/src python -m benchmarks.golden --out after.json --stages
    python -m benchmarks.golden --compare before.json after.json    # exit code 1 and what differs, if anything does

No value is stored in the repository: both files are made on one machine, with one torch and one thread, by the harness
of the newer checkout (run it in its root). `PYTHONPATH` says which weft is measured. Each area is a file beside this
one and runs in a process of its own; `--only core,plan` takes some of them. `--stages` adds runs on 2 and 3 processes.

What the old tree left half done, the new one must finish to the same bits:

    PYTHONPATH=OLD/src python -m benchmarks.golden --freeze FOLDER
    PYTHONPATH=OLD/src python -m benchmarks.golden --resume FOLDER --out before.json
    PYTHONPATH=$PWD/src python -m benchmarks.golden --resume FOLDER --out after.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

from benchmarks.golden.compare import compare, promises
from benchmarks.golden.runner import in_process, run_area

AREAS = ("core", "search", "space", "schedules", "tune", "plan", "memory", "solver", "packing", "serve", "cli")
STAGED, FROZEN = "stages", "frozen"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.golden", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--stages", action="store_true", help="runs on 2 and 3 processes too")
    parser.add_argument("--only", help=f"areas, separated by commas: {', '.join((*AREAS, STAGED))}")
    parser.add_argument("--freeze", type=Path, metavar="FOLDER", help="leave half-trained runs in a new folder")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with copies of the runs in it too")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"))
    parser.add_argument("--area", help=argparse.SUPPRESS)  # what each process is started with
    args = parser.parse_args()
    if args.compare:
        sys.exit(compare(*args.compare))
    if args.area:
        run_area(args.area, args.out, *filter(None, [args.resume and str(args.resume)]))
        return
    if args.freeze:
        from benchmarks.golden.frozen import freeze

        freeze(args.freeze.resolve())
    if args.out:
        sys.exit(write(args))
    if not args.freeze:
        parser.error("nothing to do: give --out, --freeze or --compare")


def write(args: argparse.Namespace) -> int:
    """Runs the areas and writes their values; 1 if the promise of equal bits is broken within the file."""
    areas = tuple(args.only.split(",")) if args.only else AREAS
    areas += (STAGED,) if args.stages and STAGED not in areas else ()
    areas += (FROZEN,) if args.resume else ()
    unknown = sorted({*areas} - {*AREAS, STAGED, FROZEN})
    if unknown:
        raise SystemExit(f"no area {', '.join(unknown)}: there are {', '.join((*AREAS, STAGED))}")
    found: dict[str, Any] = {}
    total = 0.0
    for area in areas:
        more = ("--resume", str(args.resume.resolve())) if area == FROZEN else ()
        found[area], seconds = in_process(area, *more)
        total += seconds
        failed = sum("error" in values for values in found[area].values() if isinstance(values, dict))
        print(f"{area}: {len(found[area])} cases, {failed} failed, {seconds:.0f} s of CPU", flush=True)
        args.out.write_text(json.dumps({"made": made(), "areas": found}, indent=1, sort_keys=True))
    print(f"{sum(map(len, found.values()))} cases, {total:.0f} s of CPU -> {args.out}")
    broken = promises(found)
    print("\n".join(broken), end="\n" if broken else "")
    return int(bool(broken))


def made() -> dict[str, str]:
    """What has to be the same for two files to be compared."""
    from importlib.metadata import version

    packages = {name: version(name) for name in ("torch", "numpy", "optuna")}
    return {"python": platform.python_version(), "machine": platform.machine(), **packages}


if __name__ == "__main__":
    main()
