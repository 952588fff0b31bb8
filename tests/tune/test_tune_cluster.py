"""A study on a real Ray cluster of two nodes, of which a worker and a node are lost while it runs."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import objectives
import pytest

import weft
from weft.runs import Events
from weft.tune.executors import StudySpec
from weft.tune.executors.ray import MEMORY, RayExecutor
from weft.tune.jobs import StudyProgress


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("ray")
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as short:  # sockets have short names
        here = str(Path(__file__).parent)
        for name, value in {
            "RAY_TMPDIR": short,
            "RAY_AUTH_MODE": "disabled",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_timeout_ms": "1000",
            "PYTHONPATH": os.pathsep.join([here, *sys.path[:1], os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
        }.items():
            monkeypatch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 2, "resources": {MEMORY: 1024}, "object_store_memory": 80 * 2**20}
        made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        made.weft_second = made.add_node(**node)
        try:
            ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


@pytest.mark.long
def test_a_study_on_two_nodes_survives_the_loss_of_a_worker_and_of_a_node_with_the_same_results(
    cluster: Any, tmp_path: Path
) -> None:
    space = weft.Space()
    space.real("x", 0.0, 1.0)
    space.categorical("what", ["counting", "slow"])
    asked: dict[str, Any] = {
        "trials": 6,
        "minimize": "v",
        "max_concurrent": 4,
        "folder": tmp_path,
        "jobs_per_device": 1,
    }
    asked["enqueue"] = [{"what": "counting"}, {"what": "slow"}, {"what": "slow"}, *[{"what": "counting"}] * 3]
    executor = RayExecutor(StudySpec(objectives.act, ("v",), 0))
    assert [(device.name, device.memory, device.gone) for device in executor.devices] == [("cpu", 2**30, False)] * 2
    assert len({device.node for device in executor.devices}) == 2
    done: list[str] = []

    def disturb(board: StudyProgress) -> None:
        """Once two trials wait on two nodes: kill the process of one, and the node of the other."""
        folder = tmp_path / "ray"
        running = [row for row in board.trials.values() if (folder / "trials" / str(row.number) / "here").exists()]
        if done:
            if all(row.state == "waiting" or row.attempts > 1 for row in running):  # both losses were noticed
                (folder / "go").touch()
            return
        if len({row.places for row in running if row.state == "starting"}) < 2:
            return
        done.append("")
        second = cluster.weft_second.node_id
        for row in running:
            if executor.devices[row.places[0]].node == second:
                cluster.remove_node(cluster.weft_second, allow_graceful=False)
            else:
                os.kill(int((folder / "trials" / str(row.number) / "here").read_text()), signal.SIGKILL)

    found = weft.tune(objectives.act, space, name="ray", executor=executor, callback=disturb, **asked)
    executor.close()
    events = list(Events(tmp_path / "ray" / "events.jsonl").read())
    assert {event["trials"][0] for event in events if event["event"] == "lost"} == {1, 2}
    assert any(event["event"] == "devices" and event["gone"] for event in events)
    local = weft.tune(
        objectives.act,
        space,
        name="local",
        callback=lambda board: (tmp_path / "local" / "go").touch(),
        **asked,
    )
    assert [(one.params, one.state, one.values, one.reports) for one in found.trials] == [
        (one.params, one.state, one.values, one.reports) for one in local.trials
    ]
    assert [one.state for one in found.trials] == ["complete"] * 6
