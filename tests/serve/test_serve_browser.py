"""The page in a real browser, on a real run of each kind."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weft.plan.capture import capture
from weft.plan.planner import plan_captured
from weft.runs import Run
from weft.serve.report import write_plan, write_report
from weft.serve.views.plan import plan_document

Open = Callable[..., Any]
Visit = Callable[[str], Any]
Serving = Callable[..., AbstractContextManager[str]]

VIEWS = {
    "": ([], "Runs"),
    "run/net/curves": (["loss", "accuracy"], "net"),
    "run/net/pipeline": (["Schedule", "Busy share over time", "Memory", "Layers on the device"], "net"),
    "run/net/search": (["Pareto front"], "net"),
    "run/mixed/search": (["Choice probabilities"], "mixed"),
    "run/study/tune": (["Trials", "Devices over time", "Reports"], "study"),
    "run/net/config": ([], "net"),
    "compare/net,one": (["Curves"], "Comparison"),
    "plan/small": ([], "Sequential on 2 x H100"),
}

CHARTS = "[...weft.chart.all].filter((chart) => chart.instance && document.contains(chart.element))"


def charts(page: Any) -> list[str]:
    """The titles of the charts that are drawn."""
    found: list[str] = page.evaluate(f"{CHARTS}.map((chart) => chart.title)")
    return found


def zoom(page: Any, title: str) -> tuple[float, float]:
    """What part of its axis a chart shows."""
    start, end = page.evaluate(
        f"""(title) => {{ const own = {CHARTS}.find((chart) => chart.title === title).instance.getOption().dataZoom[0];
        return [own.startValue, own.endValue]; }}""",
        title,
    )
    return start, end


def press(page: Any, title: str, keys: str) -> None:
    page.locator(f".chart[aria-label^='{title}']").focus()
    for key in keys:
        page.keyboard.press(key)


def until(page: Any, expression: str) -> None:
    """Wait until it is true in the page; Playwright's own way needs `eval`, which the page's policy forbids."""
    ends = time.monotonic() + 10
    while not page.evaluate(expression):
        assert time.monotonic() < ends, f"{expression}, but the page has: {page.locator('body').inner_text()[:2000]}"
        page.wait_for_timeout(30)


def wait_for_charts(page: Any, titles: list[str]) -> None:
    until(page, f"{json.dumps(titles)}.every((title) => {CHARTS}.some((own) => own.title === title))")


@pytest.mark.parametrize("route", VIEWS, ids=lambda route: route or "runs")
def test_every_view_renders_on_a_laptop_on_a_phone_and_in_the_dark(visit: Visit, route: str) -> None:
    titles, heading = VIEWS[route]
    page = visit(route)
    assert page.locator("h1").inner_text() == heading
    wait_for_charts(page, titles)
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme="dark")
    until(page, "document.documentElement.dataset.theme === 'dark'")
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    wait_for_charts(page, titles)
    for place in page.locator(".chart:visible").all():
        assert place.bounding_box()["width"] <= 390
        assert len(place.get_attribute("aria-label")) > 10


def test_the_theme_that_a_person_chose_stays(opened: Open, site: str) -> None:
    page = opened(site)
    page.get_by_label("use the dark theme").click()
    page.reload()
    page.wait_for_selector("main[data-view]")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def write_event(run: Run, kind: str, **more: Any) -> None:
    with (run.path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": kind, "time": time.time(), **more}) + "\n")


def test_new_steps_appear_and_the_zoom_stays(opened: Open, serving: Serving, tmp_path: Path) -> None:
    run = Run.create(tmp_path, "going", manifest={"config": {"train": {"steps": 100}}})
    with serving(tmp_path) as site:
        with run.locked():
            write_event(run, "started", at=0, steps=100)
            for step in range(10):
                write_event(run, "step", step=step, loss=3.0 - step / 10)
            page = opened(f"{site}#/run/going/curves")
            wait_for_charts(page, ["loss"])
            page.wait_for_selector("#live[data-state=live]")
            assert "10 / 100" in page.locator(".facts").first.inner_text()
            assert page.locator(".badge.running").count() == 1
            page.evaluate(f"{CHARTS}[0].instance.dispatchAction({{type: 'dataZoom', startValue: 2, endValue: 5}})")
            for step in range(10, 30):
                write_event(run, "step", step=step, loss=2.0)
            until(page, "document.querySelector('.facts').textContent.includes('30 / 100')")
            points = f"{CHARTS}[0].instance.getOption().series.find((own) => own.id === 'loss').data.length"
            until(page, f"{points} === 30")
            assert zoom(page, "loss") == (2, 5)
            write_event(run, "finished", steps=30, fingerprint="f" * 64)
        page.wait_for_selector(".badge.finished")
        shutil.rmtree(run.path)
        until(page, "document.querySelector('main').textContent.includes('Nothing here')")
        page.close()  # before the server it talks to
    opened.messages[:] = [text for text in opened.messages if "404" not in text]  # type: ignore[attr-defined]  # the browser's


def test_a_hidden_page_asks_for_nothing_until_it_is_seen_again(opened: Open, serving: Serving, tmp_path: Path) -> None:
    run = Run.create(tmp_path, "hidden", manifest={"config": {"train": {"steps": 9}}})
    write_event(run, "started", at=0, steps=9)
    write_event(run, "step", step=0, loss=3.0)
    hide = "Object.defineProperty(document, 'hidden', {get: () => %s, configurable: true});"
    tell = "document.dispatchEvent(new Event('visibilitychange'))"
    with serving(tmp_path) as site:
        page = opened(f"{site}#/run/hidden/curves")
        wait_for_charts(page, ["loss"])
        page.wait_for_timeout(1200)  # until what changed before is loaded
        page.evaluate((hide % "true") + tell)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        write_event(run, "step", step=1, loss=2.0)
        page.wait_for_timeout(1200)
        assert asked == []
        page.evaluate((hide % "false") + tell)
        until(page, "document.querySelector('.facts').textContent.includes('2 / 9')")
        page.close()  # before the server it talks to


def test_the_dot_says_when_the_server_is_gone_and_back(opened: Open, serving: Serving, tmp_path: Path) -> None:
    with serving(tmp_path) as address:
        page = opened(address)
        page.wait_for_selector("#live[data-state=live]")
        assert "make demo" in page.locator("main").inner_text()
    page.wait_for_selector("#live[data-state=reconnecting]")
    with serving(tmp_path, int(address.rstrip("/").rsplit(":", 1)[1])):
        page.wait_for_selector("#live[data-state=live]")
    opened.messages.clear()  # type: ignore[attr-defined]  # a browser tells of every connection that failed


def test_a_click_on_the_front_opens_its_architecture_and_escape_closes_it(visit: Visit, runs: Path) -> None:
    page = visit("run/net/search")
    wait_for_charts(page, ["Pareto front"])
    place = page.locator(".chart[aria-label^='Pareto front']")
    place.scroll_into_view_if_needed()
    x, y = page.evaluate(
        f"""(() => {{ const own = {CHARTS}[0].instance;
        const data = own.getOption().series.find((one) => one.id === "front").data[0];
        return own.convertToPixel({{seriesId: "front"}}, data.value); }})()"""
    )
    place.hover(position={"x": x, "y": y})
    member = page.locator(".tip strong").inner_text()
    place.click(position={"x": x, "y": y})
    panel = page.locator("#panel")
    assert panel.get_attribute("aria-label") == f"Subnet {member}"
    front = json.loads((runs / "net" / "results" / "search" / "front.json").read_text())
    chosen = next(own for own in front["members"] if own["id"] == member)["subnet"]["values"]
    shown = panel.locator(".chain").inner_text().split()
    assert [word for word in shown if word in ("wide", "thin", "skip")] == [chosen[f"block{i}"] for i in range(4)]
    command = panel.get_by_text("weft export")
    assert not command.is_visible()
    panel.get_by_role("button", name="Export").click()
    assert member in command.inner_text()
    panel.get_by_role("button", name="Copy").click()
    page.wait_for_selector("#panel >> text=Copied")
    assert page.evaluate("navigator.clipboard.readText()") == command.inner_text()
    page.keyboard.press("Escape")
    assert not panel.is_visible()


def test_the_front_can_be_opened_by_the_keyboard_and_the_focus_comes_back(visit: Visit) -> None:
    page = visit("run/net/search")
    row = page.locator("[aria-label='members of the front'] button.link").first
    row.focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "panel"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.textContent") == row.inner_text()


def test_ticked_runs_are_compared_with_only_what_differs(visit: Visit) -> None:
    page = visit("")
    assert page.get_by_role("button", name="Compare").is_disabled()
    page.get_by_label("compare net", exact=True).check()
    page.get_by_label("compare one", exact=True).check()
    page.get_by_role("button", name="Compare 2").click()
    page.wait_for_selector("main[data-view=compare]")
    keys = page.locator("[aria-label=configurations] tbody th")
    assert sorted(keys.all_inner_texts()) == ["execution.stages", "execution.trace", "offload.budget", "run.name"]
    # On one stage and on two the bits are the same, and the page says so.
    assert page.locator(".badge.same").count() == 2
    page.get_by_role("button", name="All keys").click()
    assert keys.count() > 30
    log = f"{CHARTS}[0].instance.getOption().yAxis[0].type"
    assert page.evaluate(log) == "value"
    page.get_by_role("button", name="Log").click()
    assert page.evaluate(log) == "log"


def test_a_heading_sorts_a_table_up_and_down(visit: Visit) -> None:
    page = visit("")
    names = page.locator("[aria-label=runs] tbody th")
    heading = page.locator("[aria-label=runs] thead th", has_text=re.compile("^run$"))
    heading.get_by_role("button").click()
    assert names.all_inner_texts() == sorted(names.all_inner_texts())
    assert heading.get_attribute("aria-sort") == "ascending"
    heading.get_by_role("button").click()
    assert names.all_inner_texts() == sorted(names.all_inner_texts(), reverse=True)


def test_the_keyboard_reaches_the_views(opened: Open, site: str) -> None:
    page = opened(f"{site}#/run/net/curves")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    for _ in range(12):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.textContent") == "Pipeline":
            break
    page.keyboard.press("Enter")
    page.wait_for_selector("main[data-view=pipeline]")
    assert page.locator("#views [aria-current=page]").inner_text() == "Pipeline"


def test_keys_move_through_the_schedule_and_all_charts_of_time_follow(visit: Visit) -> None:
    page = visit("run/net/pipeline")
    wait_for_charts(page, ["Schedule", "Memory"])
    whole = zoom(page, "Schedule")
    press(page, "Schedule", "++")
    near = zoom(page, "Schedule")
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 4)
    page.keyboard.press("ArrowRight")
    moved = zoom(page, "Schedule")
    assert moved[0] - near[0] == pytest.approx(0.2 * (near[1] - near[0]))
    assert zoom(page, "Memory") == pytest.approx(moved)
    page.keyboard.press("0")
    assert zoom(page, "Schedule") == pytest.approx(whole)


def test_an_operation_is_described_when_pointed_at(visit: Visit) -> None:
    page = visit("run/net/pipeline")
    wait_for_charts(page, ["Schedule"])
    x, y, span = page.evaluate(
        f"""(async () => {{ const own = {CHARTS}.find((chart) => chart.title === "Schedule").instance;
        const bars = own.getOption().series.find((one) => one.id === "real spans").data;
        const longest = bars.reduce((a, b) => (b[1] - b[0] > a[1] - a[0] ? b : a));
        const middle = [(longest[0] + longest[1]) / 2, longest[2]];
        const spans = (await weft.load("/api/runs/net/pipeline")).real.spans;
        return [...own.convertToPixel({{seriesId: "real spans"}}, middle), spans[longest[3]]]; }})()"""
    )
    stage, kind, microbatch, step, subnet, *_ = span
    page.locator(".chart[aria-label^='Schedule']").hover(position={"x": x, "y": y})
    page.wait_for_selector(".tip strong")
    tip = page.locator(".tip").inner_text()
    assert tip.startswith(f"{stage}{kind}{microbatch}")
    assert str(subnet) in tip
    assert re.search(rf"step\s+{step}\b", tip)
    page.locator(".figure[aria-label=Schedule]").get_by_role("button", name="Table").click()
    assert "0F0" in page.locator("[aria-label='operations in the window'] tbody th").all_inner_texts()


def test_zooming_in_brings_the_operations_of_a_long_run(
    opened: Open, serving: Serving, runs: Path, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "net"
    shutil.copytree(runs / "net", run)
    for file in (run / "traces").glob("stage*.jsonl"):
        lines = file.read_text().splitlines()
        head, began = {**json.loads(lines[0]), "simulated": []}, json.loads(lines[1])[3]
        ops = [["op", "FB"[n % 2], n // 2, began + n / 100, began + n / 100 + 0.008, 1] for n in range(4000)]
        file.write_text("".join(json.dumps(line) + "\n" for line in (head, *ops)))
    with serving(tmp_path / "runs") as address:
        page = opened(f"{address}#/run/net/pipeline")
        wait_for_charts(page, ["Schedule"])
        assert "Zoom in to see operations" in page.locator(".figure[aria-label=Schedule]").inner_text()
        press(page, "Schedule", "++++")
        page.wait_for_selector(".figure[aria-label=Schedule] >> text=backward")
        page.locator(".figure[aria-label=Schedule]").get_by_role("button", name="Table").click()
        assert "0F1000" in page.locator("[aria-label='operations in the window'] tbody th").all_inner_texts()
        page.close()


def test_selecting_a_part_of_an_axis_filters_the_trials(visit: Visit) -> None:
    page = visit("run/study/tune")
    wait_for_charts(page, ["Trials"])
    rows = page.locator("[aria-label=trials] tbody tr")
    assert rows.count() == 4
    box = page.locator(".chart[aria-label^='Trials']").bounding_box()
    page.mouse.move(box["x"] + 44, box["y"] + 64)
    page.mouse.down()
    page.mouse.move(box["x"] + 44, box["y"] + 150, steps=4)
    page.mouse.move(box["x"] + 44, box["y"] + 180, steps=2)
    page.mouse.up()
    page.wait_for_selector("text=are selected above")
    rates = [float(text) for text in page.locator("[aria-label=trials] tbody tr td:nth-child(4)").all_inner_texts()]
    assert len(rates) < 4
    assert all(rate > 1e-2 for rate in rates)


def test_a_block_is_picked_in_the_probabilities(visit: Visit) -> None:
    page = visit("run/mixed/search")
    wait_for_charts(page, ["Choice probabilities"])
    page.get_by_role("combobox", name="Choice").select_option("block2")
    place = page.locator(".chart[aria-label^='Choice probabilities. block2']")
    place.wait_for()
    assert "wide" in place.get_attribute("aria-label")


def test_the_graph_of_a_plan_is_walked_by_keys_and_zoomed(visit: Visit) -> None:
    page = visit("plan/small")
    boxes = page.locator(".graph .box")
    assert boxes.count() >= 3
    boxes.first.focus()
    first = page.locator(".about-box").inner_text()
    assert "computing a step" in first
    page.keyboard.press("ArrowDown")
    assert page.locator(".about-box").inner_text() not in ("", first)
    wide = page.locator(".graph svg").bounding_box()["width"]
    page.get_by_role("button", name="zoom in").click()
    assert page.locator(".graph svg").bounding_box()["width"] == pytest.approx(1.25 * wide, rel=0.01)
    assert "data parallel" in page.locator("[aria-label='comparison with other ways']").inner_text()


OVERLAPS = """() => {
  const rects = [...document.querySelectorAll(".graph .box .body")].map((own) => own.getBoundingClientRect());
  return rects.flatMap((a, i) => rects.slice(i + 1).filter((b) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)).length;
}"""


def test_a_plan_is_drawn_whole_and_no_box_lies_on_another(opened: Open, tmp_path: Path) -> None:
    """The page that `weft plan --html` writes, of equal layers with a skip, whose names are no HTML."""
    evil = "<img src=x onerror=alert(1)>"

    class Skip(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x)

    with torch.device("meta"):
        layers = [Skip(nn.LayerNorm(512), nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)) for _ in range(12)]
        net = nn.Sequential(*layers, nn.Linear(512, 10))
        captured = capture(net, torch.zeros(64, 512), loss=lambda output, batch: output.square().mean())
    plan = plan_captured(captured, "a100", devices=8, stages=2, microbatches=2, compare=False)
    plan = replace(plan, model=evil, graph=replace(plan.graph, name=evil))
    file = write_plan(plan, tmp_path / "plan.html")
    found = plan_document(plan.to_saved(), "plan")["graph"]
    page = opened(file.as_uri())
    assert page.locator("h1").inner_text() == f"{evil} on 8 x A100"
    assert page.locator("h1 img").count() == 0
    assert page.locator(".graph .box").count() == sum(len(column["nodes"]) for column in found["columns"])
    assert page.locator(".graph .line").count() == len(found["edges"])
    assert page.locator(".graph .column").count() == sum(3 if own["times"] > 1 else 1 for own in found["columns"])
    times = [f"x {column['times']}" for column in found["columns"] if column["times"] > 1]
    assert page.locator(".graph .times").all_text_contents() == times
    stages = page.locator(".graph .stage").all_text_contents()
    assert stages == ["stage 1: devices 0 to 3", "stage 2: devices 4 to 7"]
    assert page.evaluate(OVERLAPS) == 0
    legend = page.locator(".figure .key").nth(2).inner_text()
    assert all(own["label"] in legend for own in found["splits"])
    page.locator(".graph .box").last.hover()
    assert "split" in page.locator(".about-box").inner_text()


def test_a_report_opens_from_disk_with_every_view(opened: Open, runs: Path, tmp_path: Path) -> None:
    file = write_report([runs / name for name in ("net", "one", "mixed", "study")], tmp_path / "report.html")
    page = opened(file.as_uri())
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    assert page.locator("#live").inner_text() == "static"
    for route, (titles, heading) in VIEWS.items():
        if not route.startswith("plan"):
            page.evaluate("(route) => { location.hash = `#/${route}`; }", route)
            until(page, f"document.querySelector('h1')?.textContent === '{heading}'")
            wait_for_charts(page, titles)
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def test_names_from_runs_are_text_and_never_markup(opened: Open, serving: Serving, runs: Path, tmp_path: Path) -> None:
    evil = "<img src=x onerror=window.hacked=1>"
    root = tmp_path / "runs"
    run = root / evil
    shutil.copytree(runs / "net", run)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["config"]["data"] = manifest["config"]["supernet"] = evil
    (run / "manifest.json").write_text(json.dumps(manifest))
    front = (run / "results" / "search" / "front.json").read_text()
    (run / "results" / "search" / "front.json").write_text(front.replace('"wide"', json.dumps(evil)))
    write_event(Run.open(run), "failed", at=9, reason=evil)
    with serving(root) as address:
        page = opened(address)
        assert page.locator("[aria-label=runs] tbody th").inner_text() == evil
        for view in ("curves", "pipeline", "search", "config"):
            page.evaluate("(hash) => { location.hash = hash; }", f"#/run/{evil.replace('%', '%25')}/{view}")
            page.wait_for_selector(f"main[data-view={view}]")
            assert evil in page.locator(".problem").first.inner_text()
        assert page.locator("[aria-label=configuration] td", has_text="onerror").count() == 2
        page.evaluate("(hash) => { location.hash = hash; }", f"#/run/{evil}/search")
        page.wait_for_selector("main[data-view=search]")
        for button in page.locator("[aria-label='members of the front'] button.link").all():
            button.click()
            page.wait_for_selector("#panel .chain")
        assert page.locator("main img, #panel img").count() == 0
        assert page.evaluate("window.hacked === undefined")
        page.close()  # before the server it talks to


def test_without_a_trace_the_pipeline_says_how_to_get_one(
    opened: Open, serving: Serving, runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "net", tmp_path / "runs" / "net", ignore=shutil.ignore_patterns("traces"))
    with serving(tmp_path / "runs") as address:
        page = opened(f"{address}#/run/net/pipeline")
        assert "--execution.trace true" in page.locator(".remedy").inner_text()
        wait_for_charts(page, ["Busy share over time"])
        page.close()  # before the server it talks to
