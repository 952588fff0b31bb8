"""Every block of every page runs, or says why it does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import DOCS, GUIDES, PAGES, Reader, accept, blocks, missing_line, weft_arguments

from weft.runs import Run, list_runs

REASONS = ("GPU", "cluster", "minutes")


@pytest.mark.parametrize("page", [p for p in PAGES if p not in GUIDES and any(b.language for b in blocks(p))])
def test_a_page_runs_from_its_first_block_to_its_last(page: str, folder: Path) -> None:
    reader = Reader(folder)
    reader.read(page)
    wanted = [b for b in blocks(page) if b.skip is None and b.language in ("python", "bash", "console")]
    assert bool(reader.ran) == bool(wanted)
    if page == "tutorial.md":
        events = [event for run in list_runs(folder / "runs") for event in Run.open(run.path).events.read()]
        first, second = [event["fingerprint"] for event in events if event["event"] == "finished"]
        assert first == second


@pytest.mark.parametrize("page", GUIDES)
def test_weft_accepts_every_command_of_a_guide_that_takes_long(page: str) -> None:
    for line in (line for block in blocks(page) for line, _ in block.commands()):
        words = weft_arguments(line)
        if words is not None:
            accept(words)


def test_a_block_that_is_not_run_needs_what_the_tests_do_not_have() -> None:
    for page in PAGES:
        text = (DOCS / page).read_text()
        assert text.count("<!-- test: skip") == sum(block.skip is not None for block in blocks(page))
        for block in blocks(page):
            assert block.skip is None or any(reason in block.skip for reason in REASONS), block.skip
            assert block.language in {"", "text", "before", "python", "bash", "console", "toml", "json"}
            if block.language in ("", "text") and not page.startswith("ref"):  # a command there would not be run
                assert not re.search(r"^\$? ?(weft|import|from|pip) ", block.text, re.MULTILINE), page


def test_a_line_that_is_not_printed_is_noticed() -> None:
    output = "trained\n│ run │ runs/first │\n│ steps │ 300 │\n"
    assert missing_line(output, ["trained", "...", "│ steps   │ 20  │"]) is None
    assert missing_line(output, ["│ steps │ 300 │", "trained"]) == "trained"
    assert missing_line(output, ["│ loss │ 300 │"]) == "│ loss │ 300 │"


def test_a_command_with_an_unknown_setting_is_noticed() -> None:
    accept(["train", "config.toml", "--train.steps=4", "--data.path", "input.txt"])
    for words in (["train", "config.toml", "--train.step=4"], ["trace"], ["train", "c.toml", "--what"], ["weave", "c"]):
        with pytest.raises(Exception, match=r"step|run|what|weave"):
            accept(words)
    line = "srun torchrun --nnodes 2 -m weft train config.toml  # a comment"
    assert weft_arguments(line) == ["train", "config.toml"]
    assert weft_arguments("pip install -e weft") is None
