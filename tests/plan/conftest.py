"""What all tests of plans share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

# A torch that was built for GPUs and finds none pretends that there is one as soon as fake tensors are made. The first
# backward after that starts autograd's threads for it, and processes that are forked later could run no backward. One
# that comes before any fake tensor settles that there are none.
torch.ones(1, requires_grad=True).sum().backward()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
