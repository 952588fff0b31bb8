"""The search loop and its cache: budgets, constraints, crashes and resumption."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import SearchError
from weft.search.front import Scored
from weft.search.loop import Cache, SearchResult, run_search
from weft.search.methods import METHODS
from weft.search.objectives import parse_objectives
from weft.space import Space, Subnet

GOALS = parse_objectives("good", "cost")


def make_space(blocks: int = 5) -> Space:
    space = Space()
    for i in range(blocks):
        space.categorical(f"block{i}", [0, 1, 2])
    return space


def score(subnet: Subnet) -> dict[str, float]:
    levels = [int(value) for value in subnet.values.values()]
    return {"good": math.sqrt(sum(level * (i + 1) for i, level in enumerate(levels))) / 3, "cost": float(sum(levels))}


def cost(subnet: Subnet) -> dict[str, float]:
    return {"cost": score(subnet)["cost"]}


class Counted:
    """Scores, remembers whom, and may break off after some."""

    def __init__(self, *metrics: str, stop: int | None = None) -> None:
        self.seen: list[Subnet] = []
        self.metrics, self.stop = metrics or ("good", "cost"), stop

    def __call__(self, subnet: Subnet) -> dict[str, float]:
        if self.stop is not None and len(self.seen) >= self.stop:
            raise KeyboardInterrupt
        self.seen.append(subnet)
        return {name: score(subnet)[name] for name in self.metrics}


def same(a: SearchResult, b: SearchResult) -> bool:
    return a.scored == b.scored and list(a.front) == list(b.front)


@pytest.mark.parametrize("name", METHODS)
def test_the_budget_counts_distinct_subnets_and_a_larger_one_extends_a_smaller(name: str) -> None:
    counted = Counted()
    result = run_search(make_space(), counted, name, GOALS, budget=70, seed=0)
    assert len(counted.seen) == len(set(counted.seen)) == len(result.scored) == result.evaluations == 70
    assert [one.subnet for one in result.scored] == counted.seen
    assert (result.cache_hits, result.skipped) == (0, 0)
    smaller = run_search(make_space(), score, name, GOALS, budget=45, seed=0)
    assert result.scored[:45] == smaller.scored


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("stop", "rule"), [(0, ()), (32, ()), (50, ()), (17, "cost<=4")])
def test_a_search_that_was_killed_continues_as_if_it_never_stopped(
    name: str, stop: int, rule: str, tmp_path: Path
) -> None:
    def search(counted: Counted, cache: Cache | None = None) -> SearchResult:
        cheap = cost if rule else None
        return run_search(make_space(), counted, name, GOALS, rule, budget=60, seed=7, cache=cache, cheap=cheap)

    first, second, undisturbed = Counted(stop=stop), Counted(), search(Counted())
    with pytest.raises(KeyboardInterrupt):
        search(first, Cache(tmp_path / "scores", "weights 1"))
    resumed = search(second, Cache(tmp_path / "scores", "weights 1"))
    assert same(resumed, undisturbed)
    assert first.seen + second.seen == [one.subnet for one in undisturbed.scored]  # nobody is scored twice
    assert (resumed.cache_hits, resumed.evaluations) == (stop, 60 - stop)


DYING = """
import os, sys
from weft.search import Cache, parse_objectives, run_search
from weft.space import Space

space = Space()
for i in range(5):
    space.categorical(f"block{i}", [0, 1, 2])
left = 37

def score(subnet):
    global left
    left -= 1
    if left < 0:
        os._exit(9)
    return {"good": sum(subnet.values.values()) / 3}

