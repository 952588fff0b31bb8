"""The pages as a whole: links lead somewhere, what scripts make is as they make it, and the site builds."""

from __future__ import annotations

import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from pages import DOCS, PAGES, ROOT

import weft
from weft.engine.consistency import parse_consistency, version_schedule

LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(DOCS / page for page in PAGES)]


def prose(path: Path) -> str:
    """A page without its blocks and comments, in which brackets mean other things."""
    return re.sub(r"^```.*?^```$|<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The names that GitHub and the site give to the headings of a page."""
    found = set()
    for heading in re.findall(r"^#{1,6} (.*)$", prose(path), re.MULTILINE):
        text = unicodedata.normalize("NFC", re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading)).lower()
        found.add(re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-"))
    return found


def broken(path: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    found = []
    for link in (one or two for one, two in LINK.findall(prose(path))):
        if re.match(r"https?:|mailto:", link):
            continue
        file, _, anchor = link.partition("#")
        target = path if not file else path.parent / file
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(path: Path) -> None:
    assert broken(path) == []


def test_a_link_that_leads_nowhere_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Many machines: Ray and Slurm\n")
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](other.md#many-machines-ray-and-slurm) [b](#one) [c](gone.md) [d](#two) ![e](no.png)\n")
    assert broken(page) == ["gone.md", "#two", "no.png"]


def test_every_page_is_in_the_navigation() -> None:
    linked = re.findall(r"\]\((?!\.\.|https?:)([^)#]+\.md)\)", (DOCS / "index.md").read_text())
    assert sorted(linked) == sorted(page for page in PAGES if page != "index.md")
    assert len(linked) == len(set(linked))


def test_what_is_made_by_scripts_is_what_they_make_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from docs.scripts.__main__ import PAGES as made
    from docs.scripts.__main__ import stale

    assert len(made) == 9
    assert list(stale()) == [], "run `python -m docs.scripts`"


def test_the_pictures_of_the_law_show_what_the_law_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from docs.scripts import law

    for name, (text, spaced) in law.LAWS.items():
        if spaced:
            continue
        drawn = (DOCS / "explanation" / f"law-{name}.svg").read_text()
        seen = re.findall(r"<title>(\d)([FB])(\d+): \w+ of micro-batch \3 on stage \1, sees version (\d+)<", drawn)
        assert len(seen) >= 20
        for stage, kind, n, version in seen:
            at = version_schedule(parse_consistency(text), int(stage), 4, 1, law.STEPS)
            reads = at.forward_reads if kind == "F" else at.backward_reads
            assert int(version) == reads(int(n))


def test_the_reference_has_every_public_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from docs.scripts import api

    assert sorted(name for names in api.SECTIONS.values() for name in names) == sorted(weft.__all__)


def test_the_reference_explains_every_key_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from docs.scripts import configuration
    from docs.scripts.keys import KEYS

    page = configuration.page(ROOT / "src" / "weft")
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*?) \|$", page, re.MULTILINE)
    assert len(rows) > 80
    assert all(told for _, told in rows)
    kinds = {kind.__name__: set(kind.__struct_fields__) for _, kind in (*configuration.RUN, *configuration.STUDY)}
    assert set(KEYS) == set(kinds)
    assert all(set(keys) <= kinds[name] | {"path"} for name, keys in KEYS.items())


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the site needs the extra docs")
    pytest.importorskip("myst_parser")
    command = ["-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", str(tmp_path / "trees")]
    done = subprocess.run([sys.executable, *command, str(DOCS), str(tmp_path / "site")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    told = (tmp_path / "site" / "reference" / "api.html").read_text()
    assert "Trains a supernet and returns the finished run." in told
    assert "each is a Parameter of its own" in " ".join(told.split())  # more than its first sentence
    assert (tmp_path / "site" / "how-to" / "dashboard.html").is_file()
