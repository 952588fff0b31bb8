"""Every block of every page runs, or says why it does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import DOCS, LONG, PAGES, Reader, accept, blocks, commands, unlike, words_of

from weft.runs import Run, list_runs

WHOLE = {"tutorial.md"}
"""Pages that are run with the sizes that they show."""

REASONS = ("GPU", "cluster", "minutes")


RUN = [page for page in PAGES if page not in LONG and any(block.language for block in blocks(page))]


@pytest.mark.parametrize("page", RUN)
def test_a_page_runs_from_its_first_block_to_its_last(page: str, folder: Path) -> None:
    reader = Reader(folder, short=page not in WHOLE)
    reader.read(page)
    wanted = [b for b in blocks(page) if b.skip is None and b.language in ("python", "bash", "console")]
    assert bool(reader.ran) == bool(wanted)
    if page == "tutorial.md":  # two stages and one give the same bits, as it says
        ends = {run.name: list(Run.open(run.path).events.read()) for run in list_runs(folder / "runs")}
        prints = [e["fingerprint"] for name in ("first", "alone") for e in ends[name] if e["event"] == "finished"]
        assert len(prints) == 2
        assert prints[0] == prints[1]


LINES = [(page, line) for page in PAGES for block in blocks(page) if block.language in ("bash", "console") for line, _ in commands(block)]  # fmt: skip # noqa: E501


@pytest.mark.parametrize("page", sorted({page for page, _ in LINES}))
def test_weft_accepts_every_command_that_a_page_shows(page: str) -> None:
    for line in (line for own, line in LINES if own == page):
        words = words_of(line)
        if words is not None:
            accept(words)


@pytest.mark.parametrize("page", PAGES)
def test_a_block_that_is_not_run_needs_what_the_tests_do_not_have(page: str) -> None:
    text = (DOCS / page).read_text()
    assert text.count("<!-- test: skip") == sum(block.skip is not None for block in blocks(page))
    for block in blocks(page):
        assert block.skip is None or any(reason in block.skip for reason in REASONS), block.skip
        assert block.language in {"", "text", "before", "python", "bash", "console", "toml", "json"}
        if block.language in ("", "text"):  # drawings and what is printed: a command would not be run
            assert not re.search(r"^\$? ?(weft|import|from|pip) ", block.text, re.MULTILINE) or page.startswith("ref")


def test_a_line_that_is_not_printed_is_noticed() -> None:
    told = "trained\n│ run │ runs/first │\n│ steps │ 300 │\n"
    assert unlike(told, ["trained", "...", "│ steps   │ 20  │"]) is None
    assert unlike(told, ["│ steps │ 300 │", "trained"]) == "trained"
    assert unlike(told, ["│ loss │ 300 │"]) == "│ loss │ 300 │"


def test_a_command_with_an_unknown_setting_is_noticed() -> None:
    accept(["train", "config.toml", "--train.steps=4", "--data.path", "input.txt"])
    for words in (["train", "config.toml", "--train.step=4"], ["trace"], ["train", "c.toml", "--what"], ["weave", "c"]):
        with pytest.raises(Exception, match=r"step|run|what|weave"):
            accept(words)
    assert words_of("srun torchrun --nnodes 2 -m weft train config.toml  # a comment") == ["train", "config.toml"]
    assert words_of("pip install weft") is None
