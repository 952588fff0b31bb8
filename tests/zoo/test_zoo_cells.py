"""The convolutional and cell spaces: their published sizes, and the law on random subnets of small copies."""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from elastic_law import any_mixture, check_law, draw, near
from torch import nn

from weft.elastic import Condition, Mixture
from weft.errors import SpaceError, SupernetError
from weft.search.cost import flops, parameters
from weft.space import Space, Subnet
from weft.supernet import Chain, extract, initialise
from weft.utils.rng import generator
from weft.zoo import (
    conv_macro,
    darts,
    digits_conv,
    digits_mlp,
    find,
    macro_key,
    macro_subnet,
    nas_bench_201,
    nas_bench_macro,
    nas_bench_macro_entangled,
    nb201_key,
    nb201_subnet,
    ofa_mobilenet_v3,
    toy_cell,
)
from weft.zoo.cells import NODES, Edge, Edges
from weft.zoo.convolutions import Residual
from weft.zoo.nas_bench import NB201_OPERATIONS, ReductionCell

SMALL: dict[str, tuple[Callable[[], Chain], tuple[int, ...]]] = {
    "toy cell": (partial(toy_cell, 4, size=8, dropout=0.0), (3, 1, 8, 8)),
    "toy cell, odd": (partial(toy_cell, 4, size=9, entangled=False, dropout=0.0), (3, 1, 9, 9)),
    "conv macro": (partial(conv_macro, size=12, dropout=0.0), (2, 3, 12, 12)),
    "conv macro, normed": (partial(conv_macro, size=12, dropout=0.0, norm=True), (2, 3, 12, 12)),
    "201": (partial(nas_bench_201, 1, 4), (3, 3, 8, 8)),
    "201, entangled": (partial(nas_bench_201, 1, 4, entangled=True), (3, 3, 8, 8)),
    "darts": (partial(darts, 4, 4), (2, 3, 8, 8)),
    "darts, entangled": (partial(darts, 2, 4, entangled=True, affine=True), (2, 3, 8, 8)),
    "darts, partial": (partial(darts, 2, 8, partial=4), (2, 3, 8, 8)),
    "darts, all edges": (partial(darts, 2, 4, all_edges=True), (2, 3, 8, 8)),
    "ofa": (partial(ofa_mobilenet_v3, 10, 0.25, dropout=0.0), (4, 3, 32, 32)),
    "macro, entangled": (nas_bench_macro_entangled, (2, 3, 8, 8)),
}
DIGITS: dict[str, tuple[Callable[[], Chain], tuple[int, ...]]] = {
    "digits conv": (partial(digits_conv, 4, 4), (4, 1, 8, 8)),
    "digits mlp": (partial(digits_mlp, 2, 8), (4, 1, 8, 8)),
}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("digits-conv", 4**6),
        ("digits-mlp", 4**4),
        ("toy-cell", 4**6),
        ("conv-macro", 3**8),
        ("nas-bench-201", 5**6),
        ("nas-bench-macro-entangled", 3**8),
        ("ofa-mobilenet-v3", (9**2 + 9**3 + 9**4) ** 5),
        ("darts", math.prod(math.comb(n, 2) * 7**2 for n in range(2, 2 + NODES)) ** 2),
    ],
)
def test_a_space_has_the_published_number_of_networks(name: str, size: int) -> None:
    assert find(name)().space.size() == size


@pytest.mark.parametrize("kind", SMALL)
def test_random_subnets_keep_the_law(kind: str) -> None:
    make, shape = SMALL[kind]
    chain = initialise(make(), 1)
    check_law(chain, chain.space.sample(generator("law", kind)), draw(*shape), own_classes=(ReductionCell, Residual))


@pytest.mark.parametrize("kind", SMALL | DIGITS)
def test_every_weight_has_a_part_in_some_mixture(kind: str) -> None:
    make, shape = (SMALL | DIGITS)[kind]
    chain = initialise(make(), 1).eval()
    uniform = Mixture.uniform(chain.space)
    rows = {name: uniform[name].requires_grad_() for name in uniform.names}
    chain(draw(*shape, dtype=torch.float32), Mixture(chain.space, rows)).square().sum().backward()
    for name, weight in chain.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        assert weight.grad.any(), name
    for name, row in rows.items():
        assert row.grad is not None, name
        assert row.grad.isfinite().all(), name


