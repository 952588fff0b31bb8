"""Draws the pictures of the dashboard: makes real runs in a temporary folder and serves them to a browser.

Run it on a machine that does nothing else. Each stage has one thread: where the threads of all stages, or other
programs, share the cores, the real schedule of the picture takes several times as long as the simulated one.

python docs/scripts/pictures.py            # a minute or two; needs chromium and `pip install playwright`
python docs/scripts/pictures.py RUNS_DIR   # of runs that are there already
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

CONFIG = """
supernet = "digits-conv"
data = "digits"
[run]
name = "conv"
validation = 50
[execution]
threads = 1
[train]
steps = 300
batch_size = 32
[consistency]
shared = "lagged(4)"
[search]
budget = 80
maximize = "accuracy"
minimize = "flops"
"""

COMMANDS = (
    "train conv.toml --stages 2 --execution.trace true --offload.budget 920KiB",
    "train conv.toml --run.name one-stage",
    "train conv.toml --run.name exact --consistency.shared exact",
    "search runs/conv",
    "search conv.toml --method drnas --run.name drnas --train.steps 200",
    "tune tune.toml",
    "plan gpt2 --devices 8 --machine h100 --dtype bfloat16 --save gpt2",
)

VIEWS = {  # the file, the place in the page, and the heights that are shown
    "runs": ("", 560),
    "compare": ("compare/conv,one-stage,exact", 900),
    "curves": ("run/conv/curves", 800),
    "pipeline": ("run/conv/pipeline", 1220),
    "search": ("run/conv/search", 860),
    "probabilities": ("run/drnas/search", 800),
    "tune": ("run/digits/tune", 1230),
    "plan": ("plan/gpt2", 1000),
}


def make_runs(folder: Path) -> Path:
    (folder / "conv.toml").write_text(CONFIG)
    for name in ("tune.toml", "tuned_net.py"):
        shutil.copy(EXAMPLES / name, folder)
    for command in COMMANDS:
        print("weft", command)
        subprocess.run([sys.executable, "-m", "weft", *command.split()], cwd=folder, check=True, capture_output=True)
    return folder / "runs"


def draw(page: Any, name: str, height: int) -> None:
    page.set_viewport_size({"width": 1240, "height": height})
    if name == "pipeline":
        page.get_by_role("button", name="By subnet").click()
        page.locator(".chart[aria-label^='Schedule']").focus()
        for _ in range(4):  # from the middle to the beginning, where the simulated schedule is, too
            page.keyboard.press("+")
        for _ in range(60):
            page.keyboard.press("ArrowLeft")
        page.wait_for_timeout(500)
    if name == "search":
        page.locator("[aria-label='members of the front'] button.link").nth(1).click()
        page.get_by_role("button", name="Export").click()
    page.wait_for_timeout(1500)
    page.evaluate("scrollTo(0, 0); document.activeElement.blur()")
    page.screenshot(path=PICTURES / f"{name}.png")
    smaller(PICTURES / f"{name}.png")
    print(PICTURES / f"{name}.png")


def smaller(file: Path) -> None:
    """Of a picture of a page 256 colours are enough."""
    from PIL import Image

    Image.open(file).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)


def main() -> None:
    from playwright.sync_api import sync_playwright

    from weft.serve.library import Library
    from weft.serve.server import listen, make_server

    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        root = Path(sys.argv[1]) if len(sys.argv) > 1 else make_runs(Path(folder))
        listener = listen("127.0.0.1", 0)
        os.chdir(root.parent)  # the page tells the path as it was given
        server = make_server(listener, Library.under(Path(root.name)))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.05)
        found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        for name, (route, height) in VIEWS.items():
            page = browser.new_page(color_scheme="light", device_scale_factor=1)
            page.goto(f"http://127.0.0.1:{listener.getsockname()[1]}/#/{route}")
            page.wait_for_selector("main[data-view]")
            draw(page, name, height)
            page.close()
        browser.close()
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    main()