run_search(space, score, "evolution", parse_objectives("good"), budget=60, seed=2, cache=Cache(sys.argv[1]))
"""


def test_scores_outlive_a_process_that_dies_without_a_word(tmp_path: Path) -> None:
    died = subprocess.run([sys.executable, "-c", DYING, str(tmp_path / "scores")], check=False)
    assert died.returncode == 9

    def search(cache: Cache | None) -> SearchResult:
        return run_search(
            make_space(), lambda s: {"good": sum(int(v) for v in s.values.values()) / 3}, "evolution", GOALS[:1],
            budget=60, seed=2, cache=cache,
        )  # fmt: skip

    resumed = search(Cache(tmp_path / "scores"))
    assert (resumed.cache_hits, resumed.evaluations) == (37, 23)
    assert same(resumed, search(None))


def test_scores_of_another_context_are_not_used(tmp_path: Path) -> None:
    space = make_space()
    for context in ("weights 1", {"weights": "2", "data": "test"}):
        result = run_search(space, score, "random", GOALS, budget=9, cache=Cache(tmp_path / "s", context))
        assert result.evaluations == 9
    again = Cache(tmp_path / "s", {"data": "test", "weights": "2"})
    assert len(again) == 9


def test_cached_scores_that_lack_a_metric_are_scored_again(tmp_path: Path) -> None:
    space, path = make_space(), tmp_path / "scores"
    run_search(space, lambda s: {"good": 1.0}, "random", GOALS[:1], budget=5, cache=Cache(path))
    assert run_search(space, score, "random", GOALS, budget=5, cache=Cache(path)).evaluations == 5
    assert run_search(space, score, "random", GOALS, budget=5, cache=Cache(path)).cache_hits == 5


def test_a_file_of_scores_tells_values_and_costs_once_they_are_known(tmp_path: Path) -> None:
    space, path = make_space(), tmp_path / "scores"
    lines = lambda: [json.loads(line) for line in path.read_text().splitlines()]  # noqa: E731
    run_search(space, score, "random", GOALS, budget=5, cache=Cache(path))
    assert [space.subnet(line["values"]).id for line in lines()] == [line["subnet"] for line in lines()]
    assert not any("costs" in line for line in lines())
    for _ in range(2):  # the second time there is nothing more to tell
        cheap = run_search(space, score, "random", GOALS, budget=5, cache=Cache(path), cheap=lambda s: {"flops": 7.0})
        assert (cheap.evaluations, cheap.cache_hits) == (0, 5)
        assert len(lines()) == 10
    assert [line["costs"] for line in lines()[5:]] == [{"flops": 7.0}] * 5
    assert [line["scores"] for line in lines()[5:]] == [line["scores"] for line in lines()[:5]]
    old = [{name: line[name] for name in ("subnet", "context", "scores")} for line in lines()[:5]]
    path.write_text("".join(json.dumps(line) + "\n" for line in old))
    run_search(space, score, "random", GOALS, budget=5, cache=Cache(path))  # what an older weft wrote is told anew
    assert ["values" in line for line in lines()] == [False] * 5 + [True] * 5


@settings(deadline=None, max_examples=25)
@given(cut=st.integers(0, 400))
def test_a_cache_cut_anywhere_keeps_its_whole_lines_and_can_be_written_on(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cache") / "scores.jsonl"
    subnets = list(make_space().enumerate())[:5]
    cache = Cache(path)
    for i, subnet in enumerate(subnets):
        cache.put(subnet, {"good": i / 3, "odd": math.inf})
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    kept = whole[:cut].count(b"\n")
    cut_short = Cache(path)
    assert [cut_short.get(s) is not None for s in subnets] == [i < kept for i in range(5)]
    for i, subnet in enumerate(subnets[kept:], start=kept):
        cut_short.put(subnet, {"good": i / 3, "odd": math.inf})
    assert path.read_bytes() == whole
    assert [Cache(path).get(s) for s in subnets] == [{"good": i / 3, "odd": math.inf} for i in range(5)]


def test_damage_in_the_middle_of_a_cache_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "scores"
    cache = Cache(path)
    for subnet in list(make_space().enumerate())[:3]:
        cache.put(subnet, {"good": 1.0})
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:20], lines[2]]) + "\n")
    with pytest.raises(SearchError, match="line 2"):
        Cache(path)


@pytest.mark.parametrize("name", METHODS)
def test_the_feasible_part_of_a_small_space_is_found_whole_and_nothing_else_is_scored(name: str) -> None:
    space = make_space(blocks=4)
    counted = Counted("good")
    result = run_search(space, counted, name, GOALS, "cost<=1", budget=40, seed=0, cheap=cost)
    assert {*counted.seen} == {s for s in space.enumerate() if score(s)["cost"] <= 1}
    assert [(one.subnet, one.scores) for one in result.scored] == [(s, score(s)) for s in counted.seen]
    assert (result.evaluations, result.skipped) == (5, 81 - 5)


@pytest.mark.parametrize("name", METHODS)
def test_a_bound_that_no_subnet_meets_is_answered_with_the_range_seen(name: str) -> None:
    with pytest.raises(SearchError, match=r"none of \d+ subnets drawn has cost < -1; cost was 0 to 6"):
        run_search(make_space(3), score, name, GOALS, "cost<-1", budget=9, cheap=cost)


def test_the_draws_without_anything_to_score_are_limited() -> None:
    drawn: list[Subnet] = []

    def cheap(subnet: Subnet) -> dict[str, float]:
        drawn.append(subnet)
        return {"cost": 1.0}

    with pytest.raises(SearchError, match="none of 96 subnets"):
        run_search(make_space(), score, "random", GOALS, "cost<=0", budget=9, cheap=cheap, draws=90)
    assert len(drawn) == 96  # whole batches of 32


def test_a_method_that_repeats_itself_ends_and_is_told_the_known_scores() -> None:
    only = next(iter(make_space().enumerate()))
    told: list[list[Scored]] = []

    class Stubborn:
        def ask(self) -> list[Subnet]:
            return [only]

        def tell(self, scored: list[Scored]) -> None:
            told.append(scored)

    result = run_search(make_space(), score, Stubborn(), GOALS, budget=9, draws=20)  # type: ignore[arg-type]
    assert [one.subnet for one in result.scored] == [only]
    assert told == [[Scored(only, score(only))]] * 21


@pytest.mark.parametrize("name", METHODS)
def test_without_a_feasible_subnet_the_front_is_empty(name: str) -> None:
    broken = run_search(make_space(), score, name, GOALS, "good>=1000", budget=40, seed=0)
    not_numbers = run_search(make_space(), lambda s: {"good": math.nan, "cost": 1.0}, name, GOALS, budget=40, seed=0)
    for result in (broken, not_numbers):
        assert (len(result.scored), len(result.front)) == (40, 0)


def test_each_score_is_reported_with_whether_it_was_known(tmp_path: Path) -> None:
    calls: list[tuple[Subnet, bool]] = []
    for _ in range(2):
        result = run_search(
            make_space(), score, "random", GOALS, budget=4, cache=Cache(tmp_path / "s"),
            on_score=lambda one, cached: calls.append((one.subnet, cached)),
        )  # fmt: skip
    expected = [one.subnet for one in result.scored]
    assert calls == [(s, False) for s in expected] + [(s, True) for s in expected]


def test_a_score_without_an_objective_and_a_budget_of_none_are_refused() -> None:
    with pytest.raises(SearchError, match="'cost'"):
        run_search(make_space(), lambda s: {"good": 1.0}, "random", GOALS, budget=3)
    with pytest.raises(SearchError, match="not 0"):
        run_search(make_space(), score, "random", GOALS, budget=0)
