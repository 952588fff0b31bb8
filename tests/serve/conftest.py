"""Real small runs of each kind, a server on loopback, and a real browser that looks at them."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from weft.cli import main

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]

CODE = """
from functools import partial
import torch
from torch import nn
from weft import Chain, Choice, Data, Shared, Space, Tensors

def build(width=16):
    space = Space()
    paths = {"wide": partial(nn.Linear, width, width), "thin": partial(nn.Linear, width, width), "skip": nn.Identity}
    blocks = [Choice(space, f"block{i}", paths) for i in range(4)]
    return Chain(Shared(partial(nn.Linear, 4, width), "stem"), *blocks, Shared(partial(nn.Linear, width, 3), "head"))

def load(samples=64):
    def part(seed):
        x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed))
        return Tensors(x=x, y=x[:, :3].argmax(-1))
    return Data("numbers", part(0), part(1), part(2))

def tuned(params):
    return nn.Sequential(nn.Linear(4, params["width"]), nn.ReLU(), nn.Linear(params["width"], 3))

def planned():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)), (torch.zeros(32, 64),)
"""

CONFIG = """
supernet = "browser_net:build"
data = "browser_net:load"
[train]
steps = 24
batch_size = 8
[run]
name = "net"
validation = 12
[execution]
threads = 1
[search]
budget = 12
maximize = "accuracy"
minimize = "flops"
"""

STUDY = """
[study]
name = "study"
trials = 4
maximize = "accuracy"
jobs_per_device = 1
max_concurrent = 2
[space]
lr = { low = 1e-3, high = 1e-1, log = true }
width = [4, 8]
[recipe]
model = "browser_net:tuned"
data = "browser_net:load"
steps = 8
batch_size = 8
report_every = 4
"""


@pytest.fixture(scope="module")
def runs(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of each kind one: `net` (two stages, trace, residency, search), `one` (the same on one), `mixed`, `study`; and a
    plan `small`."""
    folder = tmp_path_factory.mktemp("shown")
    (folder / "browser_net.py").write_text(CODE)
    (folder / "net.toml").write_text(CONFIG)
    (folder / "tune.toml").write_text(STUDY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.setenv("OMP_NUM_THREADS", "1")
        traced = ("--execution.trace=true", "--offload.budget=1MiB")
        for words in (
            ("train", "net.toml", "--stages", "2", *traced),
            ("train", "net.toml", "--run.name=one"),
            ("search", "runs/net"),
            ("search", "net.toml", "--method", "drnas", "--run.name=mixed", "--train.steps=8"),
            ("tune", "tune.toml"),
            ("plan", "browser_net:planned", "--devices", "2", "--save", "small"),
        ):
            patch.setattr("sys.argv", ["weft", *words])
            with pytest.raises(SystemExit) as end:
                main()
            assert not end.value.code, words
        yield folder / "runs"


@contextmanager
def serving(root: Path, port: int = 0, token: str | None = None, host: str = "127.0.0.1") -> Iterator[str]:
    """A real server; gives its address on loopback."""
    from weft.serve.library import Library
    from weft.serve.server import listen, make_server

    listener: socket.socket = listen(host, port)
    server = make_server(listener, Library.under(root), token)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive()


@pytest.fixture(scope="session", name="serving")
def serving_fixture() -> Callable[..., AbstractContextManager[str]]:
    """`with serving(runs_directory) as address`."""
    return serving


@pytest.fixture(scope="module")
def site(runs: Path) -> Iterator[str]:
    with serving(runs) as address:
        yield address


@pytest.fixture(scope="module")
def chromium(require: Callable[[str, bool, str], None]) -> Iterator[Any]:
    """The distribution's browser, driven by Playwright."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        require("browser", False, "Playwright is not installed: pip install playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    require("browser", found is not None, f"none of {', '.join(names)} is installed")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


def new_page(context: Any, address: str, messages: list[str]) -> Any:
    """A page at an address; what its console says is added to the messages."""
    page = context.new_page()
    page.set_default_timeout(10_000)
    page.on("console", lambda own: messages.append(own.text) if own.type in ("error", "warning") else None)
    page.on("pageerror", lambda problem: messages.append(str(problem)))
    page.goto(address)
    return page


@pytest.fixture(scope="module")
def tab(chromium: Any, site: str) -> Iterator[Any]:
    """A page of the site that tests share, with what its console says."""
    context = chromium.new_context(color_scheme="light", permissions=["clipboard-read", "clipboard-write"])
    messages = list[str]()
    yield new_page(context, site, messages), messages
    context.close()


@pytest.fixture
def visit(tab: Any) -> Iterator[Callable[[str], Any]]:
    """Shows a route of the site anew, `visit("run/net/curves")`; in the end the console has no error."""
    page, messages = tab

    def show(route: str) -> Any:
        page.set_viewport_size({"width": 1280, "height": 900})
        page.emulate_media(color_scheme="light")
        elsewhere, view = ("", "runs") if route.startswith("plan") else ("plan/small", "plan")
        page.evaluate("(route) => { location.hash = `#/${route}`; }", elsewhere)
        page.wait_for_selector(f"main[data-view={view}]")
        page.evaluate("(route) => { location.hash = `#/${route}`; }", route)
        page.wait_for_selector(f"main:not([data-view={view}])")
        return page

    yield show
    assert messages == []


@pytest.fixture
def opened(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages, `opened(address, **of_the_context)`; in the end none may have an error in its console."""
    contexts, messages = [], list[str]()

    def open_page(address: str, **options: Any) -> Any:
        options = {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light", **options}
        contexts.append(chromium.new_context(**options))
        page = new_page(contexts[-1], address, messages)
        page.wait_for_selector("main[data-view]")
        return page

    open_page.messages = messages  # type: ignore[attr-defined]
    yield open_page
    for context in contexts:
        context.close()
    assert messages == []
