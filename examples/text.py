"""A model of characters whose mixers are searched: at each depth attention, a causal convolution, or nothing.

The tokens enter the embedding, and the head as an extra input, so that the head can hold what the last character alone
predicts. The text is Python's own help. The example prints the bits a character on validation text of guessing, of the
smallest subnet and of the best one, and what the best one writes:

    guessing         6.69 bits
    smallest         4.36 bits  skip skip skip
    best             3.94 bits  conv attention conv
    it writes: 'The te denr texiluseds ...
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft

CONTEXT, WIDTH = 32, 32


class Embedding(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.token = nn.Embedding(characters, WIDTH)
        self.place = nn.Parameter(torch.zeros(CONTEXT, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.token(tokens)
        return embedded + self.place[: tokens.shape[1]]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        mixed: Tensor = self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + mixed


class Convolution(nn.Module):
    def __init__(self, kernel: int = 4) -> None:
        super().__init__()
        self.past, self.norm = kernel - 1, nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, kernel)

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(self.norm(x).transpose(1, 2), (self.past, 0))  # a character sees only those before it
        return x + torch.relu(self.mix(before).transpose(1, 2))


class Head(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)
        self.pairs = nn.Embedding(characters, characters)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(x)) + self.pairs(tokens)
        return logits


def build(characters: int) -> weft.Chain:
    space = weft.Space()
    mixers = {"attention": Attention, "conv": Convolution, "skip": nn.Identity}
    return weft.Chain(
        weft.Shared(lambda: Embedding(characters), "embedding"),
        *[weft.Choice(space, f"mixer{depth}", mixers) for depth in range(3)],
        weft.Shared(lambda: Head(characters), "head", extra_inputs=["tokens"]),
        inputs="tokens",
    )


def main() -> None:
    data = weft.data.text(context=CONTEXT)
    characters = data.info["size"]
    assert data.validation is not None
    few = weft.Data("text", data.train, weft.data.Subset(data.validation, range(100)), info=data.info)
    optimizer = weft.Optimizer("adamw", lr=4e-3, warmup_steps=20)
    run = weft.train(lambda: build(characters), few, steps=250, batch_size=8, optimizer=optimizer, seed=0)
    front = weft.search(run, minimize=["loss", "flops"], budget=27)
    print(f"guessing         {math.log2(characters):.2f} bits")
    for name, member in (("smallest", front.best(maximize="loss")), ("best", front.best())):
        mixers = " ".join(str(choice) for choice in member.subnet.values.values())
        print(f"{name:16} {member.scores['loss'] / math.log(2):.2f} bits  {mixers}")
    print("it writes:", write(front.best().extract(), data.info["vocabulary"], "The "))


def write(model: nn.Module, vocabulary: tuple[str, ...], start: str, length: int = 60) -> str:
    """Goes on from the start, each character drawn from what the model thinks of the last CONTEXT ones."""
    dice = torch.Generator().manual_seed(0)
    tokens = [vocabulary.index(character) for character in start]
    with torch.inference_mode():
        for _ in range(length):
            likely = model(torch.tensor([tokens[-CONTEXT:]]))[0, -1].softmax(-1)
            tokens.append(int(torch.multinomial(likely, 1, generator=dice)))
    return repr("".join(vocabulary[token] for token in tokens))


if __name__ == "__main__":
    main()
