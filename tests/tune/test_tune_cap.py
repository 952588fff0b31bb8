"""Memory limits: a trial that wants more memory than it may have ends by itself."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from trials import config_of, fit_of, run

from weft.tune.training.memory_limit import MemoryLimit, OutOfMemory

CPU = torch.device("cpu")


def test_the_operator_that_passes_the_limit_raises_and_says_how_much_was_wanted():
    limit, held = MemoryLimit(CPU, 1000), torch.zeros(50)
    with limit, limit.count_cpu([held]):
        first = torch.zeros(150)
        first.add_(1).view(10, 15)  # takes no memory
        with pytest.raises(OutOfMemory) as caught:
            first + 1
    assert (caught.value.needed, caught.value.limit) == (1400, 1000)
    assert limit.peak == 1400
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (copied.needed, copied.limit) == (1400, 1000)


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


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 7), st.sampled_from([10**9, None]))
def test_the_peak_is_the_largest_sum_of_what_lived_together_where_there_is_a_limit(sizes, dropped, memory):
    limit, living, most = MemoryLimit(CPU, memory), {}, 0
    with limit, limit.count_cpu([]):
        for number, size in enumerate(sizes):
            living[number] = torch.zeros(size)
            most = max(most, sum(tensor.nbytes for tensor in living.values()))
            if number == dropped:
                living.clear()
    assert limit.peak == (None if memory is None else most)


def build(params):
    return nn.Sequential(nn.Flatten(), *[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)])


def peak(folder, memory=2**40, fit=None):
    config = config_of(build, steps=2, batch_size=96, optimizer="sgd", report_every=None)
    return run(config, folder, fit, memory=memory)[0].peak


def test_a_trial_fits_into_the_memory_that_it_was_seen_to_take_and_into_no_less_unless_it_is_cut(tmp_path):
    taken = peak(tmp_path / "a")
    assert peak(tmp_path / "b", taken) == taken
    with pytest.raises(OutOfMemory) as caught:
        peak(tmp_path / "c", taken - 1)
    assert caught.value.needed == taken
    assert caught.value.__context__ is None  # which would hold the tensors of the failed step
    for fit in (fit_of(12, batch=96), fit_of(96, "recompute", 96), fit_of(96, "offload", 96)):
        assert peak(tmp_path / fit.strategy, taken - 1, fit) < taken
