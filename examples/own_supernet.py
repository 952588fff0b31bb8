"""A supernet of one's own in ten lines: train it, search it, and take the best subnet out as a plain module.

Prints how many subnets there are, the front of the search (accuracy against FLOPs), and the test accuracy of the
extracted module, which is ordinary PyTorch: save it, export it, train it on. Takes a few seconds on one core:

    81 subnets, trained in runs/run-...
    accuracy 0.9639  flops   297,984  skip skip conv3 conv5
    accuracy 0.9611  flops   224,256  skip skip skip conv5
    accuracy 0.9583  flops    93,184  skip skip skip conv3
    accuracy 0.9556  flops    19,456  skip skip skip skip
    extracted: Sequential with 6 layers, test accuracy 0.96
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

import weft


class Conv(nn.Module):
    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.conv(x))


def build() -> weft.Chain:
    space = weft.Space()
    return weft.Chain(
        weft.Shared(nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU()), "stem"),
        *[
            weft.Choice(space, f"block{i}", {"conv3": Conv(3), "conv5": Conv(5), "skip": nn.Identity()})
            for i in range(4)
        ],
        weft.Shared(nn.Sequential(nn.Flatten(), nn.Linear(8 * 8 * 8, 10)), "head"),
    )


def main() -> None:
    data = weft.data.digits()
    run = weft.train(build, data, loss=weft.cross_entropy, metrics={"accuracy": weft.accuracy}, steps=150, seed=0)
    print(f"{run.chain.space.size()} subnets, trained in {run.path}")

    front = weft.search(run, maximize="accuracy", minimize="flops", budget=20)
    for member in front:
        choices = " ".join(str(choice) for choice in member.subnet.values.values())
        print(f"accuracy {member.scores['accuracy']:.4f}  flops {member.scores['flops']:9,.0f}  {choices}")

    model = front.best().extract()
    assert data.test is not None
    test = data.test.take(np.arange(len(data.test)))
    with torch.inference_mode():
        right = (model(test["image"]).argmax(-1) == test["label"]).double().mean()
    print(f"extracted: {type(model).__name__} with {len(list(model.children()))} layers, test accuracy {right:.2f}")


if __name__ == "__main__":
    main()