def test_a_cell_of_linear_operations_gives_the_expectation_over_all_its_subnets() -> None:
    space = Space()
    edges: dict[tuple[int, int], nn.Module] = {}
    pair = space.categorical("pair", ["0-1", "0-2", "1-2"])
    for source, target in ((0, 2), (1, 2), (0, 3), (1, 3), (2, 3)):
        there = (
            (pair == "0-1") | (pair == "0-2") | (pair == "1-2")
            if target == 2
            else (pair == f"0-{source}") | (pair == f"1-{source}") | (pair == f"{source}-1") | (pair == f"{source}-2")
        )
        choice = space.categorical(f"op{source}{target}", ["conv", "pool"], when=there)
        modules = {"conv": nn.Conv2d(2, 2, 1, bias=False), "pool": nn.AvgPool2d(3, 1, 1)}
        edges[source, target] = Edge(space, choice, modules, Condition(space, there))
    cell = Edges(edges).double()
    mixture = any_mixture(space, 5)
    states = draw(2, 2, 4, 4), draw(2, 2, 4, 4, seed=1)
    found = cell(*states, pick=mixture)
    wanted, mass = torch.zeros_like(found[-1]), 0.0
    for subnet in space.enumerate():
        chance = math.prod(
            float(mixture[name].detach()[(space.choices[name].options or ()).index(value)])
            for name, value in subnet.values.items()
        )
        wanted, mass = wanted + chance * cell(*states, pick=subnet)[-1], mass + chance
    assert mass == pytest.approx(1.0)
    assert space.size() == 3 * 2**4
    near(found[-1], wanted, 1e-12)


def test_a_subnet_of_darts_has_two_inputs_for_each_node() -> None:
    assert darts(all_edges=True).space.size() == 8**28
    chain = initialise(darts(3, 4), 0)
    rng = generator("inputs")
    for _ in range(20):
        subnet = chain.space.sample(rng)
        for kind in ("normal", "reduce"):
            for target in range(2, 6):
                sources = [s for s in range(target) if f"{kind}_{s}_{target}" in subnet.values]
                assert len(sources) == 2
                if target > 2:
                    assert subnet[f"{kind}_inputs{target}"] == "-".join(map(str, sources))


def test_the_cells_of_darts_are_extracted_with_an_example_only() -> None:
    chain = initialise(darts(3, 4), 0)
    subnet = chain.space.first()
    with pytest.raises(SupernetError, match="example batch"):
        extract(chain, subnet)
    with pytest.raises(SupernetError, match="multiple of 8"):
        darts(channels=12, partial=4)


@pytest.fixture(scope="module")
def published(require: Callable[[str, bool, str], None]) -> Callable[[str], Path]:
    def file(name: str) -> Path:
        folder = os.environ.get("WEFT_DATA", "")
        require("data", bool(folder) and Path(folder, name).is_file(), f"set WEFT_DATA to the folder with {name}")
        return Path(folder, name)

    return file


@pytest.mark.parametrize("entangled", [False, True])
def test_the_networks_of_201_have_the_published_numbers_of_parameters(
    published: Callable[[str], Path], entangled: bool
) -> None:
    with gzip.open(published("nas-bench-201/nasbench201.csv.gz"), "rt", newline="") as lines:
        table = list(csv.DictReader(lines))
    chain = initialise(nas_bench_201(entangled=entangled), 0)
    shared = sum(p.numel() for b in chain.blocks if not b.elastic for p in chain.module(b.name).parameters())
    counts = dict.fromkeys(range(5), 0)
    for block in chain.blocks:
        if block.elastic:
            width = next(p.shape[0] for p in chain.module(block.name).parameters() if p.dim() == 4)
            counts[2] += width * width + 2 * width
            counts[3] += 9 * width * width + 2 * width
    assert len(table) == 15625
    differ = []
    for row in table:
        count = shared + sum(counts[int(digit)] for digit in row["arch"])
        if abs(count - 1e6 * float(row["cifar10_params_M"])) > 0.6:
            differ.append(row["arch"])
    # For a few networks the table holds the mean over runs of different ones: no whole number of parameters.
    assert len(differ) == 204
    for key in ("000000", "333132", "234014", "444444"):
        plain = extract(chain, nb201_subnet(chain.space, key))
        assert sum(p.numel() for p in plain.parameters()) == shared + sum(counts[int(digit)] for digit in key)


