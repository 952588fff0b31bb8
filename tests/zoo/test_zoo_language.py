"""The language model: its size, what a token can see, how places enter, and that any cut trains the same bits."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import stages
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import weft
from weft import zoo
from weft.engine.optimizer import Optimizer
from weft.errors import SupernetError
from weft.zoo.gpt import CausalAttention, language_model

SMALL: dict[str, Any] = {"vocabulary": 11, "context": 12, "width": 16, "layers": 2, "heads": 2, "dropout": 0.2}
KINDS = ("learned", "rotary")


def made(seed: int = 0, **changes: Any) -> weft.Chain:
    return weft.initialise(partial(language_model, **{**SMALL, **changes}), seed).eval()


def scores(chain: weft.Chain, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found = chain(tokens, chain.space.subnet())
    assert isinstance(found, Tensor)
    return found


def rows(seed: int, length: int = 12, count: int = 3) -> Tensor:
    return torch.randint(0, 11, (count, length), generator=torch.Generator().manual_seed(seed))


def test_the_default_is_nanogpts_model_of_10_65_million_parameters_and_a_head_of_its_own() -> None:
    chain = weft.initialise(zoo.find("gpt"))
    width, layers, vocabulary, context = 384, 6, 65, 256
    layer = 4 * width * width + 8 * width * width + 2 * width  # attention, perceptron, the gains of two norms
    published = layers * layer + width + vocabulary * width  # nanoGPT ties the head and does not count places
    assert round(published / 1e6, 2) == 10.65
    total = sum(p.numel() for p in chain.parameters())
    assert total - vocabulary * width - context * width == published
    assert [block.name for block in chain.blocks] == ["tokens", *(f"layer{k}" for k in range(6)), "head"]
    assert all(layer.shared for layer in chain.layers.values())


def test_fresh_weights_are_gpt2s_and_depend_on_the_seed_and_the_layers_name_alone() -> None:
    chain = made(width=128, layers=8, context=64)
    for name, weight in chain.named_parameters():
        if weight.dim() < 2:
            assert torch.equal(weight, torch.ones_like(weight))
            continue
        wanted = 0.02 / 4 if name.endswith(("attention.out.weight", "down.weight")) else 0.02
        assert weight.std().item() == pytest.approx(wanted, rel=0.1), name
        assert abs(weight.mean().item()) < wanted / 10
    deeper = made(width=128, layers=9, context=64)
    assert torch.equal(chain.layer0.up.weight, deeper.layer0.up.weight)
    assert not torch.equal(chain.layer0.up.weight, chain.layer1.up.weight)
    assert not torch.equal(chain.layer0.up.weight, made(1, width=128, layers=8, context=64).layer0.up.weight)


@pytest.mark.parametrize(
    ("positions", "train", "dropout"), [("learned", True, 0.2), ("rotary", True, 0.0), ("rotary", False, 0.2)]
)
def test_what_a_block_gives_is_no_view_and_what_is_extracted_is_the_chain(
    positions: str, train: bool, dropout: float
) -> None:
    chain = made(positions=positions, dropout=dropout).train(train)
    x = rows(0)
    for name in chain.layers:
        x = chain.module(name)(x)
        assert x.is_contiguous(), name
        assert not x._is_view(), name
    assert x.shape == (3, 12, 11)
    plain = weft.extract(chain.eval(), chain.space.subnet(), {"tokens": rows(0)}).eval()
    with torch.no_grad():
        assert torch.equal(plain(rows(0)), scores(chain, rows(0)))


@pytest.mark.parametrize("positions", KINDS)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), at=st.integers(0, 11), by=st.integers(1, 10))
def test_a_token_is_seen_by_itself_and_those_after_it_and_by_none_before(
    positions: str, seed: int, at: int, by: int
) -> None:
    chain, tokens = made(seed % 7, positions=positions), rows(seed)
    before = scores(chain, tokens)
    changed = tokens.clone()
    changed[:, at] = (changed[:, at] + by) % 11
    after = scores(chain, changed)
    assert torch.equal(before[:, :at], after[:, :at])
    assert (before[:, at:] != after[:, at:]).any(-1).all()


def by_hand(attention: CausalAttention, x: Tensor, first: int = 0) -> Tensor:
    """Rotary attention with pairs of features as complex numbers and one score at a time; places begin at ``first``."""
    rows, length, width = x.shape
    heads, size = attention.heads, width // attention.heads
    q, k, v = (part.view(rows, length, heads, size) for part in attention.qkv(x).split(width, -1))
    angles = [10_000.0 ** (-2 * i / size) for i in range(size // 2)]
    out = torch.zeros(rows, length, heads, size)
    for t in range(length):
        found = []
        for s in range(t + 1):
            turned = [
                torch.complex(y[..., : size // 2], y[..., size // 2 :])
                * torch.exp(1j * (first + place) * torch.tensor(angles))
                for y, place in ((q[:, t], t), (k[:, s], s))
            ]
            found.append((turned[0] * turned[1].conj()).real.sum(-1) / size**0.5)
        out[:, t] = torch.einsum("srh,rshd->rhd", torch.stack(found).softmax(0), v[:, : t + 1])
    mixed: Tensor = attention.out(out.flatten(2))
    return mixed


def test_rotary_attention_turns_queries_and_keys_by_their_place_wherever_places_begin() -> None:
    torch.manual_seed(0)
    attention = CausalAttention(12, 2, 0.0, False, rotary=9).eval()
    nn.init.normal_(attention.qkv.weight)
    x = torch.randn(2, 9, 12)
    with torch.no_grad():
        torch.testing.assert_close(attention(x), by_hand(attention, x))
        torch.testing.assert_close(attention(x), by_hand(attention, x, first=40))


def test_learned_places_count() -> None:
    learned = made(context=40)
    before = scores(learned, rows(2))
    learned.tokens.places.weight.data = learned.tokens.places.weight.data.roll(-17, 0)
    assert not torch.allclose(scores(learned, rows(2)), before, rtol=1e-2, atol=1e-3)


def test_dropout_is_drawn_in_training_only_and_in_attention_too() -> None:
    attention = CausalAttention(16, 2, 0.5, False, None)
    x = torch.randn(2, 6, 16)
    assert torch.equal(attention.eval()(x), attention(x))
    assert not torch.equal(attention.train()(x), attention(x))
    chain = made().train()
    assert not torch.equal(scores(chain, rows(0)), scores(chain, rows(0)))


@pytest.mark.parametrize(
    ("positions", "precision", "consistency"),
    [("learned", "fp32", "exact"), ("learned", "bf16", "lagged(1)"), ("rotary", "fp32", "bounded(2, 4)")],
)
def test_any_cut_trains_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, positions: str, precision: str, consistency: str
) -> None:
    build = partial(language_model, **{**SMALL, "positions": positions})
    monkeypatch.setitem(stages.KINDS, "language", (build, stages.words))
    adamw = Optimizer("adamw", lr=1e-2, weight_decay=0.1, groups="matrices")
    only: Any = build().space.subnet()
    task = stages.make_task(
        "language", steps=6, m=2, consistency=consistency, optimizer=adamw, stream=only, precision=precision, clip=1.0
    )
    alone = stages.sequentially(task)
    assert len(set(alone.losses)) == 12  # every step changes what the next one sees
    for cut in ((2,), (1, 2, 3)):
        found, _ = stages.in_stages(task, cut, 4, seed=len(cut))
        assert found.losses == alone.losses, cut
        assert found.layers == alone.layers, cut


@pytest.mark.parametrize("positions", KINDS)
def test_a_model_learns_what_comes_next(tmp_path: Path, positions: str) -> None:
    """After a 1 comes what the token before it says, so to look at the last token alone is not enough."""
    row = torch.tensor([1, 2, 1, 3, 1, 4, 1, 5]).repeat(200)
    rounds = weft.data.Text(row, 12, 1)
    build = partial(language_model, **{**SMALL, "positions": positions, "dropout": 0.0})
    losses: list[float] = []
    weft.train(
        build,
        weft.Data("rounds", rounds),
        steps=250,
        batch_size=16,
        optimizer=weft.Optimizer("adamw", lr=1e-2, schedule="cosine:0.1", warmup_steps=10),
        callbacks=[lambda event: losses.append(event["loss"]) if event["event"] == "step" else None],
        folder=tmp_path,
    )
    assert losses[0] == pytest.approx(math.log(11), abs=0.1)  # as good as guessing among the vocabulary
    # Who knows the last token alone cannot go below half of ln 4; who sees more errs on the first of a window at most.
    assert math.log(4) / 24 - 0.05 < losses[-1] < 0.3 < math.log(4) / 2


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"width": 15}, "a width of 15 has no 2 heads of one size: use a multiple of 2"),
        ({"width": 6, "positions": "rotary"}, "has no 2 heads of one even size: use a multiple of 4"),
        ({"positions": "learnt"}, "unknown positions 'learnt'; did you mean 'learned'?"),
        ({"layers": 0}, "sizes of 1 or more .* layers=0"),
        ({"dropout": 1.0}, "a dropout from 0 to below 1"),
    ],
)
def test_sizes_that_cannot_be_and_rows_that_are_too_long_are_refused(sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(SupernetError, match=words.replace("?", r"\?")):
        language_model(**{**SMALL, **sizes})
    with pytest.raises(SupernetError, match="a row of 13 tokens is longer than the model's context of 12"):
        scores(made(), rows(0, length=13))
