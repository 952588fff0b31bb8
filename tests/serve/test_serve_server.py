"""The server, for real: on a port of loopback, asked over HTTP, while the runs that it shows change."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from weft.runs import Run

Served = Callable[..., AbstractContextManager[httpx.Client]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made(tmp_path / "runs", "conv")
    return tmp_path / "runs"


def made(root: Path, name: str, steps: int = 3) -> Run:
    run = Run.create(root, name, manifest={"config": {"train": {"steps": 9}}})
    with run.locked():
        run.events.append("started", at=0, steps=9)
        for step in range(steps):
            run.events.append("step", step=step, loss=3.0 - step)
    return run


@pytest.fixture
def served(serving: Callable[..., Any]) -> Served:
    """`with served(root, token, host) as client`."""

    @contextmanager
    def ask(root: Path, token: str | None = None, host: str = "127.0.0.1") -> Iterator[httpx.Client]:
        with serving(root, token=token, host=host) as address, httpx.Client(base_url=address, timeout=20) as client:
            yield client

    return ask


@pytest.fixture
def client(root: Path, served: Served) -> Iterator[httpx.Client]:
    with served(root) as client:
        yield client


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The events of a stream."""
    return (json.loads(line[6:]) for line in lines if line.startswith("data: "))


def test_documents_and_the_page_are_given(client: httpx.Client) -> None:
    assert [run["name"] for run in client.get("/api/runs").json()["runs"]] == ["conv"]
    assert client.get("/api/runs/conv").json()["config"] == {"train.steps": 9}
    assert client.get("/api/runs/conv/curves").json()["points"] == 3
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "<!doctype html>" in page.text
    assert client.get("/style.css").headers["content-type"].startswith("text/css")
    assert client.get("/vendor/echarts.min.js").headers["content-type"].split(";")[0].endswith("javascript")


def test_what_is_known_is_not_sent_again_until_it_changes(client: httpx.Client, root: Path) -> None:
    for address in ("/", "/style.css", "/api/runs", "/api/runs/conv", "/api/runs/conv/curves"):
        first = client.get(address)
        again = client.get(address, headers={"If-None-Match": f'"other", W/{first.headers["etag"]}'})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    run = Run.open(root / "conv")
    run.events.append("step", step=3, loss=0.5)
    run.events.close()
    fresh = client.get(address, headers={"If-None-Match": first.headers["etag"]})
    assert (fresh.status_code, fresh.json()["points"]) == (200, 4)


RUNS = ("none", "..", "%2e%2e", "..%2fsecret", "..%2fsecret/curves", "%00/curves", "conv/none", "conv/curves/more")
ABSENT = [f"/api/runs/{path}" for path in RUNS]
ABSENT += ["/api/plans/..%2f..%2fsecret", "/api/plans/none", "/api/none", "/api/", "/none.js", "/../app.py"]
ABSENT += ["/%2e%2e/app.py", "/..%2fapp.py", "//etc/passwd", "/docs", "/openapi.json"]


def test_what_is_not_there_is_one_line_of_json(client: httpx.Client, root: Path) -> None:
    made(root.parent, "secret")
    for path in ABSENT:  # by a client that does not tidy up paths, as httpx does
        connection = http.client.HTTPConnection("127.0.0.1", client.base_url.port, timeout=20)
        connection.request("GET", path)
        answer = connection.getresponse()
        body = json.loads(answer.read())
        connection.close()
        assert (answer.status, list(body)) == (404, ["error"]), path
        assert "\n" not in body["error"]


def test_a_view_that_cannot_be_made_says_why(client: httpx.Client, root: Path) -> None:
    (root / "bad").mkdir()
    (root / "bad" / "manifest.json").write_text("{")
    for address in ("/api/runs/bad", "/api/runs/conv/pipeline?from=noon"):
        answer = client.get(address)
        assert answer.status_code == 422
        assert answer.json()["error"]
    lines = {line["name"]: line["state"] for line in client.get("/api/runs").json()["runs"]}
    assert lines == {"bad": "damaged", "conv": "interrupted"}


def test_nothing_can_be_changed_and_a_head_is_a_get_without_its_body(client: httpx.Client) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert client.request(method, "/api/runs/conv").status_code == 405
    head, get = client.head("/api/runs/conv"), client.get("/api/runs/conv")
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", get.headers["etag"])


