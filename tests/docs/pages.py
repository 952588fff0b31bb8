"""Pages of the documentation as things that can be run: their blocks in order, in one namespace and an empty folder.

```python      is executed; with `# name.py` as its first line it is a file, and a script if it has a main
```toml        is written to config.toml, or to the file that its first line names
```bash        is a list of commands; those of weft run in this process, `python FILE` in one of its own
```console     the same after `$ `, and what a command prints, figures aside, is what the page shows
<!-- test: before ... -->        code that runs first and that readers need not see
<!-- test: skip: reason -->      before a block that needs a GPU, a cluster or minutes: weft must accept its arguments
"""

from __future__ import annotations

import contextlib
import io
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

from weft.cli.app import app, main
from weft.cli.arguments import joined
from weft.cli.tune import StudyConfig
from weft.config import make_config

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if "_build" not in path.parts)

LONG = {
    f"how-to/{name}.md" for name in ("gradient-search", "asynchronous", "several-devices", "several-machines", "tune")
}
"""Pages that take a minute: test_docs_guides.py runs them, and says what they must come to."""

_BLOCK = re.compile(
    r"^<!-- test: before\n(?P<before>.*?)^-->$"
    r"|(?:^<!-- test: skip: (?P<skip>[^\n]*?) -->\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_SETTINGS = {
    "train": ["--train.steps=4", "--execution.threads=1"],
    "search": ["--train.steps=4", "--execution.threads=1", "--search.warmup=0", "--search.budget=4"],
    "simulate": ["--train.steps=4", "--execution.threads=1"],
    "verify": ["--steps=2", "--execution.threads=1"],
    "tune": ["--study.trials=2", "--recipe.steps=4", "--recipe.report=2"],
}
"""What makes a command short; what it says of time and quality is not looked at."""

