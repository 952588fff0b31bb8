"""weft simulate: rows by number of stages, and advice that would work."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from command_line import weft
from torch import nn

from weft.cli.simulate import better_cut, simulate_run
from weft.data import digits
from weft.engine.consistency import Consistency, Lagged
from weft.engine.optimizer import Optimizer
from weft.pipeline.scheduler import SchedulePolicy
from weft.pipeline.simulator import simulate
from weft.pipeline.workload import chain_workload
from weft.space import make_stream
from weft.supernet import Chain, Shared, initialise
from weft.supernet.partition import Cut, best_cut
from weft.trainer.config import TrainConfig
from weft.zoo import digits_conv

BASE = TrainConfig(steps=60, batch_size=32, stream="iid", optimizer=Optimizer("sgd", lr=0.1))
FILLED = replace(BASE, stream="spaced", consistency={"shared": "lagged(8)"})


def simulated(config: TrainConfig, *stages: int, net: Any = digits_conv, **options: Any) -> dict[str, Any]:
    return simulate_run(net, digits(), config, stages, costs="equal", **options)


def test_advice_names_changes_that_shorten_the_wait() -> None:
    found = simulated(BASE, 1, 4, 99)
    one, four, too_many = found["rows"]
    assert one["bubble"] == 0
    assert four["steady_bubble"] > 0.5
    assert "use 1 to 9 stages" in too_many["note"]
    assert all(row["speedup"] > four["speedup"] for row in found["advice"])
    speedups = [row["speedup"] for row in found["advice"]]
    assert speedups == sorted(speedups, reverse=True)
    # No change makes the work of a step another one.
    for row in found["advice"]:
        assert row["time_per_step"] * row["speedup"] == pytest.approx(four["time_per_step"] * four["speedup"])
    # Each change alone is in the list, and all of them together are best.
    assert found["advice"][0]["change"] == "stream = spaced, consistency.shared = lagged(8), microbatches = 4"
    changed = replace(FILLED, microbatches=4)
    again = simulated(changed, 4)
    assert again["rows"][0]["steady_bubble"] == pytest.approx(found["advice"][0]["steady_bubble"])


def test_another_cut_is_advised_where_a_stage_is_slow() -> None:
    found = simulated(FILLED, 2, slow={0: 0.25})
    assert found["rows"][0]["cut"] == [4]
    cut = next(row for row in found["advice"] if row["change"].startswith("cut"))
    assert cut["cut"] == [2]  # 2 blocks at a quarter of the speed, 7 at full: 24 and 21 a step
    assert cut["change"] == "cut = 2"
    assert cut["time_per_step"] == pytest.approx(24, rel=0.05)
    even = simulated(FILLED, 2)
    assert not [row for row in even["advice"] if row["change"].startswith("cut")]


@pytest.mark.parametrize("slow", [{0: 0.3}, {1: 0.5}, {0: 0.5, 2: 0.2}])
def test_the_advised_cut_is_as_good_as_the_best_of_all(slow: dict[int, float]) -> None:
    chain = initialise(digits_conv)
    promised: dict[str, Consistency] = {name: Lagged(8) for name in chain.layers}
    work = chain_workload(chain, make_stream(chain.space, "spaced", 0), promised, 1, 60)
    speeds = [slow.get(stage, 1.0) for stage in range(3)]

    def speedup(cut: Cut) -> float:
        return simulate(work, cut, SchedulePolicy(6), speeds=speeds, keep_spans=False).speedup

    found = better_cut(best_cut(work.expected_costs(), 3), work.blocks, speedup)
    assert speedup(found) == max(speedup(cut) for cut in combinations(range(1, work.blocks), 2))


def test_a_wider_window_is_advised_where_a_narrow_one_makes_stages_wait() -> None:
    found = simulated(FILLED, 3, max_in_flight=1)
    wider = next(row for row in found["advice"] if row["change"] == "max_in_flight = 4")
    again = simulated(FILLED, 3, max_in_flight=4)
    assert again["rows"][0]["speedup"] == wider["speedup"] > 1.05 * found["rows"][0]["speedup"]


def plain() -> Chain:
    """One network of eight blocks that cost the same: nothing to choose."""
    first = Shared(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 16)), "in")
    layers = [Shared(lambda: nn.Linear(16, 16), f"layer{k}") for k in range(6)]
    return Chain(first, *layers, Shared(lambda: nn.Linear(16, 10), "out"))


STEPS = TrainConfig(steps=40, batch_size=32, microbatches=4)


def test_windows_are_those_that_a_run_would_have() -> None:
    def windows(consistency: str, stages: int) -> tuple[int, int]:
        row = simulated(replace(STEPS, consistency=consistency), stages, net=plain)["rows"][0]
        return row["max_in_flight"], row["peak_in_flight"]

    assert windows("bounded(4, 4)", 4) == (4, 4)  # one copy of the weights, and a place for every stage behind
    assert windows("stashed(4, 4)", 4)[0] == windows("bounded(4, 4)", 2)[0] * 2 == 32
    assert windows("exact", 4) == (32, 4)  # those of a step, after which it waits


def test_a_single_network_that_waits_for_itself_is_advised_not_to() -> None:
    found = simulated(STEPS, 4, net=plain)
    assert found["rows"][0]["steady_bubble"] > 0.3
    row = next(row for row in found["advice"] if row["change"] == "consistency = bounded(4, 4)")
    changed = replace(STEPS, consistency="bounded(4, 4)")
    again = simulated(changed, 4, net=plain)["rows"][0]
    assert again == {name: value for name, value in row.items() if name != "change"}
    assert row["speedup"] > 1.5 * found["rows"][0]["speedup"]
    # K is a multiple of the micro-batches of a step, and no smaller than what keeps the drift at one update.
    eight = simulated(STEPS, 8, net=plain)["advice"]
    assert "consistency = bounded(8, 8)" in [row["change"] for row in eight]
    assert simulated(changed, 4, 2, net=plain)["advice"] == []
    supernet = simulated(BASE, 4)["advice"]
    assert supernet
    assert not [row for row in supernet if "bounded" in row["change"]]


def test_the_verb_prints_a_table_and_json(tmp_path: Path) -> None:
    config = 'supernet = "digits-mlp"\n[train]\nsteps = 40\nbatch_size = 32\nstream = "iid"\n'
    (tmp_path / "c.toml").write_text(config)
    run = partial(weft, "simulate", "c.toml", cwd=tmp_path)
    assert [row["stages"] for row in run("--stages", "1,2", "--json", "--costs", "equal").json["rows"]] == [1, 2]
    assert "what would help on 2 stages" in run("--stages", "2", "--jitter", "0.2", "--latency", "0.001").out
    slow = run("--stages", "2", "--costs", "equal", "--bandwidth", "1e3", "--slow", "1:0.5", "--json").json
    assert slow["rows"][0]["time_per_step"] > 8
    assert "such as 1,2,4" in run("--stages", "two").error
    assert "such as 3:0.5" in run("--slow", "1-2").error
    assert "numbered from 0 to 1" in run("--stages", "2", "--slow", "2:0.5").error
    assert "more than 0" in run("--bandwidth", "0").error
    assert "did you mean 'equal'" in run("--costs", "equl").error
    assert not (tmp_path / "runs").exists()
