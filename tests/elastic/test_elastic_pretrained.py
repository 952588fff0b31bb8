"""Models of transformers made elastic: the largest pick is the model, smaller ones are models cut by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from elastic_law import check_law, noise, random_mixture
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import weft
from weft.errors import SupernetError
from weft.utils.rng import generator, torch_seeded

WORDS = 50
FAMILIES = ("gpt2", "llama", "vit")


def model_of(family: str, seed: int = 0, **more: Any) -> Any:
    """A small model with weights that are far from those of a fresh one."""
    with torch_seeded(seed, "pretrained", family):
        if family == "gpt2":
            usual = {"vocab_size": WORDS, "n_positions": 40, "n_embd": 24, "n_layer": 3, "n_head": 4}
            model: nn.Module = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **{**usual, **more}))
        elif family == "llama":
            usual = {"vocab_size": WORDS, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3}
            heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6}
            model = LlamaForCausalLM(LlamaConfig(**{**usual, **heads, **more}))
        else:
            usual = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 4}
            images = {"image_size": 16, "patch_size": 4, "num_labels": 7}
            model = ViTForImageClassification(ViTConfig(**{**usual, **images, **more}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape), alpha=0.2)
    return model.eval()


def inputs_of(family: str, tokens: int = 11, batch: int = 2) -> Tensor:
    if family == "vit":
        return noise(batch, 3, 16, 16)
    return torch.from_numpy(generator(0, "words").integers(WORDS, size=(batch, tokens)))


def logits(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x).logits if model.config.model_type == "vit" else model(x, use_cache=False).logits


def chain_of(family: str, model: Any) -> weft.Chain:
    """Everything varies that can."""
    space = weft.Space()
    depth, width = space.integer("depth", [1, 2, 3]), space.integer("width", [12, 18, 24])
    hidden = [space.integer(f"hidden{i}", [20, 36] if family != "gpt2" else [40, 96]) for i in range(3)]
    heads: dict[str, Any] = {}
    if family == "llama":
        groups, each = space.integer("groups", [1, 2, 4]), space.integer("each", [1, 2])
        heads = {"heads": groups * each, "kv_heads": groups}
    else:
        heads = {"heads": space.integer("heads", [1, 2, 4])}
    return weft.from_transformers(model, space, depth=depth, width=width, hidden=hidden, **heads)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_largest_pick_has_the_bits_of_the_model(family: str, attention: str) -> None:
    model = model_of(family, attn_implementation=attention)
    chain = chain_of(family, model)
    for tokens, batch in ((1, 1), (7, 2), (33, 3)):
        x = inputs_of(family, tokens, batch)
        with torch.no_grad():
            assert torch.equal(chain(x, chain.largest()), logits(model, x))


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"activation_function": "gelu_pytorch_tanh", "n_inner": 30}),
        ("gpt2", {"activation_function": "quick_gelu"}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 8, "hidden_act": "gelu"}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}),
        ("vit", {"qkv_bias": False, "hidden_act": "relu"}),
    ],
)
def test_a_model_with_other_settings_has_the_same_bits_with_nothing_that_varies(
    family: str, more: dict[str, Any]
) -> None:
    model = model_of(family, **more)
    chain = weft.from_transformers(model, weft.Space())
    x = inputs_of(family)
    with torch.no_grad():
        assert torch.equal(chain(x, chain.largest()), logits(model, x))


@pytest.mark.parametrize("family", FAMILIES)
def test_smaller_picks_keep_the_law_and_what_is_extracted_knows_neither_weft_nor_transformers(family: str) -> None:
    chain, rng = chain_of(family, model_of(family)), generator(0, "pretrained", family)
    for subnet in (chain.space.first(), chain.space.sample(rng), chain.space.sample(rng)):
        check_law(chain, subnet, inputs_of(family), modes=(False,))
        homes = {type(part).__module__.partition(".")[0] for part in weft.extract(chain, subnet).modules()}
        assert homes == {"torch"}


def test_a_smaller_pick_of_llama_is_the_llama_that_is_cut_by_hand() -> None:
    model = model_of("llama")
    chain = chain_of("llama", model)
    small = {"num_hidden_layers": 2, "hidden_size": 12, "intermediate_size": 20}
    cut = model_of("llama", num_attention_heads=2, num_key_value_heads=2, **small)
    state = {}
    for name, value in model.state_dict().items():
        if name in cut.state_dict():
            if "q_proj" in name:
                value = value.view(4, 2, 6, 24)[:2, :1].reshape(12, 24)
            elif "o_proj" in name:
                value = value.view(24, 4, 2, 6)[:, :2, :1].reshape(24, 12)
            state[name] = value[tuple(slice(size) for size in cut.state_dict()[name].shape)]
    cut.load_state_dict(state)
    values = {"depth": 2, "width": 12, "groups": 2, "each": 1, "hidden0": 20, "hidden1": 20, "hidden2": 36}
    x = inputs_of("llama")
    with torch.no_grad():
        assert torch.equal(chain(x, chain.space.subnet(values)), logits(cut, x))


def test_the_chain_has_weights_of_its_own_and_the_model_stays_as_it_is() -> None:
    model = model_of("gpt2")
    before = copy.deepcopy(model.state_dict())
    chain = chain_of("gpt2", model)
    x = inputs_of("gpt2")
    mixture = random_mixture(chain.space)
    torch.nn.functional.cross_entropy(chain(x, mixture).flatten(0, 1), x.flatten()).backward()
    with torch.no_grad():
        for parameter in chain.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": [12, 20]}, r"the model's width is 24, but the largest of 'width' is 20"),
        ({"depth": [1, 2]}, r"the model's depth is 3, but the largest of 'depth' is 2"),
        ({"heads": [4, 8]}, r"the model's heads \(layer 0\) is 4, but the largest of 'heads' is 8"),
        ({"hidden": [4, 8]}, r"the model's hidden \(layer 0\) is 36, but the largest of 'hidden' is 8"),
        ({"kv_heads": [2, 4]}, r"as many keys and values as heads"),
    ],
)
def test_sizes_that_are_not_the_models_are_refused(sizes: dict[str, list[int]], message: str) -> None:
    space = weft.Space()
    given = {name: space.integer(name, values) for name, values in sizes.items()}
    with pytest.raises(SupernetError, match=message):
        weft.from_transformers(model_of("vit"), space, **given)


def test_what_is_frozen_stays_so_and_the_mode_too() -> None:
    model = model_of("vit").train()
    model.vit.embeddings.requires_grad_(False)
    chain = weft.from_transformers(model, weft.Space())
    frozen = {name for name, p in chain.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in chain.named_parameters() if name.startswith("embed.")}
    assert chain.training


def test_models_that_are_unknown_or_compute_otherwise_are_refused() -> None:
    bert = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
    flex = model_of("gpt2")
    flex.config._attn_implementation = "flex_attention"
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}
    for model, message in (
        (bert, "GPT2LMHeadModel, LlamaForCausalLM, ViTForImageClassification"),
        (nn.Linear(2, 2), "GPT2LMHeadModel"),
        (model_of("llama", rope_parameters=dynamic), "'dynamic' change with the length"),
        (model_of("gpt2", add_cross_attention=True), "add_cross_attention"),
        (flex, "by 'flex_attention'.*set_attn_implementation"),
    ):
        with pytest.raises(SupernetError, match=message):
            weft.from_transformers(model, weft.Space())
