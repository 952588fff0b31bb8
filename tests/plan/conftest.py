"""What all tests of plans share."""

from __future__ import annotations

import torch

# A torch that was built for GPUs and finds none pretends that there is one as soon as fake tensors are made. The first
# backward after that starts autograd's threads for it, and processes that are forked later could run no backward. One
# that comes before any fake tensor settles that there are none.
torch.ones(1, requires_grad=True).sum().backward()
