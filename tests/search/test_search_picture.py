"""The picture of a gradient search: what its areas show, that it is XML whatever the names, and how it is written."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.search.gradient.picture import CHART, HEIGHT, LABELS, PANELS, POINTS, WINDOW, course, draw, write_picture

SVG = "{http://www.w3.org/2000/svg}"


def step(number: int, *vector: Any) -> dict[str, Any]:
    return {"event": "step", "step": number, "mixture": list(vector), "loss": 1.0}


def areas(picture: str) -> list[list[tuple[float, float]]]:
    """The corners of every area, in the order of the picture."""
    paths = [str(path.get("d")) for path in ET.fromstring(picture).iter(f"{SVG}path")]
    return [
        [(float(x), float(y)) for x, y in (corner.split() for corner in path[1:-1].split("L"))]
        for path in paths
        if path
    ]


def words(picture: str) -> list[str]:
    return ["".join(text.itertext()) for text in ET.fromstring(picture).iter(f"{SVG}text")]


def test_two_steps_of_one_choice_are_two_areas_with_these_corners() -> None:
    at, probabilities = course([step(0, 0.5, 0.5), step(1, 0.25, 0.75)], 2, 2)
    assert at.tolist() == [0.0, 1.0]
    assert probabilities.tolist() == [[0.5, 0.5], [0.25, 0.75]]
    picture = draw(at, probabilities, 2, {"width": (8, 16)}, {"width": [0.2, 0.8]})
    full, half, quarter = HEIGHT, HEIGHT / 2, HEIGHT * 3 / 4
    assert areas(picture) == [
        [(0, full), (CHART, full), (CHART, quarter), (0, half)],  # 8, from the bottom up to its probability
        [(0, half), (CHART, quarter), (CHART, 0), (0, 0)],  # 16, on top of it
    ]
    assert words(picture)[-3:] == ["width", "80%16", "20%8"]
    titles = [str(title.text) for title in ET.fromstring(picture).iter(f"{SVG}title")]
    assert titles == ["width = 8: 20.0% at the end", "width = 16: 80.0% at the end"]


def test_a_long_run_is_thinned_to_means_over_a_part_of_it() -> None:
    steps = 2000
    # An option that is drawn, or not, by turns: its probability is a half all the time.
    at, probabilities = course((step(i, i % 2, 1 - i % 2) for i in range(steps)), steps, 2)
    assert len(at) == POINTS
    assert at[0] == 7.5
    np.testing.assert_allclose(probabilities, 0.5, atol=1e-12)
    # One that settles in the middle: far from there nothing is smeared.
    at, probabilities = course((step(i, float(i >= 1000), float(i < 1000)) for i in range(steps)), steps, 2)
    far = np.abs(at - 1000) > steps / WINDOW
    np.testing.assert_array_equal(probabilities[far, 0], (at >= 1000)[far])
    assert np.all(np.diff(probabilities[:, 0]) >= 0)


@given(data=st.data(), steps=st.integers(1, 600), kept=st.floats(0.05, 1))
@settings(max_examples=50, deadline=None)
def test_every_point_is_the_mean_of_the_steps_around_it_in_whatever_order_they_come(
    data: st.DataObject, steps: int, kept: float
) -> None:
    rng = np.random.default_rng(steps)
    rows = rng.dirichlet([1.0, 1.0, 1.0], steps)
    chosen = [i for i in range(steps) if rng.random() < kept] or [0]
    events = [step(i, *rows[i]) for i in data.draw(st.permutations(chosen))]
    at, probabilities = course(events, steps, 3)
    assert len(at) == len(probabilities) <= min(POINTS, steps)
    assert np.all(np.diff(at) > 0)
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-9)
    bins = min(POINTS, steps)
    groups = [group for group in ([i for i in chosen if i * bins // steps == b] for b in range(bins)) if group]
    reach = bins // (2 * WINDOW)
    for index, group in enumerate(groups):  # written out from the words: no sums are kept
        around = [i for other in groups[max(0, index - reach) : index + reach + 1] for i in other]
        assert at[index] == pytest.approx(sum(group) / len(group))
        np.testing.assert_allclose(probabilities[index], np.mean([rows[i] for i in around], 0), atol=1e-9)


def test_events_without_the_right_numbers_are_left_out() -> None:
    good = step(3, 0.25, 0.75)
    others = [
        {"event": "started", "at": 0},
        {"event": "step", "step": 0, "loss": 1.0},
        step(1, 1.0),
        step(2, "nan", 1.0),
        {**step(4), "mixture": "0.5 0.5"},
        step(99, 0.5, 0.5),
        {"event": "validation", "step": 2, "mixture": [0.5, 0.5]},
    ]
    at, probabilities = course([*others, good, *others], 10, 2)
    assert (at.tolist(), probabilities.tolist()) == ([3.0], [[0.25, 0.75]])
    lone = areas(draw(at, probabilities, 10, {"a": (1, 2)}, {"a": [0.25, 0.75]}))
    assert lone[0] == [(0, HEIGHT), (CHART, HEIGHT), (CHART, 0.75 * HEIGHT), (0, 0.75 * HEIGHT)]  # a band
    at, probabilities = course(others, 10, 2)
    assert (at.shape, probabilities.shape) == ((0,), (0, 2))
    assert areas(draw(at, probabilities, 10, {"a": (1, 2)}, {"a": [0.25, 0.75]})) == []


names = st.text(min_size=1, max_size=60).filter(lambda text: text.strip())


@given(
    options=st.dictionaries(names, st.lists(st.one_of(names, st.integers(), st.floats()), min_size=1, max_size=9)),
    points=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_whatever_choices_are_called_it_is_xml_in_which_they_stand(options: dict[str, list[Any]], points: int) -> None:
    size = sum(map(len, options.values()))
    rng = np.random.default_rng(points)
    parts = [rng.dirichlet(np.ones(len(several)), points) for several in options.values()]
    vectors = np.concatenate(parts, 1) if parts else np.zeros((points, size))
    last = {name: [1 / len(several)] * len(several) for name, several in options.items()}
    picture = draw(np.arange(points), vectors, max(points, 1), options, last)
    real = {name: several for name, several in options.items() if len(several) > 1}
    root = ET.fromstring(picture)
    assert len(list(root.iter(f"{SVG}g"))) == min(len(real), PANELS)
    printable = [re.sub(r"\s", " ", "".join(c if c.isprintable() else " " for c in name)) for name in real]
    told = [re.sub(r"\s", " ", str(title.text)) for title in root.iter(f"{SVG}title")]
    assert len(told) == sum(len(several) for several in list(real.values())[:PANELS])
    for name in printable[:PANELS]:
        assert any(one.startswith(f"{name} = ") for one in told)
    drawn = areas(picture)
    assert len(drawn) == (len(told) if points else 0)
    assert all(0 <= x <= CHART and 0 <= y <= HEIGHT for corners in drawn for x, y in corners)


def test_of_many_choices_the_first_are_drawn_and_the_rest_are_counted() -> None:
    options = {f"choice{i}": (1, 2) for i in range(PANELS + 7)} | {"depth": (3,)}
    size = 2 * (PANELS + 7) + 1
    last = {name: [1 / len(several)] * len(several) for name, several in options.items()}
    picture = draw(np.zeros(1), np.full((1, size), 0.5), 1, options, last)
    shown = [text for text in words(picture) if text.startswith("choice")]
    assert shown == [f"choice{i}" for i in range(PANELS)]
    assert words(picture)[-1] == "and 7 more choices: see mixture.json"
    root = ET.fromstring(picture)
    bottom = max(float(str(text.get("y"))) for text in root.iter(f"{SVG}text"))
    assert bottom < float(str(root.get("height")))


def test_of_many_options_the_likeliest_are_named_and_the_rest_are_counted() -> None:
    last = [0.01, 0.3, 0.02, 0.2, 0.03, 0.15, 0.04, 0.25]
    picture = draw(np.zeros(1), np.array([last]), 1, {"op": "abcdefgh"}, {"op": last})
    assert words(picture)[-LABELS:] == ["25%h", "4%g", "15%f", "20%d", "30%b", "3 more"]
    assert len(areas(picture)) == 8


def test_the_areas_of_a_choice_lie_on_each_other_and_fill_the_panel() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.dirichlet([1.0] * 4, 50)
    drawn = areas(draw(np.arange(50.0), vectors, 50, {"op": "abcd"}, {"op": vectors[-1].tolist()}))
    for index, corners in enumerate(drawn):
        low, high = corners[:50], corners[:49:-1]
        assert [x for x, _ in low] == [x for x, _ in high]
        below = HEIGHT * (1 - vectors[:, :index].sum(1))
        np.testing.assert_allclose([y for _, y in low], below, atol=0.051)
        np.testing.assert_allclose([y for _, y in high], below - HEIGHT * vectors[:, index], atol=0.051)
    assert [y for _, y in drawn[-1][:49:-1]] == [0.0] * 50


def test_light_and_dark_are_told_by_the_reader_and_nothing_is_fetched() -> None:
    picture = draw(np.zeros(1), np.full((1, 2), 0.5), 1, {"a": (1, 2)}, {"a": [0.5, 0.5]})
    assert "@media (prefers-color-scheme: dark)" in picture
    assert re.findall(r"(?:https?:)?//[^\"' <]+", picture) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"<(script|image|use|foreignObject)\b|@import|url\(", picture)


def test_the_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "probabilities.svg"
    path.write_text("old")
    events = [step(i, 0.5, 0.5) for i in range(3)]
    write_picture(path, events, 3, {"a": (1, 2)}, {"a": [0.5, 0.5]})
    first = path.read_bytes()
    write_picture(path, iter(reversed(events)), 3, {"a": (1, 2)}, {"a": [0.5, 0.5]})
    assert path.read_bytes() == first
    assert ET.fromstring(first.decode()).tag == f"{SVG}svg"
    assert [file.name for file in tmp_path.iterdir()] == ["probabilities.svg"]


def test_colours_of_neighbours_differ() -> None:
    for count in (2, 3, 8, 20):
        vectors = np.full((1, count), 1 / count)
        options = {"op": list(range(count))}
        picture = draw(np.zeros(1), vectors, 1, options, {"op": vectors[0].tolist()})
        fills = re.findall(r'class="area" fill="#(\w{2})(\w{2})(\w{2})"', picture)
        assert len(fills) == count
        colours = [[int(part, 16) for part in fill] for fill in fills]
        assert min(math.dist(a, b) for a, b in pairwise(colours)) > 10
