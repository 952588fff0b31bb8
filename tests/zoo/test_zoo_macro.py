"""NAS-Bench-Macro's supernet against the published table."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.errors import SpaceError, SupernetError
from weft.supernet import Chain, extract, initialise
from weft.zoo import SUPERNETS, find, macro_key, macro_subnet, nas_bench_macro

KEYS = ["00000000", "11111111", "22222222", "22000000", "12012012", "01210210", "20000001"]


@pytest.fixture(scope="module")
def chain() -> Chain:
    return initialise(nas_bench_macro)


@pytest.fixture(scope="module")
def table(require: Callable[[str, bool, str], None]) -> dict[str, dict[str, Any]]:
    file = Path(os.environ.get("WEFT_DATA", "")) / "nas-bench-macro" / "nas-bench-macro_cifar10.json"
    require(
        "data",
        bool(os.environ.get("WEFT_DATA")) and file.is_file(),
        "set WEFT_DATA to the folder with nas-bench-macro/",
    )
    found: dict[str, dict[str, Any]] = json.loads(file.read_text())
    return found


def test_a_key_and_its_subnet_name_each_other(chain: Chain) -> None:
    for key in KEYS:
        assert macro_key(macro_subnet(chain.space, key)) == key
    keys = {macro_key(subnet) for subnet in chain.space.enumerate()}
    assert len(keys) == 6561


@pytest.mark.parametrize("key", ["", "0000000", "000000000", "00000003", "0000000x"])
def test_a_key_that_is_none_is_refused(chain: Chain, key: str) -> None:
    with pytest.raises(SpaceError, match="eight digits"):
        macro_subnet(chain.space, key)


def test_every_network_has_the_published_number_of_parameters(chain: Chain, table: dict[str, dict[str, Any]]) -> None:
    """Weights and biases of all layers, batch norms' scales and shifts included, as a plain number."""
    count = {name: sum(p.numel() for p in chain.module(name).parameters()) for name in chain.layers}
    assert len(table) == 6561
    for key, entry in table.items():
        assert sum(count[layer.name] for layer in chain.route(macro_subnet(chain.space, key))) == entry["params"], key


@pytest.mark.parametrize("key", KEYS)
def test_the_published_flops_are_multiply_adds_of_convolutions_and_the_last_linear_layer(
    chain: Chain, table: dict[str, dict[str, Any]], key: str
) -> None:
    """Counted for one image, without biases, batch norms, additions and pooling."""
    model = extract(chain, macro_subnet(chain.space, key))
    count = 0

    def hook(module: nn.Module, entered: tuple[Tensor, ...], left: Tensor) -> None:
        nonlocal count
        if isinstance(module, nn.Conv2d):
            kernel = module.kernel_size[0] * module.kernel_size[1]
            count += left.numel() * (module.in_channels // module.groups) * kernel
        elif isinstance(module, nn.Linear):
            count += left.numel() * module.in_features

    for part in model.modules():
        part.register_forward_hook(hook)
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    assert count == table[key]["flops"]
    assert sum(p.numel() for p in model.parameters()) == table[key]["params"]


def test_the_zoo_finds_its_supernets_and_names_the_nearest() -> None:
    for name, build in SUPERNETS.items():
        assert find(name) is build
    with pytest.raises(SupernetError, match="did you mean 'digits-conv'"):
        find("digit-conv")
