"""Memory limits: a trial that wants more memory than it may have ends by itself."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import weft
from weft.tune.jobs import Fit
from weft.tune.recipe import Recipe, trial_config
from weft.tune.training.memory_limit import MemoryLimit, OutOfMemory
from weft.tune.training.trainer import train

CPU = torch.device("cpu")


def test_tensors_that_live_count_and_those_that_died_do_not():
    held = torch.zeros(100)  # 400 bytes
    limit = MemoryLimit(CPU, 1400)
    with limit, limit.count_cpu([held]):
        a = torch.zeros(100)
        b = torch.ones(100)
        del a
        c = b + 1
        b.add_(1)
        c.view(10, 10)
        del b, c
    assert limit.peak == 1200


def test_the_operator_that_passes_the_limit_raises_and_says_how_much_was_wanted():
    limit = MemoryLimit(CPU, 1000)
    with limit, limit.count_cpu([]):
        first = torch.zeros(200)
        with pytest.raises(OutOfMemory) as caught:
            first + 1
    assert (caught.value.needed, caught.value.limit) == (1600, 1000)
    assert str(caught.value) == "out of memory: at least 1.6 KiB wanted of 1000 B"
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (copied.needed, copied.limit) == (1600, 1000)


def test_without_a_limit_nothing_is_counted():
    limit = MemoryLimit(CPU, None)
    with limit, limit.count_cpu([]):
        torch.zeros(10**6)
    assert limit.peak is None


@pytest.mark.parametrize(
    ("problem", "needed"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total"), 2 * 2**20),
        (torch.OutOfMemoryError("CUDA out of memory."), 101),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), 101),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), 101),
        (MemoryError(), 101),
        (OutOfMemory(7, 5), 7),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ValueError("out of memory"), None),
    ],
)
def test_failures_of_memory_are_told_from_others(problem, needed):
    found = MemoryLimit(CPU, 100).exceeded(problem)
    assert (None if found is None else found.needed) == needed


def build(params):
    return nn.Sequential(nn.Flatten(), *[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)])


RECIPE = Recipe(model=build, data=weft.data.digits, steps=2, batch_size=256, optimizer="sgd")


def peak(tmp, fit=None, memory=2**40):
    return train(
        trial_config(RECIPE, {}), fit, device="cpu", memory=memory, directory=tmp, report=lambda *_: False
    ).peak


def test_a_trial_fits_into_the_memory_that_it_was_seen_to_take_and_into_no_less(tmp_path):
    taken = peak(tmp_path / "a")
    assert peak(tmp_path / "b", memory=taken) == taken
    with pytest.raises(OutOfMemory) as caught:
        peak(tmp_path / "c", memory=taken - 1)
    assert caught.value.needed == taken
    assert caught.value.__context__ is None  # which would hold the tensors of the failed step


def test_a_trial_that_failed_for_memory_can_be_had_in_smaller_parts(tmp_path):
    taken = peak(tmp_path / "whole")
    small = peak(tmp_path / "small", Fit("accumulate", 32, 8, 1, 0, None, ""), memory=taken // 2)
    again = peak(tmp_path / "again", Fit("recompute", 256, 1, 1, 0, None, ""), memory=taken - 1)
    away = peak(tmp_path / "away", Fit("offload", 256, 1, 1, 0, None, ""), memory=taken - 1)
    assert small < taken
    assert again < taken
    assert away < taken


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 7))
def test_the_peak_is_the_largest_sum_of_what_lived_together(sizes, dropped):
    limit, living, most = MemoryLimit(CPU, 10**9), {}, 0
    with limit, limit.count_cpu([]):
        for number, size in enumerate(sizes):
            living[number] = torch.zeros(size)
            most = max(most, sum(tensor.nbytes for tensor in living.values()))
            if number == dropped:
                living.clear()
    assert limit.peak == most
