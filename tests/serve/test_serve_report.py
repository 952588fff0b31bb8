"""The report, one file with everything inside that runs the scripts of the page alone; `weft serve` and `report`."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from weft.cli.app import app
from weft.errors import RunError, WeftError
from weft.runs import Run
from weft.serve.library import Library
from weft.serve.report import html, write_report

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>"


def made(root: Path, name: str, note: str = "") -> Run:
    run = Run.create(root, name, manifest={"config": {"note": note, "train": {"steps": 3}}})
    with run.locked():
        run.events.append("started", at=0, steps=3)
        for step in range(3):
            run.events.append("step", step=step, loss=3.0 - step)
        run.events.append("failed", reason=note)
    return run


class Elements(HTMLParser):
    """The scripts, styles and meta elements of a page, as a browser takes them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self._open = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = tag in ("script", "style")
        self.found.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._open = False

    def handle_data(self, data: str) -> None:
        if self._open:
            tag, attributes, text = self.found[-1]
            self.found[-1] = (tag, attributes, text + data)

    def of(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, text) for found, attributes, text in self.found if found == tag]


def inside(file: Path) -> dict[str, Any]:
    ((_, text),) = [script for script in Elements(file.read_text()).of("script") if script[0].get("id")]
    return dict(json.loads(text, parse_constant=pytest.fail))


def test_a_report_holds_what_the_server_gives(tmp_path: Path) -> None:
    run = made(tmp_path / "runs", "conv")
    made(tmp_path / "runs", "other")
    file = write_report([run.path])
    assert file == run.path / "report.html"
    library, found = Library.under(tmp_path / "runs"), inside(file)
    addresses = ["/api/runs", "/api/runs/conv", "/api/runs/conv/curves"]
    assert list(found) == addresses
    for address in addresses[1:]:
        assert found[address] == json.loads(library.get(tuple(address.split("/")[2:])).body)
    assert [line["name"] for line in found["/api/runs"]["runs"]] == ["conv"]
    assert found["/api/runs"]["root"] == "runs"


