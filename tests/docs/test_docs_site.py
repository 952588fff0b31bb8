"""The pages as a whole: links lead somewhere, what scripts make is as they make it, and the site builds."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import unicodedata
from pathlib import Path

import pytest
from pages import DOCS, PAGES, ROOT, accept, weft_arguments

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


def test_every_link_of_a_page_leads_somewhere() -> None:
    assert {path: links for path in FILES if (links := broken(path))} == {}


def test_every_page_is_in_the_navigation() -> None:
    linked = re.findall(r"\]\((?!\.\.|https?:)([^)#]+\.md)\)", (DOCS / "index.md").read_text())
    assert sorted(linked) == sorted(page for page in PAGES if page != "index.md")
    assert len(linked) == len(set(linked))


def test_scripts_make_what_the_pages_have_and_figures_are_those_of_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from docs.scripts.__main__ import problems

    assert list(problems()) == []


def test_a_wrong_figure_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from docs.scripts import results

    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "FIGURES", tmp_path / "figures.toml")
    (tmp_path / "figures.toml").write_text('"page.md" = [["{} times", "speed", "rows[k=2].ratio .2f"]]')
    (tmp_path / "speed.json").write_text('{"rows": [{"k": 1, "ratio": 1.0}, {"k": 2, "ratio": 1.256}]}')
    (tmp_path / "page.md").write_text("It is 1.26\ntimes as fast.")
    assert list(results.wrong_figures()) == []
    (tmp_path / "page.md").write_text("It is 1.25 times as fast.")
    assert len(list(results.wrong_figures())) == 1


def test_the_pictures_of_consistency_show_the_versions_of_the_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from docs.scripts import versions

    for name, (text, spaced) in versions.PICTURES.items():
        if spaced:
            continue
        drawn = (DOCS / "explanation" / f"versions-{name}.svg").read_text()
        seen = re.findall(r"<title>(\d)([FB])(\d+): \w+ of micro-batch \3 on stage \1, sees version (\d+)<", drawn)
        assert len(seen) >= 20
        for stage, kind, n, version in seen:
            at = version_schedule(parse_consistency(text), int(stage), 4, 1, versions.STEPS)
            reads = at.forward_reads if kind == "F" else at.backward_reads
            assert int(version) == reads(int(n))


def test_the_program_of_the_readme_prints_what_the_readme_shows(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (ROOT / "README.md").read_text()
    code, printed = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", readme, re.DOTALL)[0]
    code = code.replace("steps=1000", "steps=300").replace("budget=200", "budget=50")
    exec(code, {"__name__": "__main__"})
    shown, seen = printed.splitlines(), capsys.readouterr().out.splitlines()
    assert len(seen) == len(shown)
    assert re.fullmatch(r"[0-9a-f]{16}", seen[0])  # the bits depend on the processor
    assert re.fullmatch(r"(block\d=(wide|narrow|skip) ?){6}", seen[1])
    assert float(seen[2]) > 0.9


def test_weft_accepts_every_command_of_the_readme() -> None:
    blocks = "".join((ROOT / "README.md").read_text().split("```")[1::2])
    lines = re.findall(r"^weft .*", blocks, re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        accept(weft_arguments(line) or [])


def test_the_readme_lists_every_folder_of_the_package() -> None:
    listed = re.findall(r"^  ([\w.]+)/? ", (ROOT / "README.md").read_text().split("src/weft/\n")[1], re.MULTILINE)
    folders = {path.parent.name for path in (ROOT / "src" / "weft").glob("*/__init__.py")}
    assert sorted(listed) == sorted(folders | {"errors.py", "config.py"})


def test_contributing_names_files_that_exist_and_every_dependency() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    files = re.findall(r"`((?!tests/)(?:\w+/)+\w+\.py)`", page)
    assert len(files) > 40
    assert [file for file in files if not (ROOT / "src" / "weft" / file).is_file()] == []
    walk = re.findall(r'^    "(\w+/\w+\.py)":', (ROOT / "tests" / "test_walk.py").read_text(), re.MULTILINE)
    assert len(walk) > 16
    assert set(walk) <= set(files)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.match(r"[\w-]+", one)[0] for group in wanted for one in group} - {"weft"}  # type: ignore[index]
    rows = re.findall(r"^\| ([\w, -]+?)(?: \(`\w+`\))? \|", page.split("## Dependencies")[1], re.MULTILINE)
    assert {name for row in rows for name in row.split(", ")} == names | {"package"}


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the site needs the extra docs")
    pytest.importorskip("myst_parser")
    command = ["-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", str(tmp_path / "trees")]
    done = subprocess.run([sys.executable, *command, str(DOCS), str(tmp_path / "site")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    api = (tmp_path / "site" / "reference" / "api.html").read_text()
    assert "Trains a supernet and returns the finished run." in api
    assert "Ctrl-C finishes the step" in " ".join(api.split())  # more than the first sentence
    assert (tmp_path / "site" / "how-to" / "dashboard.html").is_file()