@pytest.mark.parametrize(
    ("make", "key_of", "subnet_of", "keys", "wrong"),
    [
        (partial(nas_bench_201, 1, 4), nb201_key, nb201_subnet, ("000000", "333132", "012343"), "0-4"),
        (nas_bench_macro, macro_key, macro_subnet, ("00000000", "12012012", "20000001"), "0-2"),
    ],
)
def test_a_key_and_its_subnet_name_each_other(
    make: Callable[[], Chain],
    key_of: Callable[[Subnet], str],
    subnet_of: Callable[[Space, str], Subnet],
    keys: tuple[str, ...],
    wrong: str,
) -> None:
    space = make().space
    assert len({key_of(subnet) for subnet in space.enumerate()}) == space.size()
    first = keys[0]
    for key in keys:
        assert key_of(subnet_of(space, key)) == key
    for other in ("", first[1:], first + "0", first[1:] + str(int(wrong[-1]) + 1), first[1:] + "x"):
        with pytest.raises(SpaceError, match="digits"):
            subnet_of(space, other)


def test_the_digits_of_201_are_those_of_the_published_edges() -> None:
    best = nb201_subnet(nas_bench_201(1, 4).space, "333132")
    assert [best[f"edge{e}"] for e in ("03", "23")] == ["skip_connect", "nor_conv_1x1"]
    assert NB201_OPERATIONS[3] == best["edge01"] == "nor_conv_3x3"


def test_the_networks_of_macro_have_the_published_parameters_and_multiply_adds(
    published: Callable[[str], Path],
) -> None:
    """Parameters include those of batch norms; multiply-adds are those of convolutions and the last linear layer."""
    chain = initialise(nas_bench_macro)
    table = json.loads(published("nas-bench-macro/nas-bench-macro_cifar10.json").read_text())
    count = {name: sum(p.numel() for p in chain.module(name).parameters()) for name in chain.layers}
    assert len(table) == 6561
    for key, entry in table.items():
        assert sum(count[layer.name] for layer in chain.route(macro_subnet(chain.space, key))) == entry["params"], key
    for key in ("00000000", "11111111", "22222222", "01210210"):
        model = extract(chain, macro_subnet(chain.space, key))
        assert flops(model, torch.zeros(1, 3, 32, 32)) == 2 * table[key]["flops"]
        assert parameters(model) == table[key]["params"]


def test_a_name_that_the_zoo_lacks_is_answered_with_the_nearest() -> None:
    with pytest.raises(SupernetError, match="did you mean 'digits-conv'"):
        find("digit-conv")


def test_a_subnet_of_once_for_all_has_the_depth_and_the_sizes_that_it_says() -> None:
    chain = initialise(ofa_mobilenet_v3(10, 0.25), 0)
    last = extract(chain, chain.space.last())
    first = extract(chain, chain.space.first())
    assert len(list(last.children())) == 3 + 5 * 4
    assert len(list(first.children())) == 3 + 5 * 2
    block = last.get_submodule("stage5_3")
    depthwise = next(m for m in block.modules() if isinstance(m, nn.Conv2d) and m.groups > 1)
    assert depthwise.kernel_size == (7, 7)
    assert depthwise.out_channels == 6 * 40


def test_both_forms_of_nas_bench_macro_have_one_space_and_networks_of_one_size() -> None:
    apart, nested = initialise(nas_bench_macro(), 0), initialise(nas_bench_macro_entangled(), 0)
    assert apart.space.id == nested.space.id
    for key in ("00000000", "11111111", "22222222", "01210210"):
        counts = {
            sum(p.numel() for p in extract(chain, macro_subnet(chain.space, key)).parameters())
            for chain in (apart, nested)
        }
        assert len(counts) == 1


def test_the_gate_of_once_for_all_has_the_published_sizes() -> None:
    chain = initialise(ofa_mobilenet_v3(), 0)
    first = chain.space.first()
    for expansion, sizes in ((3, (72, 24)), (6, (144, 40))):
        subnet = chain.space.subnet({**first.values, "expand2_0": expansion, "expand1_1": expansion})
        found = extract(chain, subnet).get_submodule("stage2_0.body.6.reduce")
        assert isinstance(found, nn.Conv2d)
        assert (found.in_channels, found.out_channels) == sizes
    assert chain.module("stage5_0").body[6].expand.weight.shape[:2] == (672, 168)  # type: ignore[union-attr, index]