def test_the_browser_may_run_the_scripts_of_the_page_and_no_others(tmp_path: Path) -> None:
    elements = Elements(write_report([made(tmp_path, "conv", HOSTILE).path]).read_text())
    (rules,) = [a["content"] for a, _ in elements.of("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert rules is not None
    assert "default-src 'none'" in rules
    assert "connect-src" not in rules
    scripts = [text for attributes, text in elements.of("script") if attributes.get("type") is None]
    hashes = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts}
    assert set(re.findall(r"'sha256-([^']+)'", rules)) == hashes
    assert "'unsafe-inline'" not in rules.partition("script-src")[2].partition(";")[0]


def test_what_a_run_says_cannot_end_the_element_that_holds_it(tmp_path: Path) -> None:
    run = made(tmp_path, "conv", HOSTILE)
    file = write_report([run.path], tmp_path / "out.html")
    text = file.read_text()
    assert HOSTILE not in text
    assert "<script>alert(1)" not in text
    found = inside(file)
    assert found["/api/runs/conv"]["reason"] == HOSTILE
    assert found["/api/runs/conv"]["config"]["note"] == HOSTILE
    clean = write_report([made(tmp_path, "clean").path])
    assert len(Elements(text).of("script")) == len(Elements(clean.read_text()).of("script"))


def test_a_script_that_names_its_own_end_is_still_one_script(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<meta charset="utf-8">\n<script src="a.js"></script>\n')
    (tmp_path / "a.js").write_bytes(b'const end = "</script>";\r\nconst note = "<!--";\n')
    scripts = Elements(html({}, tmp_path)).of("script")
    assert [text for _, text in scripts] == ["{}", 'const end = "<\\/script>";\nconst note = "<\\!--";\n']


def test_several_runs_are_in_one_report(tmp_path: Path) -> None:
    runs = [made(tmp_path / "a", "conv"), made(tmp_path / "a", "other"), made(tmp_path / "b", "conv", "odd")]
    file = write_report([*(run.path for run in runs), runs[0].path], tmp_path / "report.html")
    found = inside(file)
    names = {line["name"] for line in found["/api/runs"]["runs"]}
    assert names == {"conv (a)", "conv (b)", "other"}
    assert found["/api/runs/conv%20(b)"]["config"]["note"] == "odd"
    assert found["/api/runs/conv%20(a)/curves"]["points"] == 3


def test_a_report_that_cannot_be_made_leaves_no_file(tmp_path: Path) -> None:
    run = made(tmp_path, "conv")
    with pytest.raises(RunError, match="is not a run"):
        write_report([tmp_path / "none"])
    with pytest.raises(RunError, match="there is no folder"):
        write_report([run.path], tmp_path / "none" / "report.html")
    (run.path / "events.jsonl").unlink()
    (run.path / "events.jsonl").symlink_to("/etc/hostname")
    with pytest.raises(RunError, match=r"no report about run 'conv': 'events\.jsonl' is a link"):
        write_report([run.path])
    assert not (run.path / "report.html").exists()


def test_a_report_does_not_change_what_it_is_about(tmp_path: Path) -> None:
    run = made(tmp_path, "conv")
    first = write_report([run.path]).read_bytes()
    assert write_report([run.path]).read_bytes() == first
    assert Run.open(run.path).state() == "failed"
    with run.locked():  # which another report in its directory does not hinder
        run.events.append("step", step=3, loss=1.0)
    assert inside(write_report([run.path]))["/api/runs/conv/curves"]["points"] == 4


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    made(tmp_path / "runs", "conv")
    return tmp_path / "runs"


def fails(*words: str) -> str:
    """What a mistake says: its error, which the program prints as one line with exit code 2."""
    done = CliRunner().invoke(app, list(words))
    assert isinstance(done.exception, WeftError)
    return str(done.exception)


def test_a_server_says_where_it_is_and_ends_with_ctrl_c(runs: Path) -> None:
    command = [sys.executable, "-m", "weft.cli", "serve", str(runs), "--port", "0", "--host", "0.0.0.0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            line = process.stdout.readline()
            found = re.search(r"at http://\S+:(\d+)/\?token=(\S{20,})", line)
            assert found is not None
            local = f"http://127.0.0.1:{found[1]}"
            assert httpx.get(f"{local}/api/runs").status_code == 401
            with httpx.Client(base_url=local, follow_redirects=True) as client:
                assert client.get("/", params={"token": found[2]}).status_code == 200
                assert client.get("/api/runs").json()["runs"][0]["name"] == "conv"
                with client.stream("GET", "/api/stream") as answer:  # which is open when Ctrl-C comes
                    next(answer.iter_lines())
                    process.send_signal(signal.SIGINT)
                    assert process.wait(20) == 0
            assert "Ctrl-C" in process.stdout.read()
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_a_port_that_is_taken_is_said_with_a_remedy(runs: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        message = fails("serve", str(runs), "--port", port)
    assert port in message
    assert "another program listens there; use another --port (0: any that is free)" in message


def test_mistakes_are_told_in_one_line(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, words in ((runs / "conv", "is a run: serve the directory"), (tmp_path / "file", "is not a directory")):
        assert words in fails("serve", str(place), "--port", "0")
    for host, words in (("no.such.host.invalid", "no such address"), ("192.0.2.1", "this machine has no such address")):
        assert words in fails("serve", str(runs), "--host", host, "--port", "0")
    for token in ("", "short", "semi;colon;s", "with a blank"):
        assert "--token needs 8" in fails("serve", str(runs), "--token", token, "--port", "0")


def test_without_its_packages_the_server_names_the_extra(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "weft.serve.server", raising=False)
    assert "pip install -e '.[serve]'" in fails("serve", str(runs), "--port", "0")


def test_a_report_says_where_it_lies(runs: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(runs / "conv")])
    assert done.exit_code == 0
    assert str(runs / "conv" / "report.html") in done.stdout.replace("\n", "")
    out = tmp_path / "both.html"
    shutil.copytree(runs / "conv", runs / "again", ignore=lambda folder, names: ["report.html"])
    done = CliRunner().invoke(app, ["report", str(runs / "conv"), str(runs / "again"), "-o", str(out), "--json"])
    both = [str(runs / "conv"), str(runs / "again")]
    assert json.loads(done.stdout) == {"report": str(out), "runs": both, "bytes": out.stat().st_size}


def test_a_report_needs_none_of_the_servers_packages(runs: Path) -> None:
    code = f"""
import sys
from pathlib import Path
sys.modules.update(dict.fromkeys(("fastapi", "uvicorn", "starlette", "optuna")))
from weft.serve.report import write_report
print(write_report([Path({str(runs / "conv")!r})]))
"""
    one = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=one)
    assert done.stdout.strip() == str(runs / "conv" / "report.html")
