"""The zoo's transformers: the published numbers of subnets, and the law on random ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from elastic_law import check_law
from torch import Tensor
from torch.nn import functional as F

import weft
from weft import zoo
from weft.data.open import digits
from weft.elastic import Mixture
from weft.errors import SupernetError
from weft.supernet import build_on_meta
from weft.utils.rng import generator

SIZES = {
    "autoformer-tiny": 3 * sum((2 * 2) ** depth for depth in (12, 13, 14)),
    "autoformer-small": 3 * sum((3 * 3) ** depth for depth in (12, 13, 14)),
    "autoformer-base": 3 * sum((2 * 3) ** depth for depth in (14, 15, 16)),
    "gpt-small": 3 * sum((3 * 3) ** depth for depth in (5, 6, 7)),
    "gpt-default": 3 * sum((3 * 3) ** depth for depth in (10, 11, 12)),
    "gpt-shakespeare": 3 * sum((3 * 3) ** depth for depth in (4, 5, 6)),
    "vit-test": 3 * sum((3 * 2) ** depth for depth in (1, 2, 3)),
    "gpt-test": 3 * sum((3 * 2) ** depth for depth in (1, 2, 3)),
}
PUBLISHED = {
    "autoformer-tiny": 1.06e9,
    "autoformer-small": 7.7e13,
    "autoformer-base": 1.0e13,
    "gpt-small": 1.6e7,
    "gpt-default": 9.5e11,
    "gpt-shakespeare": 1.8e6,
}


@pytest.mark.parametrize("name", SIZES)
def test_a_space_has_as_many_subnets_as_its_formula_says(name: str) -> None:
    size = zoo.find(name)().space.size()
    assert size == SIZES[name]
    if name in PUBLISHED:
        assert size == pytest.approx(PUBLISHED[name], rel=0.02)


def weights_of(subnet: weft.Subnet, rest: Callable[[int], int]) -> int:
    """The parameters of a subnet by hand; ``rest`` gives those of the ends for a width."""
    width = subnet["embed"]
    count = rest(width) + 2 * width
    for i in range(subnet["depth"]):
        inner, hidden = 64 * subnet[f"heads{i}"], int(subnet[f"ratio{i}"] * width)
        count += 3 * (width * inner + inner) + inner * width + width  # q, k, v and out
        count += width * hidden + hidden + hidden * width + width + 4 * width  # perceptron and norms
    return count


@pytest.mark.parametrize("name", ["autoformer-tiny", "gpt-small", "gpt-shakespeare"])
def test_a_subnet_has_the_weights_that_its_sizes_ask_for(name: str) -> None:
    chain = build_on_meta(zoo.find(name))
    vision = name.startswith("autoformer")
    words, places = (65, 256) if "shake" in name else (50304, 224)

    def ends(width: int) -> int:
        if vision:
            return 3 * 16 * 16 * width + width + (1 + 197) * width + 1000 * width + 1000
        return (2 * words + places) * width

    x = torch.empty(2, 3, 224, 224, device="meta") if vision else torch.empty(2, 9, dtype=torch.int64, device="meta")
    rng = generator(0, "zoo", name)
    for subnet in (chain.space.last(), chain.space.sample(rng)):
        plain = weft.extract(chain, subnet)
        assert sum(parameter.numel() for parameter in plain.parameters()) == weights_of(subnet, ends)
        assert chain(x, subnet).shape == plain(x).shape == ((2, 1000) if vision else (2, 9, words))


def small(name: str) -> tuple[weft.Chain, Tensor]:
    """A chain of the zoo, its input small, and its weights large enough to matter everywhere."""
    words = torch.from_numpy(generator(0, "words").integers(20, size=(2, 7)))
    images = torch.from_numpy(generator(0, "images").standard_normal((2, 3, 32, 32))).float()
    makers: dict[str, tuple[Callable[[], weft.Chain], Tensor]] = {
        "autoformer-tiny": (lambda: zoo.autoformer_tiny(5, 32, 16), images),
        "gpt-shakespeare": (lambda: zoo.gpt_shakespeare(20, 8), words),
        "vit-test": (zoo.vit_test, images[:, :1, :8, :8]),
        "gpt-test": (zoo.gpt_test, words),
    }
    make, x = makers[name]
    chain = weft.initialise(make, seed=1)
    with torch.no_grad():
        for parameter in chain.parameters():
            parameter.mul_(3.0) if parameter.dim() > 1 else parameter.add_(
                0.1 * torch.sin(torch.arange(len(parameter)))
            )
    return chain.eval(), x


@pytest.mark.parametrize("name", ["vit-test", "gpt-test", "autoformer-tiny", "gpt-shakespeare"])
def test_random_subnets_keep_the_law(name: str) -> None:
    chain, x = small(name)
    for number in range(2 if name.endswith("test") else 1):
        check_law(chain, chain.space.sample(generator(number, "zoo", name)), x, modes=(False,))


@pytest.mark.parametrize(("mixed", "steps"), [(False, 50), (True, 40)])
def test_digits_are_learnt_by_random_subnets_and_by_a_mixture(mixed: bool, steps: int) -> None:
    images, labels = digits().train.take(np.arange(32)).values()
    chain = weft.initialise(zoo.vit_test, seed=0)
    judged = Mixture.uniform(chain.space) if mixed else chain.space.last()
    rng = generator(0, "digits")
    optimizer = torch.optim.AdamW(chain.parameters(), 1e-2)

    def loss(pick: weft.Subnet | Mixture) -> Tensor:
        return F.cross_entropy(chain(images, pick), labels)

    before = float(loss(judged).detach())
    for _ in range(steps):
        optimizer.zero_grad()
        loss(Mixture.uniform(chain.space) if mixed else chain.space.sample(rng)).backward()
        optimizer.step()
    assert float(loss(judged).detach()) < 0.6 * before


def test_a_language_model_looks_at_nothing_that_comes_later() -> None:
    chain, words = small("gpt-test")
    other = words.clone()
    other[:, 4:] = (other[:, 4:] + 1) % 20
    for pick in (chain.space.last(), Mixture.uniform(chain.space)):
        with torch.no_grad():
            first, second = chain(words, pick), chain(other, pick)
        assert torch.equal(first[:, :4], second[:, :4])
        assert not torch.equal(first[:, 4:], second[:, 4:])


@pytest.mark.parametrize(
    ("build", "words"), [(lambda: zoo.autoformer_tiny(image=30), "patches"), (lambda: zoo.conv_macro(size=8), "12")]
)
def test_images_that_a_space_cannot_take_are_refused(build: Callable[[], weft.Chain], words: str) -> None:
    with pytest.raises(SupernetError, match=words):
        build()
