"""Real processes to be killed: one interpreter that has imported torch forks a child for each task."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

SCRIPT = """
import json, os, sys
import torch
import weft.runs
torch.set_num_threads(1)

def send(value):
    os.write(1, (json.dumps(value) + "\\n").encode())

for line in sys.stdin:
    task = json.loads(line)
    pid = os.fork()
    if pid == 0:
        send(os.getpid())
        try:
            exec(task["code"], {"send": send, **task["args"]})
        except BaseException as error:
            send({"error": type(error).__name__, "text": str(error)})
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    send({"end": os.waitstatus_to_exitcode(status)})
"""


class ForkServer:
    """Runs one child at a time; its messages come back as a list, with its exit status (-9 if killed)."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = 0

    def start(self, code: str, **args: Any) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"code": code, "args": args}).encode() + b"\n")
        self.process.stdin.flush()
        self.pid = self.receive()
        return self.pid

    def receive(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def finish(self) -> tuple[list[Any], int]:
        messages = []
        while not (isinstance(message := self.receive(), dict) and "end" in message):
            messages.append(message)
        return messages, message["end"]

    def run(self, code: str, **args: Any) -> tuple[list[Any], int]:
        self.start(code, **args)
        return self.finish()


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    assert server.process.stdin is not None
    server.process.stdin.close()
    server.process.wait(30)
