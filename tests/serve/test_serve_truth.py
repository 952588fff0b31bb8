"""Kendall's tau beside published tables, by hand and with the tables themselves."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.search.objective import Objective
from weft.serve.search.shares import Point
from weft.serve.search.truth import tau
from weft.zoo import macro_key, nas_bench_201, nas_bench_macro, nb201_key
from weft.zoo.macro import CANDIDATES
from weft.zoo.nb201 import NB201_OPERATIONS

ACCURACY = Objective("accuracy", True)


def macro(key: str, score: float) -> Point:
    return Point(key, {"accuracy": score}, {f"layer{at}": CANDIDATES[int(digit)] for at, digit in enumerate(key)})


TRUTH = {"00000000": 50.0, "11111111": 60.0, "22222222": 70.0, "01201201": 65.0}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data"
    (folder / "nas-bench-macro").mkdir(parents=True)
    written = {key: {"mean_acc": value, "test_acc": []} for key, value in TRUTH.items()}
    (folder / "nas-bench-macro" / "nas-bench-macro_cifar10.json").write_text(json.dumps(written))
    monkeypatch.setenv("WEFT_DATA", str(folder))
    return folder


def test_tau_of_four_by_hand(table: Path) -> None:
    points = [macro("00000000", 0.1), macro("11111111", 0.3), macro("22222222", 0.4), macro("01201201", 0.2)]
    # Of six pairs one disagrees: 65 is above 60, and its score below.
    assert tau(points, ACCURACY, {}) == {"value": round(4 / 6, 4), "pairs": 6, "truth": "nas-bench-macro"}
    worse = Objective("accuracy", False)
    assert tau(points, worse, {}) == {"value": round(-4 / 6, 4), "pairs": 6, "truth": "nas-bench-macro"}


def test_subnets_that_cannot_be_compared_are_left_out(table: Path) -> None:
    more = [macro("12121212", 0.5), macro("11111111", float("nan")), Point("x", {"accuracy": 1.0}), Point("y", {}, {})]
    assert tau([macro("00000000", 0.1), macro("22222222", 0.4), *more], ACCURACY, {}) == {
        "value": 1.0,
        "pairs": 1,
        "truth": "nas-bench-macro",
    }
    assert tau([macro("00000000", 0.1)], ACCURACY, {}) is None
    assert tau([macro("00000000", 0.1), macro("22222222", 0.1)], ACCURACY, {}) is None  # all alike: no order
    assert tau([], ACCURACY, {}) is None


def test_another_space_or_no_table_has_no_tau(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [macro("00000000", 0.1), macro("22222222", 0.4)]
    other = [Point(one.id, one.scores, {**(one.values or {}), "layer8": "k3e3"}) for one in points]
    assert tau(other, ACCURACY, {}) is None
    monkeypatch.delenv("WEFT_DATA")
    assert tau(points, ACCURACY, {}) is None
    # Beside the folder of the run's data it is found all the same.
    beside = {"config": {"folder": str(table.parent), "data": {"path": "data/images/x.npz"}}}
    assert tau(points, ACCURACY, beside) is not None


def test_a_damaged_table_is_no_table(table: Path) -> None:
    points = [macro("00000000", 0.1), macro("22222222", 0.4)]
    file = table / "nas-bench-macro" / "nas-bench-macro_cifar10.json"
    for at, content in enumerate((b"{", b"[]", b'{"00000000": 3}', b"\xff")):
        file.write_bytes(content)
        os.utime(file, ns=(at, at))
        assert tau(points, ACCURACY, {}) is None


def test_nas_bench_201_is_read_as_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = "arch," + ",".join(f"cifar10_val_acc_s{seed}" for seed in range(3))
    rows = ["000000,10,20,30", "333333,90,92,", "012340,50,50,50"]
    (tmp_path / "nas-bench-201").mkdir()
    file = tmp_path / "nas-bench-201" / "nasbench201.csv.gz"
    file.write_bytes(gzip.compress("\n".join([head, *rows]).encode()))
    monkeypatch.setenv("WEFT_DATA", str(tmp_path))
    edges = ("edge01", "edge02", "edge12", "edge03", "edge13", "edge23")
    scores = {"000000": 0.1, "333333": 0.9, "012340": 0.5}
    points = [
        Point(key, {"accuracy": score}, {edge: NB201_OPERATIONS[int(d)] for edge, d in zip(edges, key, strict=True)})
        for key, score in scores.items()
    ]
    assert tau(points, ACCURACY, {}) == {"value": 1.0, "pairs": 3, "truth": "nas-bench-201"}


def test_keys_are_those_of_the_zoo(require: Callable[[str, bool, str], None]) -> None:
    from weft.keys import generator
    from weft.serve.search.truth import _tables

    rng = generator("truth")
    for table, chain, key in zip(_tables(), (nas_bench_macro(), nas_bench_201()), (macro_key, nb201_key), strict=True):
        for _ in range(20):
            subnet = chain.space.sample(rng)
            assert table.key(subnet.values) == key(subnet)
    folder = Path(os.environ.get("WEFT_DATA", "absent"))
    require("data", (folder / "nas-bench-macro").is_dir(), "set WEFT_DATA to the folder with the published tables")
    for table in _tables():
        truth = table.read((folder / table.file).read_bytes())
        assert len(truth) == len(table.digits) ** len(table.choices)