def test_only_requests_to_a_name_of_this_machine_are_answered(client: httpx.Client) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:80", "", "10.0.0.1", "[::2]"):
        assert client.get("/api/runs", headers={"Host": host}).status_code == 400
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8765", "[::1]:8765", "weft.localhost"):
        assert client.get("/api/runs", headers={"Host": host}).status_code == 200


def test_the_browser_may_load_nothing_from_elsewhere(client: httpx.Client) -> None:
    for address in ("/", "/api/runs", "/none", "/api/runs/none"):
        headers = client.get(address).headers
        assert all(
            rule in headers["content-security-policy"] for rule in ("default-src 'self'", "frame-ancestors 'none'")
        )
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert "access-control-allow-origin" not in headers


def test_with_a_token_nothing_is_answered_without_it(root: Path, served: Served) -> None:
    with served(root, "a-long-token", "0.0.0.0") as client:
        cookies = ("weft-token=a-long-token", f"weft-token-{client.base_url.port}=wrong")  # the first of another server
        wrong: list[dict[str, Any]] = [{}, *({"params": {"token": token}} for token in ("a-long-toke", "", "ä"))]
        wrong += [{"headers": {"Authorization": word}} for word in ("Bearer a-long-tokens", "Basic a-long-token")]
        wrong += [{"headers": {"Cookie": cookie}} for cookie in cookies]
        for address in ("/", "/style.css", "/api/runs", "/api/stream", "/none"):
            for how in wrong:
                assert client.get(address, **how).status_code == 401
        right = client.get("/api/runs", headers={"Authorization": "Bearer a-long-token"})
        assert right.status_code == 200
        assert not client.cookies


def test_a_token_in_the_address_is_given_once_and_then_kept_in_a_cookie(root: Path, served: Served) -> None:
    with served(root, "a-long-token", "0.0.0.0") as client:
        first = client.get("/", params={"token": "a-long-token", "a": "b"})
        assert (first.status_code, first.headers["location"]) == (303, "/?a=b")
        assert all(word in first.headers["set-cookie"] for word in ("HttpOnly", "SameSite=Strict"))
        assert client.get("/").status_code == 200
        assert client.get("/api/runs").status_code == 200
        client.cookies.clear()
        assert client.get("/api/runs").status_code == 401


def test_a_change_is_told_to_who_listens(client: httpx.Client, root: Path) -> None:
    with client.stream("GET", "/api/stream") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        changes = events(answer.iter_lines())
        assert [next(changes), next(changes)] == [{"runs": True}, {"run": "conv"}]
        run = Run.open(root / "conv")
        run.events.append("step", step=3, loss=0.5)
        run.events.close()
        assert next(changes) == {"run": "conv"}
        made(root, "second")
        assert next(changes) == {"runs": True}
        assert next(changes) == {"run": "second"}


WRITER = """
import fcntl, json, sys, time
lock = open(sys.argv[1] + "/lock", "a")
fcntl.flock(lock, fcntl.LOCK_EX)
with open(sys.argv[1] + "/events.jsonl", "a") as out:
    for step in range(3, 10_000):
        out.write(json.dumps({"event": "step", "time": time.time(), "step": step, "loss": 1.0}) + "\\n")
        out.write('{"event": "step", "ti')
        out.flush()
        time.sleep(0.05)
        out.write('me": 1.0}\\n')
"""


def test_a_run_is_followed_until_it_is_killed(client: httpx.Client, root: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(root / "conv")])
    try:
        with client.stream("GET", "/api/stream") as answer:
            changes = events(answer.iter_lines())
            while True:
                next(changes)
                now = client.get("/api/runs/conv").json()
                if now["state"] == "running" and now["done"] > 6:
                    break
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait()
            while client.get("/api/runs/conv").json()["state"] == "running":
                next(changes)
        end = client.get("/api/runs/conv").json()
        assert (end["state"], end["damaged"], end["seconds_left"]) == ("interrupted", 0, None)
        assert client.get("/api/runs/conv/curves").json()["points"] == end["done"]
    finally:
        writer.kill()
        writer.wait()