_FEW = {r"\bsteps=\d{3,}": "steps=4", r"\btrials=\d+": "trials=2", r"\bbudget=\d+": "budget=4", r"\breport=\d+": "report=2", r"\bwarmup_weights=\d+": "warmup_weights=0"}  # fmt: skip # noqa: E501


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page; `skip` is the reason for which it is not run."""

    language: str
    text: str
    skip: str | None = None


def blocks(page: str) -> list[Block]:
    """The blocks of a page in order; code that readers do not see is a block of the language `before`."""
    found = []
    for match in _BLOCK.finditer((DOCS / page).read_text(encoding="utf-8")):
        if match["before"] is not None:
            found.append(Block("before", match["before"]))
        else:
            found.append(Block(match["language"], match["text"], match["skip"]))
    return found


def commands(block: Block) -> list[tuple[str, list[str]]]:
    """The command lines of a block, each with the lines that it is said to print."""
    found: list[tuple[str, list[str]]] = []
    for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
        if block.language == "console" and not line.startswith("$ "):
            if found:
                found[-1][1].append(line)
        elif line.strip() and not line.startswith("#"):
            found.append((line.removeprefix("$ "), []))
    return found


def words_of(line: str) -> list[str] | None:
    """The arguments of the weft in a command line, which torchrun or the like may start; None if there is none."""
    words = shlex.split(re.sub(r"\s&$|\s\|\|.*", "", line), comments=True)
    if words[:1] == ["weft"]:
        return words[1:]
    return words[words.index("weft") + 1 :] if "weft" in words and words[words.index("weft") - 1] == "-m" else None


def accept(words: list[str]) -> None:
    """Fails unless weft would take these arguments."""
    group: Any = typer.main.get_command(app)
    assert words[0] in group.commands, f"no verb '{words[0]}'"
    verb = group.commands[words[0]]
    context = verb.make_context(words[0], list(words[1:]))
    if not context.args:
        return
    if words[0] == "tune":
        from weft.config import convert

        convert({}, joined_study(context.args), StudyConfig)
    else:
        make_config({"supernet": "digits-mlp"}, joined(context.args))


def joined_study(words: list[str]) -> list[str]:
    """Settings of a study as --a.b=c."""
    assert all(re.match(r"--[\w.]+=", word) for word in words), words
    return words


@dataclass
class Reader:
    """Somebody who works through a page in an empty folder."""

    folder: Path
    short: bool = True
    options: dict[str, list[str]] = field(default_factory=dict)
    """More settings for commands of a verb."""
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    ran: list[str] = field(default_factory=list)
    later: set[str] = field(default_factory=set)
    """Scripts that the page itself starts."""

    def read(self, page: str) -> None:
        self.later |= set(re.findall(r"^(?:\$ )?python (\w+\.py)", (DOCS / page).read_text(), re.MULTILINE))
        for block in blocks(page):
            if block.skip is not None:
                for line, _ in commands(block) if block.language in ("bash", "console") else ():
                    words = words_of(line)
                    if words is not None:
                        accept(words)
                continue
            match block.language:
                case "before":
                    self._python(block.text, shorten=False)
                case "python":
                    self._python(block.text)
                case "toml":
                    name = re.match(r"# ([\w.-]+\.toml)\n", block.text)
                    (self.folder / (name[1] if name else "config.toml")).write_text(block.text)
                case "bash" | "console":
                    for line, shown in commands(block):
                        self._command(line, shown)

    def _python(self, text: str, shorten: bool = True) -> None:
        if self.short and shorten:
            for pattern, small in _FEW.items():
                text = re.sub(pattern, small, text)
        name = re.match(r"# (\w+\.py)\n", text)
        if name:
            (self.folder / name[1]).write_text(text)
            sys.modules.pop(name[1][:-3], None)
            if '__name__ == "__main__"' in text and name[1] not in self.later:
                _subprocess([sys.executable, name[1]], self.folder)
        else:
            exec(compile(text, "<a block>", "exec"), self.names)
        self.ran.append("python")

    def _command(self, line: str, shown: list[str]) -> None:
        words = words_of(line)
        if line.startswith("python "):
            output = _subprocess([sys.executable, *shlex.split(line)[1:]], self.folder)
        elif words is not None and line.startswith("weft serve"):
            output = self._served(words)
        elif words is not None and line.startswith("weft "):
            output = self._weft(words)
        elif words is not None:
            accept(words)
            return
        else:
            assert re.match(r"(pip install|export|source|cd|mkdir|ssh|rsync|scp|torchrun|srun|sbatch|ray|#SBATCH|tensorboard|optuna-dashboard|sleep|make) ", line), f"nobody runs: {line}"  # fmt: skip # noqa: E501
            _check_extras(line)
            return
        self.ran.append(line)
        missing = unlike(output, shown)
        assert missing is None, f"`{line}` prints\n{output}\nbut the page shows\n{missing}"

    def _weft(self, words: list[str]) -> str:
        more = [*(_SETTINGS.get(words[0], []) if self.short else []), *self.options.get(words[0], [])]
        own = {word.split("=")[0] for word in words}
        more = [word for word in more if word.split("=")[0] not in own]
        out, before, columns = io.StringIO(), sys.argv, os.environ.pop("COLUMNS", None)  # a file has no width
        sys.argv = ["weft", *words, *more]
        try:
            with contextlib.redirect_stdout(out):
                main()
            code: Any = 0
        except SystemExit as end:
            code = end.code
        finally:
            sys.argv = before
            os.environ.update({} if columns is None else {"COLUMNS": columns})
        assert not code, f"weft {' '.join(words)} ended with {code}: {out.getvalue()}"
        return out.getvalue()

    def _served(self, words: list[str]) -> str:
        """What a server says before it serves, on any free port; and that it shows what is there."""
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


def unlike(output: str, shown: list[str]) -> str | None:
    """The first line that a page shows and that was not printed in its place; figures, widths and dates may differ."""
    printed = iter([_shape(line) for line in output.splitlines()])
    for line in shown:
        if line.strip() in ("", "..."):
            continue
        if _shape(line) not in printed:  # consumes what comes before
            return line
    return None


def _shape(line: str) -> str:
    line = re.sub(r"\b[0-9a-f]{12,}\b|\b\d{4}-\d\d-\d\dT[\d:]+Z", "#", line)
    line = re.sub(r"[-+]?\d[\d,.]*(e[-+]?\d+)?", "0", line)
    line = re.sub(r"[ ─━═]+", " ", line)
    return re.sub(r"\b0 (ms|us|s|B|KiB|MiB|GiB)\b", "0 unit", line).strip()


def _subprocess(words: list[str], folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _check_extras(line: str) -> None:
    known = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for names in re.findall(r"weft\[([\w,]+)\]", line):
        assert all(f"\n{name} = [" in known for name in names.split(",")), line
