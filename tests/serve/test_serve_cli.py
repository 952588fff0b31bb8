"""`weft serve` and `weft report` as a user starts them: what they print, and how mistakes end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from weft.cli.app import app
from weft.errors import WeftError
from weft.runs import Run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    run = Run.create(tmp_path / "runs", "conv", manifest={})
    run.events.append("started", at=0, steps=2)
    run.events.append("step", step=0, loss=1.0)
    run.events.close()
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
            said = process.stdout.readline()
            found = re.search(r"at http://\S+:(\d+)/\?token=(\S{20,})", said)
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
    assert "is a run: serve the directory that holds it" in fails("serve", str(runs / "conv"), "--port", "0")
    (tmp_path / "file").write_text("")
    assert "is not a directory" in fails("serve", str(tmp_path / "file"), "--port", "0")
    assert "no such address" in fails("serve", str(runs), "--host", "no.such.host.invalid", "--port", "0")
    assert "this machine has no such address" in fails("serve", str(runs), "--host", "192.0.2.1", "--port", "0")
    for token in ("", "short", "semi;colon;s", "with a blank"):
        assert "lest it is guessed" in fails("serve", str(runs), "--token", token, "--port", "0")
    assert "not a run" in fails("report", str(tmp_path / "none"))
    assert CliRunner().invoke(app, ["serve", str(runs), "--port", "70000"]).exit_code == 2
    assert CliRunner().invoke(app, ["report"]).exit_code == 2


def test_without_its_packages_the_server_names_the_extra(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install -e '.[serve]'" in fails("serve", str(runs), "--port", "0")


def test_a_report_says_where_it_lies(runs: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(runs / "conv")])
    assert done.exit_code == 0
    assert str(runs / "conv" / "report.html") in done.stdout.replace("\n", "")
    out = tmp_path / "both.html"
    shutil.copytree(runs / "conv", runs / "again", ignore=lambda folder, names: ["report.html"])
    done = CliRunner().invoke(app, ["report", str(runs / "conv"), str(runs / "again"), "-o", str(out), "--json"])
    told: dict[str, Any] = json.loads(done.stdout)
    assert told == {
        "report": str(out),
        "runs": [str(runs / "conv"), str(runs / "again")],
        "bytes": out.stat().st_size,
    }


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
