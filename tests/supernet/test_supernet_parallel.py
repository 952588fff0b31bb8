"""Data parallelism by torch's own DDP: every parameter of a mixed supernet has a gradient in every step."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from elastic_law import random_mixture as any_mixture
from small_supernets import layered
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import weft
from weft import elastic


class Mixed(nn.Module):
    """The chain and its architecture parameters as one module, as a user of DDP would write it."""

    def __init__(self, chain: weft.Chain) -> None:
        super().__init__()
        self.chain = chain
        found = any_mixture(chain.space, 3)
        self.alphas = nn.ParameterDict({n: nn.Parameter(found[n].detach().log()) for n in found.names})

    def forward(self, x: Tensor) -> Tensor:
        rows = {name: torch.softmax(alpha, 0) for name, alpha in self.alphas.items()}
        return self.chain(x, elastic.Mixture.unchecked(self.chain.space, rows))


def gradients(rank: int, world: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    model = DistributedDataParallel(Mixed(weft.initialise(layered, 1)))  # no find_unused_parameters
    x, label = batch()
    part = slice(rank * len(x) // world, (rank + 1) * len(x) // world)
    for _ in range(2):  # a second step would hang or fail if the first had left a gradient out
        model.zero_grad()
        nn.functional.cross_entropy(model(x[part]), label[part]).backward()
    if rank == 0:
        torch.save({n: p.grad for n, p in model.module.named_parameters()}, Path(folder) / "gradients.pt")
    dist.barrier()
    os._exit(0)  # torch aborts a process whose gloo threads have not ended when Python tears it down


def batch() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return torch.randn(8, 8, 8, generator=rng), torch.arange(8) % 10


def test_two_processes_have_the_gradients_of_one_without_unused_parameters(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(gradients, (2, port, str(tmp_path)), nprocs=2)
    found = torch.load(tmp_path / "gradients.pt", weights_only=True)
    model = Mixed(weft.initialise(layered, 1))
    x, label = batch()
    nn.functional.cross_entropy(model(x), label).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        torch.testing.assert_close(found[name], p.grad, rtol=1e-5, atol=1e-7)
