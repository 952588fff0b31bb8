"""The pages of the documentation as things that run: their blocks in order, in one namespace and an empty folder.

```python      is executed; with `# name.py` as its first line it is a file, and a script if it has a main
```toml        is written to config.toml, or to the file that its first line names
```bash        is a list of commands; those of weft run in this process, `python FILE` in one of its own
```console     the same after `$ `; what a command prints is compared with the page, but for figures
<!-- test: before ... -->        code that runs first and that readers do not see
<!-- test: skip: reason -->      before a block that needs a GPU, a cluster or minutes: only its arguments are checked
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer.main
from command_line import weft

from weft.cli.app import app
from weft.cli.arguments import joined
from weft.cli.tune import StudyFile
from weft.config import convert, make_config

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if "_build" not in path.parts)
GUIDES = [
    f"how-to/{name}.md" for name in ("asynchronous", "gradient-search", "several-devices", "several-machines", "tune")
]
"""Pages that take long, which test_docs_guides.py runs."""

_BLOCK = re.compile(
    r"^<!-- test: before\n(?P<before>.*?)^-->$"
    r"|(?:^<!-- test: skip: (?P<skip>[^\n]*?) -->\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_SHORT_CODE = {
    r"\bsteps=\d{3,}": "steps=4",
    r'"steps": \d{3,}': '"steps": 4',
    r"\btrials=\d+": "trials=2",
    r"\bbudget=\d+": "budget=4",
    r"\breport(_every)?=\d+": r"report\1=2",
    r"\bweight_warmup_steps=\d+": "weight_warmup_steps=0",
}
_TRAIN = ["--train.steps=4", "--execution.threads=1"]
_SHORT_COMMANDS = {
    "train": _TRAIN,
    "search": [*_TRAIN, "--search.weight_warmup_steps=0", "--search.budget=4"],
    "simulate": _TRAIN,
    "verify": ["--steps=2", "--execution.threads=1"],
    "tune": ["--study.trials=2", "--recipe.steps=4", "--recipe.report_every=2"],
}
"""What makes code and commands short."""

_OTHERS = (
    "export|source|cd|mkdir|ssh|rsync|scp|torchrun|srun|sbatch|ray|#SBATCH|tensorboard|optuna-dashboard|sleep|make"
)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a page; `skip` is the reason for which it is not run."""

    language: str
    text: str
    skip: str | None = None

    def commands(self) -> list[tuple[str, list[str]]]:
        """The command lines, each with the lines that the page shows below it."""
        found: list[tuple[str, list[str]]] = []
        for line in re.sub(r"\\\n\s*", "", self.text).splitlines() if self.language in ("bash", "console") else ():
            if self.language == "console" and not line.startswith("$ "):
                found[-1][1].append(line)
            elif line.strip() and not line.startswith("#"):
                found.append((line.removeprefix("$ "), []))
        return found


def blocks(page: str) -> list[Block]:
    """The blocks of a page in order; code that readers do not see is a block of the language `before`."""
    found = _BLOCK.finditer((DOCS / page).read_text(encoding="utf-8"))
    return [
        Block("before", match["before"])
        if match["before"] is not None
        else Block(match["language"], match["text"], match["skip"])
        for match in found
    ]


def weft_arguments(line: str) -> list[str] | None:
    """The arguments of weft in a command line, which torchrun may start; None if there is no weft in it."""
    words = shlex.split(re.sub(r"\s&$|\s\|\|.*", "", line), comments=True)
    if words[:1] == ["weft"]:
        return words[1:]
    return words[words.index("weft") + 1 :] if "weft" in words and words[words.index("weft") - 1] == "-m" else None


def accept(words: list[str]) -> None:
    """Fails unless weft takes these arguments."""
    group: Any = typer.main.get_command(app)
    assert words[0] in group.commands, f"no verb '{words[0]}'"
    verb = group.commands[words[0]]
    context = verb.make_context(words[0], list(words[1:]))
    if words[0] == "tune":
        assert all(re.match(r"--[\w.]+=", word) for word in context.args), words
        convert({}, context.args, StudyFile)
    elif context.args:
        make_config({"supernet": "digits-mlp"}, joined(context.args))


