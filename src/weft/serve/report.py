"""A report: the page with its scripts, styles and documents inside, as one file that opens from disk."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import RunError
from weft.runs import Run
from weft.serve.library import VIEWS, Address, Library, safe, url
from weft.serve.views.plan import plan_document
from weft.utils.files import write_atomic

if TYPE_CHECKING:
    from weft.plan.plan import Plan

PAGE = Path(__file__).parent / "page"


def page_files() -> dict[str, Path]:
    """The files of the page, by the names that a browser asks for."""
    return {path.relative_to(PAGE).as_posix(): path for path in sorted(PAGE.rglob("*")) if path.is_file()}


SCRIPT = re.compile(r'<script src="([^"]+)"></script>')
STYLE = re.compile(r'<link rel="stylesheet" href="([^"]+)">')


def write_report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write a report about runs, by default to report.html in the first; gives the file."""
    paths = by_name([Run.open(path).path.resolve() for path in runs])
    file = runs[0] / "report.html" if out is None else out
    if not file.parent.is_dir():
        raise RunError(f"cannot write '{file}': there is no folder '{file.parent}'")
    write_atomic(file, html(documents(Library(lambda: paths, runs[0].resolve().parent.name))))
    return file


def write_plan(plan: Plan, out: Path) -> Path:
    """Write a report with one plan; gives the file."""
    found = {"root": "", "runs": [], "plans": [{"name": out.stem, "model": plan.model, "devices": plan.devices}]}
    values = {url(("runs",)): found, url(("plans", out.stem)): safe(plan_document(plan.to_saved(), out.stem))}
    if not out.parent.is_dir():
        raise RunError(f"cannot write '{out}': there is no folder '{out.parent}'")
    write_atomic(out, html(values))
    return out


def by_name(paths: Sequence[Path]) -> dict[str, Path]:
    """Runs by name; where two have the same name, their folders tell them apart."""
    found: dict[str, Path] = {}
    for path in dict.fromkeys(paths):
        alike = [other for other in dict.fromkeys(paths) if other.name == path.name]
        name = path.name if len(alike) == 1 else f"{path.name} ({path.parent.name})"
        if name in found:
            raise RunError(f"two of the runs are called '{name}'; rename one of the directories")
        found[name] = path
    return found


def documents(library: Library) -> dict[str, Any]:
    """Every document, by the address under which the page asks for it."""
    found = {url(("runs",)): _read(library, ("runs",))}
    for line in found[url(("runs",))]["runs"]:
        name = line["name"]
        if line["state"] == "damaged":
            raise RunError(f"no report about run '{name}': {line['reason']}")
        addresses = [("runs", name), *(("runs", name, view) for view in line["views"] if view in VIEWS)]
        found.update({url(address): _read(library, address) for address in addresses})
        search = url(("runs", name, "search"))
        for other in found.get(search, {}).get("searches", ()):
            query = url((other,)).removeprefix("/api/")
            found[f"{search}?name={query}"] = _read(library, ("runs", name, "search"), {"name": other})
    return found


def html(values: dict[str, Any], page: Path = PAGE) -> str:
    """The page with everything inside. A browser runs the scripts of the page alone, known by their hashes."""
    hashes: list[str] = []

    def script(match: re.Match[str]) -> str:
        # It can stand in a string or a pattern of a script alone, where `<\\/` is the same as `</`.
        text = _text(page / match[1]).replace("</script", "<\\/script").replace("<!--", "<\\!--")
        hashes.append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
        return f"<script>{text}</script>"

    text = STYLE.sub(lambda match: f"<style>{_text(page / match[1])}</style>", _text(page / "index.html"))
    head, mark, scripts = text.partition("<script src=")
    body = json.dumps(values, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    data = f'<script type="application/json" id="weft-documents">{body}</script>\n'
    scripts = SCRIPT.sub(script, mark + scripts)
    rules = f"default-src 'none'; script-src {' '.join(hashes)}; "
    rules += "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    policy = f'<meta http-equiv="Content-Security-Policy" content="{rules}">'
    return head.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{policy}', 1) + data + scripts


def _read(library: Library, address: Address, query: dict[str, str] | None = None) -> Any:
    return json.loads(library.get(address, query).body)


def _text(path: Path) -> str:
    return path.read_text("utf-8").replace("\r\n", "\n")
