from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.space import Space
from weft.tune.study.definition import Definition
from weft.tune.study.optuna import parse_spec
from weft.tune.study.pruner import TrialPruner
from weft.tune.study.storage import TrialRecord

MEDIAN = {"name": "median", "n_startup_trials": 3}
ASHA = {"name": "asha", "min_resource": 1, "reduction_factor": 2}
PRUNERS: dict[str, Any] = {
    "median": MEDIAN,
    "asha": ASHA,
    "auto asha": "asha",
    "hyperband": {"name": "hyperband", "min_resource": 1, "max_resource": 4, "reduction_factor": 2},
    "auto hyperband": "hyperband",
    "none": None,
}
SIGNS = {"minimize": 1.0, "maximize": -1.0}


def judge(records: list[TrialRecord], pruner: Any, directions: Any = ("minimize",), window: int = 0) -> TrialPruner:
    sampler = parse_spec("sampler", "random")
    definition = Definition(Space(), directions, 0, window + 1, sampler, parse_spec("pruner", pruner))
    return TrialPruner(definition, records, len(records))


def curves(*trials: list[Any], pruner: Any = None, directions: Any = ("minimize",)) -> list[TrialRecord]:
    """Trials that ended with these reports at steps 1, 2, ..., pruned where the pruner says so."""
    records: list[TrialRecord] = []
    for number, values in enumerate(trials):
        told = [value if isinstance(value, tuple) else (value,) for value in values]
        own, reports, pruned = judge(records, pruner, directions), {}, False
        for step, value in enumerate(told, start=1):
            reports[step] = value
            pruned = own.report(step, value)
            if pruned:
                break
        state = "pruned" if pruned else "complete"
        last = told[len(reports) - 1]
        values_ = last if all(map(math.isfinite, last)) else tuple(0.0 for _ in last)
        records.append(TrialRecord(number, {}, state, values_, reports, pruner_state=own.state))  # type: ignore[arg-type]
    return records


def test_the_median_pruner_ends_what_is_worse_than_the_median_at_its_step() -> None:
    past = curves([5.0, 3.0], [6.0, 4.0], [7.0, 5.0])
    own = judge(past, MEDIAN)
    assert [own.report(1, (6.0,)), own.report(2, (4.1,))] == [False, True]
    own = judge(past, MEDIAN, ("maximize",))
    assert [own.report(1, (6.0,)), own.report(2, (3.9,))] == [False, False]  # its best so far is 6
    assert judge(past, MEDIAN, ("maximize",)).report(1, (5.9,))


def test_asha_lets_the_better_half_of_a_rung_go_on() -> None:
    past = curves([4.0, 4.0], [3.0, 3.0], [9.0], [2.0, 2.0], pruner=ASHA)
    assert [one.state for one in past] == ["complete", "complete", "pruned", "complete"]
    # Of the rung's 4, 3, 9, 2 and a new one, two go on: 3 is the worst of them.
    assert not judge(past, ASHA).report(1, (3.0,))
    assert judge(past, ASHA).report(1, (3.1,))


def test_a_trial_is_pruned_on_several_objectives_only_if_each_would_prune_it() -> None:
    past = curves([(5.0, 0.2)], [(6.0, 0.4)], [(7.0, 0.6)], directions=("minimize", "maximize"))
    told = {(4.0, 0.9): False, (4.0, 0.1): False, (9.0, 0.9): False, (9.0, 0.1): True}
    for values, pruned in told.items():
        assert judge(past, MEDIAN, ("minimize", "maximize")).report(1, values) is pruned


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_a_report_that_is_no_number_is_the_worst(direction: Any) -> None:
    sign = SIGNS[direction]
    past = curves([sign * 1.0], [math.nan], [math.nan], directions=(direction,))
    assert not judge(past, MEDIAN, (direction,)).report(1, (sign * 1e9,))  # two of three are worse
    for pruner in (MEDIAN, ASHA):
        assert judge(curves([1.0], [2.0], [3.0]), pruner, (direction,)).report(1, (math.nan,))
    assert judge([], ASHA, (direction,)).report(1, (math.nan,))  # nor does it win against nobody


values = st.one_of(st.floats(-9, 9), st.sampled_from([math.nan, math.inf, -math.inf]))
trials = st.lists(st.lists(values, min_size=1, max_size=5), min_size=3, max_size=9)


@pytest.mark.parametrize("name", PRUNERS)
@settings(max_examples=12, deadline=None)
@given(trials=trials)
def test_a_judge_that_is_built_anew_decides_alike_and_directions_are_mirror_images(name: str, trials: Any) -> None:
    past = curves(*trials[:-1], pruner=PRUNERS[name])
    own = judge(past, PRUNERS[name])
    for step, value in enumerate(trials[-1]):
        own.report(step, (value,))
    reports = {step: (value,) for step, value in reversed(list(enumerate(trials[-1])))}
    again = judge(past, PRUNERS[name])
    again.replay(reports)
    assert (again.decisions, repr(again.state)) == (own.decisions, repr(own.state))
    turned = curves(*[[-v for v in one] for one in trials[:-1]], pruner=PRUNERS[name], directions=("maximize",))
    assert [(one.state, list(one.reports)) for one in turned] == [(one.state, list(one.reports)) for one in past]
    other = judge(turned, PRUNERS[name], ("maximize",))
    other.replay({s: (-v[0],) for s, v in reports.items()})
    assert other.decisions == own.decisions
    if name == "none":
        assert not any(own.decisions.values())


@pytest.mark.parametrize("name", ["median", "asha"])
def test_reports_within_the_window_and_of_failed_trials_change_no_decision(name: str) -> None:
    past = [replace(one, state="complete") for one in curves([5.0], [6.0], [7.0], [1.0], [1.0], pruner=ASHA)]
    hidden = [replace(one, state="running", values=None, reports={}, pruner_state=()) for one in past[3:]]
    failed = [replace(one, state="failed", values=None) for one in past[3:]]
    for value in (2.0, 5.5, 6.5):
        seen, unseen = (judge(records, PRUNERS[name], window=2) for records in (past, [*past[:3], *hidden]))
        assert seen.report(1, (value,)) == unseen.report(1, (value,))
    assert [judge(past, PRUNERS[name], window=window).report(1, (5.5,)) for window in (0, 2)] == [True, False]
    assert not judge([*past[:3], *failed], PRUNERS[name]).report(1, (5.5,))