@dataclass
class Reader:
    """Works through a page in an empty folder."""

    folder: Path
    options: dict[str, list[str]] = field(default_factory=dict)
    """More settings for the commands of a verb."""
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    ran: int = 0
    """How many blocks of code and commands were run."""

    def read(self, page: str) -> None:
        started = set(re.findall(r"^(?:\$ )?python (\w+\.py)", (DOCS / page).read_text(), re.MULTILINE))
        for block in blocks(page):
            for line, shown in block.commands():
                self._command(line, shown, run=block.skip is None)
            if block.language in ("before", "python") and block.skip is None:
                self._python(block.text, block.language == "python", started)
            elif block.language == "toml":
                name = re.match(r"# ([\w.-]+\.toml)\n", block.text)
                (self.folder / (name[1] if name else "config.toml")).write_text(block.text)

    def _python(self, text: str, short: bool, started: set[str]) -> None:
        for pattern, small in _SHORT_CODE.items() if short else ():
            text = re.sub(pattern, small, text)
        if name := re.match(r"# (\w+\.py)\n", text):
            (self.folder / name[1]).write_text(text)
            sys.modules.pop(name[1][:-3], None)
            if '__name__ == "__main__"' in text and name[1] not in started:
                self._process([name[1]])
        else:
            exec(compile(text, "<a block>", "exec"), self.names)
        self.ran += 1

    def _command(self, line: str, shown: list[str], run: bool) -> None:
        words = weft_arguments(line)
        if not run or (words is not None and not line.startswith("weft ")):
            if words is not None:
                accept(words)
            return
        if line.startswith("python "):
            output = self._process(shlex.split(line)[1:])
        elif words is not None:
            output = self._served(words) if words[0] == "serve" else self._weft(words)
        else:
            assert re.match(rf"({_OTHERS}) ", line), f"the tests do not run: {line}"
            return
        self.ran += 1
        missing = missing_line(output, shown)
        assert missing is None, f"`{line}` prints\n{output}\nbut the page shows\n{missing}"

    def _process(self, words: list[str]) -> str:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _weft(self, words: list[str]) -> str:
        given = {word.split("=")[0] for word in words}
        more = [*_SHORT_COMMANDS.get(words[0], []), *self.options.get(words[0], [])]
        columns = os.environ.pop("COLUMNS", None)  # a file has no width
        try:
            done = weft(*words, *(word for word in more if word.split("=")[0] not in given))
        finally:
            os.environ.update({} if columns is None else {"COLUMNS": columns})
        assert not done.code, done
        return done.out

    def _served(self, words: list[str]) -> str:
        """What a server on a free port prints; it shows the runs of the folder."""
        command = [sys.executable, "-u", "-m", "weft", *words, "--port", "0"]
        with subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                output = server.stdout.readline() + server.stdout.readline()
                address = re.search(r"http://[\d.:]+/", output)
                assert address is not None, output
                with urllib.request.urlopen(f"{address[0]}api/runs", timeout=30) as answer:
                    names = {run["name"] for run in json.load(answer)["runs"]}
                assert names == {path.parent.name for path in (self.folder / "runs").glob("*/manifest.json")}
            finally:
                server.send_signal(signal.SIGINT)
                server.wait(30)
        return output


def missing_line(output: str, shown: list[str]) -> str | None:
    """The first line that a page shows and that was not printed in its place; figures, widths and dates may differ."""
    printed = iter([_shape(line) for line in output.splitlines()])
    for line in shown:
        if line.strip() not in ("", "...") and _shape(line) not in printed:  # consumes what comes before
            return line
    return None


def _shape(line: str) -> str:
    line = re.sub(r"\b[0-9a-f]{12,}\b|\b\d{4}-\d\d-\d\dT[\d:]+Z", "#", line)
    line = re.sub(r"[-+]?\d[\d,.]*(e[-+]?\d+)?", "0", line)
    line = re.sub(r"[ ─━═]+", " ", line)
    return re.sub(r"\b0 (ms|us|s|B|KiB|MiB|GiB)\b", "0 unit", line).strip()
