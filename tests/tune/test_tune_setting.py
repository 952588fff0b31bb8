"""Settings: a recipe with a trial's own values in place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import mlp
from torch import nn

import weft
from weft.errors import TuneError
from weft.tune.api import check_recipe
from weft.tune.recipe import FIELDS, OLD_FIELDS, Recipe, dropouts, trial_config
from weft.zoo import language_model

RECIPE = Recipe(model=mlp, data=weft.data.digits, steps=20, batch_size=16, optimizer_options={"lr": 0.1})


def test_a_choice_with_the_name_of_a_field_or_of_an_option_takes_its_place_and_others_are_the_models_own():
    found = trial_config(RECIPE, {"width": 5, "model": "mlp", "loss": 3})
    assert (found.steps, found.batch_size, found.seed, found.dropout) == (20, 16, 0, None)
    assert found.optimizer.cls is torch.optim.AdamW
    assert dict(found.optimizer.options) == {"lr": 0.1}
    assert found.build()[1].out_features == 5
    chosen = {"steps": 7, "batch_size": 4, "lr": 0.5, "weight_decay": 0.25, "optimizer": "sgd", "seed": 3}
    found = trial_config(RECIPE, chosen)
    assert (found.steps, found.batch_size, found.seed) == (7, 4, 3)
    assert found.optimizer.cls is torch.optim.SGD
    assert dict(found.optimizer.options) == {"lr": 0.5, "weight_decay": 0.25}


def layers(params):
    drops = [nn.Dropout2d(0.5), nn.AlphaDropout(0.5), nn.LSTM(4, 4, 2, dropout=0.5)]
    return nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 8), *drops, nn.LSTM(4, 4, 1)])  # the last cannot drop


def zoo(params):
    chain = language_model(vocabulary=5, context=4, width=4, layers=1, heads=1, dropout=0.5)
    weft.initialise(chain, 0)
    return weft.extract(chain, chain.largest())


@pytest.mark.parametrize(("model", "count"), [(layers, 7), (zoo, 3)])
@given(rate=st.floats(0.0, 0.99))
def test_a_chosen_dropout_is_that_of_every_dropout_and_attention(model, count, rate):
    built = trial_config(Recipe(model=model, data=None), {"dropout": rate}).build()
    assert [getattr(part, name) for part, name in dropouts(built)] == [rate] * count
    assert model is zoo or built[-1].dropout == 0.0


def test_fresh_weights_depend_on_the_seed_alone_and_leave_torchs_generator_as_it_was():
    before = torch.default_generator.get_state()
    first = trial_config(RECIPE, {"seed": 1, "lr": 0.1}).build().state_dict()
    assert torch.equal(before, torch.default_generator.get_state())
    torch.rand(5)
    again = trial_config(RECIPE, {"seed": 1, "lr": 0.2}).build().state_dict()
    other = trial_config(RECIPE, {"seed": 2}).build().state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["1.weight"], other["1.weight"])


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"lr": -1.0}, "lr = -1.0"),
        ({"momentum": 0.9}, "AdamW has no option 'momentum'"),
        ({"optimizer": "adamx"}, "did you mean 'adam"),
        ({"lr_schedule": "cosin"}, "did you mean 'cosine'"),
        ({"precision": "fp16"}, "'fp16'"),
        ({"batch_size": 0}, "'batch_size' = 0"),
        ({"batch_size": 2.5}, "'batch_size' = 2.5"),
        ({"seed": -1}, "'seed' = -1"),
        ({"warmup_steps": -1}, "'warmup_steps' = -1"),
        ({"dropout": 1.0}, "'dropout' = 1.0"),
        ({"dropout": "much"}, "'dropout' = 'much'"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(params, word):
    with pytest.raises(TuneError, match=word):
        trial_config(RECIPE, params)


@pytest.mark.parametrize(("objectives", "word"), [(("acuracy",), "did you mean 'accuracy'"), ((), "an objective")])
def test_an_objective_without_a_metric_is_refused(objectives, word):
    with pytest.raises(TuneError, match=word):
        trial_config(Recipe(model=mlp, data=None, metrics={"accuracy": weft.accuracy}, objectives=objectives), {})


def test_the_model_takes_all_that_is_no_target_unless_inputs_are_named():
    batch = {"image": torch.ones(1), "mask": torch.zeros(1), "label": torch.ones(1)}
    assert trial_config(RECIPE, {}).enter(batch) == (batch["image"], batch["mask"])
    named = Recipe(model=mlp, data=None, model_inputs=("label", "image"))
    assert trial_config(named, {}).enter(batch) == (batch["label"], batch["image"])
    for recipe, one in ((named, {"image": torch.ones(1)}), (RECIPE, {"y": torch.ones(1)})):
        with pytest.raises(TuneError, match="model_inputs"):
            trial_config(recipe, {}).enter(one)


def test_a_model_that_is_no_module_is_refused():
    with pytest.raises(TuneError, match="int"):
        trial_config(Recipe(model=lambda _: 3, data=None), {}).build()


def test_data_made_by_a_function_is_made_once_for_many_trials():
    made = []

    def source():
        made.append(1)
        return weft.data.digits()

    recipe = Recipe(model=mlp, data=source)
    assert trial_config(recipe, {"lr": 0.1}).data() is trial_config(recipe, {"lr": 0.2}).data()
    assert made == [1]
    whole = weft.data.digits()
    assert trial_config(Recipe(model=mlp, data=whole), {}).data() is whole


@pytest.mark.parametrize(("before", "now"), list(OLD_FIELDS.items()))
def test_an_old_name_of_a_field_is_refused_with_the_new_one(before, now):
    with pytest.raises(TuneError, match=f"'{before}'.*'{now}'"):
        Recipe(model=mlp, data=None, **{before: 1})
    if now in FIELDS:
        space = weft.Space()
        space.integer(before, [1, 2])
        with pytest.raises(TuneError, match=f"'{before}'.*'{now}'"):
            check_recipe(RECIPE, space)
