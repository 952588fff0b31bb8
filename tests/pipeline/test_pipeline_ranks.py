"""Which stage a process is, from what torchrun or srun put into its environment."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.distributed.env import DistEnv, _tasks_per_node, read_env
from weft.errors import TrainError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
}
MEETING = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}


def test_torchrun_says_all():
    assert read_env(TORCHRUN) == DistEnv(5, 8, 1, 4, 2, socket.gethostname())


def test_a_process_that_nobody_started_has_no_ranks():
    assert read_env({"PATH": "/bin"}) is None


def test_a_task_of_srun_is_a_stage():
    assert read_env(SRUN | MEETING) == DistEnv(3, 5, 1, 2, 0, socket.gethostname())


def test_three_variables_of_slurm_are_enough_on_one_machine():
    said = {"SLURM_PROCID": "1", "SLURM_NTASKS": "3", "SLURM_LOCALID": "1"}
    assert read_env(said | MEETING) == DistEnv(1, 3, 1, 3, 0, socket.gethostname())


def test_torchrun_under_slurm_is_believed_before_slurm():
    found = read_env(SRUN | TORCHRUN)
    assert found is not None
    assert (found.rank, found.world) == (5, 8)


def test_a_step_smaller_than_its_job_counts_its_own_tasks():
    found = read_env(SRUN | MEETING | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"})
    assert found is not None
    assert (found.world, found.local_world) == (4, 2)


@pytest.mark.parametrize("change", [{"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, {"SLURM_STEP_ID": None}])
def test_a_single_task_and_the_shell_of_a_batch_script_are_no_stage(change):
    said = {name: text for name, text in (SRUN | change).items() if text is not None}
    assert read_env(said) is None


@pytest.mark.parametrize(
    ("given", "absent"),
    [
        ({}, "MASTER_ADDR and MASTER_PORT"),
        ({"MASTER_ADDR": "node7"}, "MASTER_PORT"),
        ({"MASTER_PORT": "1"}, "MASTER_ADDR"),
    ],
)
def test_srun_without_a_meeting_point_says_what_is_missing(given, absent):
    with pytest.raises(TrainError, match=f"also need {absent} to find one another: export"):
        read_env(SRUN | given)


@pytest.mark.parametrize("change", [{"RANK": "x"}, {"RANK": "8"}, {"LOCAL_RANK": "4"}, {"WORLD_SIZE": "-1"}])
def test_ranks_that_cannot_be_are_refused(change):
    with pytest.raises(TrainError, match=r"must be a whole number|cannot be rank"):
        read_env(TORCHRUN | change)


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 5)), min_size=1))
def test_the_short_form_of_slurm_is_read_back(runs):
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert _tasks_per_node(text) == [count for count, times in runs for _ in range(times)]
