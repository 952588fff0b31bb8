"""Configurations: what TOML and overrides mean, what is refused and in which words, and how code is found by name."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft import zoo
from weft.cli import build
from weft.config import (
    RENAMED,
    Config,
    DataSource,
    ExecutionTable,
    Export,
    NamedSource,
    RunTable,
    Search,
    Train,
    make_config,
    modern,
    read_config,
)
from weft.engine.optimizer import Optimizer
from weft.errors import ConfigError, TrainError, WeftError
from weft.offload.config import OffloadConfig
from weft.supernet import Chain
from weft.trainer.config import Execution, TrainConfig
from weft.utils.imports import import_object

LEAST = {"supernet": "digits-mlp"}


@pytest.fixture(autouse=True)
def own_code_is_forgotten() -> Iterator[None]:
    paths, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = paths
    for name in set(sys.modules) - modules:
        if name.startswith("cfg_"):
            del sys.modules[name]


def refusal(values: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        make_config(values, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_supernet_is_all_that_a_config_must_name() -> None:
    assert make_config(LEAST) == Config("digits-mlp")
    assert "supernet" in refusal({})


def test_a_file_and_overrides_make_one_config(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('supernet = "mine:build"\n[train]\nsteps = 7\nseed = 1\n[search]\nmaximize = ["accuracy"]\n')
    config = read_config(
        path, ["--train.steps=8", "--train.steps=9", "--train.batch-size=8", "--search.minimize=flops", "--run=a"]
    )
    assert (config.supernet, config.run.name) == ("mine:build", "a")
    assert (config.train.steps, config.train.seed, config.train.batch_size) == (9, 1, 8)
    assert (config.search.maximize, config.search.minimize) == (("accuracy",), "flops")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("--optimizer.clip=1", lambda c: c.optimizer == {"clip": 1.0}),
        ("--optimizer.clip=.5", lambda c: c.optimizer == {"clip": 0.5}),
        ("--optimizer.clip=global:1.0", lambda c: c.optimizer == {"clip": "global:1.0"}),
        ("--execution.cuda_graphs=false", lambda c: c.execution.cuda_graphs is False),
        ('--run.metrics=["accuracy", "m:f"]', lambda c: c.run.metrics == ("accuracy", "m:f")),
        ("--run.metrics=accuracy", lambda c: c.run.metrics == "accuracy"),
        ("--run.validation=7", lambda c: c.run.validation == 7),
        ("--run.validation={every=3, random=1}", lambda c: c.run.validation.random == 1),
        ("--offload.budget=1GiB", lambda c: c.offload.budget == "1GiB"),
        ("--offload.budget=1000", lambda c: c.offload.budget == "1000"),
        ("--search.constraints=flops<=5e7", lambda c: c.search.constraints == "flops<=5e7"),
        ("--optimizer.betas=[0.9, 0.99]", lambda c: c.optimizer == {"betas": [0.9, 0.99]}),
        ("--consistency=lagged(2)", lambda c: c.consistency == "lagged(2)"),
        ("--consistency.my-block.k-3=exact", lambda c: c.consistency == {"my-block.k-3": "exact"}),
        ("--supernet.options.blocks=3", lambda c: c.supernet == NamedSource("digits-mlp", {"blocks": 3})),
        ("--data.source=x.npz", lambda c: c.data == DataSource("x.npz")),
        ("--data.path=input.txt", lambda c: c.data == DataSource("x.npy", path="input.txt")),
        ("--data.path=7", lambda c: c.data == DataSource("x.npy", path="7")),
        ("--export.subnet={}", lambda c: c.export.subnet == "{}"),
        ("--export.limits.flops=2", lambda c: c.export.limits == {"flops": 2.0}),
    ],
)
def test_an_override_sets_the_value_that_it_names(override: str, value: Any) -> None:
    assert value(make_config(LEAST, [override] if "data" not in override else ["--data=x.npy", override]))


@pytest.mark.parametrize("text", ["7", "001", "5e12", "12e34567", "true", "1.5", "2026-01-01", "inf", "-3"])
def test_where_text_is_wanted_a_number_stays_text(text: str) -> None:
    config = make_config(LEAST, [f"--run={text}", f"--export.subnet={text}", f"--train.augment={text}"])
    assert (config.run.name, config.export.subnet, config.train.augment) == (text, text, text)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--train.microbatch=3"], "unknown key 'train.microbatch'; did you mean 'train.microbatches'?"),
        (["--steps=3"], "unknown key 'steps'; did you mean 'train.steps'?"),
        (["--data.sorce=3"], "unknown key 'data.sorce'; did you mean 'data.source'?"),
        (["--supernet.path=3"], "unknown key 'supernet.path'; known: source, options"),
        (["--train.steps=x"], "'train.steps' must be int, not str"),
        (["--execution.cuda_graphs=1"], "'execution.cuda_graphs' must be bool, not int"),
        (["--train=3"], "'train' must be table, not int"),
        (["--run.metrics=[1]"], "'run.metrics[0]' must be str, not int"),
        (["--search.maximize={a=1}"], "must be str or list, not table"),
        (["--offload.budget=[]"], "'offload.budget' must be int or str or nothing, not list"),
        (["--consistency=exact", "--consistency.stem=exact"], "'consistency' is a value, not a table"),
        (["--train.steps=1", "--train.steps.x=1"], "'steps' is a value, not a table"),
        (["train.steps=1"], "cannot read 'train.steps=1': an override is written --a.b=c"),
    ],
)
def test_a_key_or_type_that_is_wrong_is_refused_in_these_words(overrides: list[str], words: str) -> None:
    assert words in refusal(LEAST, *overrides)


def test_a_key_with_a_new_name_is_refused_with_that_name() -> None:
    for before, now in RENAMED.items():
        assert refusal(LEAST, f"--{before}=1") == f"the key '{before}' has another name now: '{now}'"


def test_the_configuration_in_an_old_manifest_is_read_under_todays_keys() -> None:
    train = dict.fromkeys(
        ("augment", "channels_last", "clip", "cut", "init", "placement", "ranks", "rescale", "teacher")
    )
    train |= {"batch_size": 64, "flow": False, "keep": 2, "metrics": ["accuracy"], "nonfinite": "skip", "restarts": 1}
    train |= {"prefer": "alternate", "schedule": "linear", "split_backward": "defer", "steps": 20, "stages": 2}
    train |= {"threads": 1, "trace": True, "validate": 200, "warmup": 3, "window": None, "workers": 0, "device": "cpu"}
    offload = {"ahead": 16, "budget": "1GiB", "disk": None, "host": None}
    old = {"supernet": "digits-mlp", "run": "spirals", "runs": "kept", "train": train, "residency": offload}
    now: dict[str, Any] = {
        "train": {"batch_size": 64, "on_nonfinite": "skip", "steps": 20},
        "optimizer": {"kind": "adamw", "lr": 0.01, "schedule": "linear", "warmup_steps": 3},
        "offload": {"budget": "1GiB", "prefetch": 16},
        "run": {"name": "spirals", "folder": "kept", "keep_checkpoints": 2, "validation": 200},
        "execution": {"max_restarts": 1, "pipeline_schedule": "naspipe", "split_backward": True, "stages": 2},
    }
    now["run"]["metrics"], now["execution"] = ["accuracy"], {**now["execution"], "threads": 1, "trace": True}
    config = make_config(modern({**old, "optimizer": {"kind": "adamw", "lr": 0.01}}))
    assert msgspec.to_builtins(config) == msgspec.to_builtins(make_config({**LEAST, **now}))


@given(
    table=st.sampled_from(["train", "execution", "run", "search", "export"]),
    key=st.text(st.sampled_from("abcdefghij_"), min_size=1, max_size=12),
)
def test_every_key_is_either_known_or_refused_with_its_name(table: str, key: str) -> None:
    tables = {"train": Train, "execution": ExecutionTable, "run": RunTable, "search": Search, "export": Export}
    known: Any = tables[table]
    if key in {field.name for field in msgspec.structs.fields(known)} or f"{table}.{key}" in RENAMED:
        return
    assert refusal({**LEAST, table: {key: 1}}).startswith(f"unknown key '{table}.{key}'; ")


@given(
    steps=st.integers(1, 10**6),
    validation=st.none() | st.integers(1, 9) | st.fixed_dictionaries({"every": st.integers(1, 9)}),
    names=st.lists(st.sampled_from(["accuracy", "m:f", "flops"]), max_size=3),
    options=st.dictionaries(st.sampled_from(["lr", "momentum"]), st.floats(0, 1)),
)
def test_a_config_reads_back_what_it_wrote(
    steps: int, validation: Any, names: list[str], options: dict[str, float]
) -> None:
    tables = {"train": {"steps": steps}, "run": {"validation": validation, "metrics": names}}
    given = {**LEAST, **tables, "optimizer": options, "search": {"maximize": names}}
    before = copy.deepcopy(given)
    config = make_config(given, ["--train.seed=3", "--optimizer.clip=1"])
    assert make_config(msgspec.to_builtins(config)) == config
    assert given == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file or directory"),
        (b"supernet = ", "is not TOML: Invalid value"),
        (b"supernet = 'a'\nsupernet = 'b'", "is not TOML: Cannot overwrite a value"),
        (b"\xff\xfe", "cannot read the config"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "c.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_code_is_found_in_the_folder_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "cfg_package").mkdir()
    (tmp_path / "cfg_package" / "inner.py").write_text("class A:\n    b = 5\n")
    assert import_object("cfg_package.inner:A.b", tmp_path) == 5
    assert import_object("weft.zoo:digits_conv", tmp_path) is zoo.digits_conv


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("cfg_none:build", "no module 'cfg_none' in"),
        ("cfg_some:buld", "'cfg_some' has no 'buld'; did you mean 'build'?"),
        ("cfg_broken:build", "importing 'cfg_broken' fails: ZeroDivisionError: division by zero"),
        ("cfg_needs:build", "importing 'cfg_needs' fails: No module named 'cfg_absent'"),
        ("cfg_syntax:build", "importing 'cfg_syntax' fails: SyntaxError"),
        ("../cfg_some:build", "write it as 'module:attribute'"),
        ("cfg_some:build()", "write it as 'module:attribute'"),
        ("textwrap:build", "the name 'textwrap' is taken by"),
        ("sys:build", "the name 'sys' is taken by Python itself"),
    ],
)
def test_code_that_cannot_be_imported_is_named(tmp_path: Path, spec: str, words: str) -> None:
    import textwrap  # noqa: F401, already imported, as Python's own modules often are

    texts = {"cfg_broken": "1 / 0", "cfg_needs": "import cfg_absent", "cfg_syntax": "def"}
    for name in ("cfg_some", "textwrap", "sys", *texts):
        (tmp_path / f"{name}.py").write_text(texts.get(name, "def build(): ..."))
    with pytest.raises(ConfigError) as caught:
        import_object(spec, tmp_path)
    assert words in str(caught.value)
    assert spec in str(caught.value)


OWN = """
import torch
from functools import partial
from torch import nn
from weft import Chain, Choice, Distillation, Shared, Space, Tensors, Data

def build(width=4):
    space = Space()
    return Chain(Choice(space, "a", {"p": partial(nn.Linear, 4, width), "q": partial(nn.Linear, 4, width)}))

ready = build()
number = 3

def load(samples=8):
    return {"x": torch.ones(samples, 4), "y": torch.zeros(samples, 4)}

def loss(outputs, batch):
    return ((outputs - batch["y"]) ** 2).mean()

def metric(outputs, batch):
    return outputs.sum(), len(outputs)

def schedule(step, steps):
    return 0.5

class Augment:
    def __call__(self, batch, draws):
        return batch

class Fails:
    def __init__(self):
        raise ValueError("no luck")

def taught():
    return Distillation(nn.Linear(4, 4))

class Lion(torch.optim.SGD):
    pass

def groups(name, parameter):
    return {"weight_decay": 0.0}
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "cfg_own.py").write_text(OWN)
    return tmp_path


def test_a_supernet_comes_from_the_zoo_or_from_ones_own_code(own: Path) -> None:
    assert build.supernet_of(make_config(LEAST), own) is zoo.digits_mlp
    made = build.supernet_of(make_config({"supernet": {"source": "cfg_own:build", "options": {"width": 6}}}), own)
    assert not isinstance(made, Chain)
    assert (type(made()), made.keywords) == (Chain, {"width": 6})
    assert isinstance(build.supernet_of(make_config({"supernet": "cfg_own:ready"}), own), Chain)


@pytest.mark.parametrize(
    ("overrides", "error", "words"),
    [
        (["--supernet=cfg_own:number"], ConfigError, "supernet 'cfg_own:number' is int"),
        (["--supernet.options.blcks=2"], ConfigError, "supernet.options do not fit 'digits-mlp'"),
        (["--data=cfg_own:load", "--data.options.n=2"], ConfigError, "data.options do not fit 'cfg_own:load'"),
        (["--data=digits", "--data.options.sed=2"], WeftError, "unknown option 'sed' for digits; did you mean 'seed'?"),
        (["--train.loss=cross_entrpy"], ConfigError, "did you mean 'cross_entropy'"),
        (["--train.loss=cfg_own:number"], ConfigError, "train.loss: 'cfg_own:number' is int, which cannot be called"),
        (["--train.augment=cfg_own:Fails"], ConfigError, "'cfg_own:Fails' cannot be made: ValueError: no luck"),
        (["--optimizer.schedule=cfg_own:number"], ConfigError, "optimizer.schedule"),
        (["--optimizer.kind=sdg"], TrainError, "unknown optimizer 'sdg'; did you mean 'sgd'?"),
        (["--optimizer.kind=3"], ConfigError, "optimizer.kind must be text, not int"),
        (["--optimizer.kind=cfg_own:build"], ConfigError, "is not a class of optimizers"),
        (["--optimizer.kind=muon", "--optimizer.others=sgd"], ConfigError, "optimizer.others must be a table"),
    ],
)
def test_what_a_config_names_and_does_not_exist_is_refused(
    own: Path, overrides: list[str], error: type[Exception], words: str
) -> None:
    def assemble() -> None:
        config = make_config(LEAST, overrides)
        build.supernet_of(config, own)
        build.data_of(config, own)
        build.train_parts(config, own)

    with pytest.raises(error) as caught:
        assemble()
    assert words in str(caught.value)


def test_every_function_of_a_run_can_be_ones_own(own: Path) -> None:
    functions = {"train.loss": "loss", "train.augment": "Augment", "run.metrics": "metric"}
    functions |= {"optimizer.schedule": "schedule", "optimizer.groups": "groups", "optimizer.kind": "Lion"}
    overrides = [f"--{key}=cfg_own:{name}" for key, name in functions.items()]
    config, _, run = build.train_parts(make_config(LEAST, overrides), own)
    module = sys.modules["cfg_own"]
    made = config.optimizer
    assert (config.loss, made.schedule, made.groups) == (module.loss, module.schedule, module.groups)
    assert made.describe()["kind"].endswith("Lion")
    assert run.metrics == {"metric": module.metric}
    assert isinstance(config.augment, module.Augment)
    taught = build.train_parts(make_config(LEAST, ["--train.loss=cfg_own:taught"]), own)[0].loss
    assert type(taught).__name__ == "Distillation"


def optimizer(folder: Path, *overrides: str) -> Optimizer:
    made = build.train_parts(make_config(LEAST, [f"--optimizer.{override}" for override in overrides]), folder)
    assert isinstance(made[0].optimizer, Optimizer)
    return made[0].optimizer


def test_an_optimizer_in_a_config_is_that_of_python(own: Path) -> None:
    usual = Optimizer().options
    assert optimizer(own).options == usual
    assert optimizer(own, "lr=0.5").options == {**usual, "lr": 0.5}
    assert optimizer(own, "kind=adamw", "lr=0.5").options == {"lr": 0.5}
    recipe = optimizer(own, "schedule=cosine:0.1", "kind=adamw", "groups=matrices", "warmup_steps=3", "clip=global:2")
    assert (recipe.schedule, recipe.warmup_steps, str(recipe.clip)) == ("cosine:0.1", 3, "global:2")
    assert recipe.describe()["groups"] == "matrices"
    with pytest.raises(TrainError, match="did you mean 'matrices'"):
        optimizer(own, "groups=matrixes")


def test_every_field_of_a_training_can_be_set_in_a_file(own: Path) -> None:
    values: dict[str, Any] = {"train": {"steps": 7, "batch_size": 6, "microbatches": 3, "precision": "bf16"}}
    values |= {"execution": {"stages": 2, "cut": [3], "max_in_flight": 4, "split_backward": True}}
    values |= {"run": {"name": "x", "folder": "y", "checkpoint_every": 3, "keep_checkpoints": 2}}
    values |= {"offload": {"budget": "2MiB"}}
    parts = build.train_parts(make_config({**LEAST, **values}), own)
    for part, table in zip(parts, ("train", "execution", "run"), strict=True):
        assert {name: getattr(part, name) for name in values[table]} == {
            name: tuple(value) if isinstance(value, list) else value for name, value in values[table].items()
        }
    assert isinstance(parts[1].offload, OffloadConfig)
    assert build.train_parts(make_config(LEAST), own)[:2] == (TrainConfig(consistency=None), Execution())


def test_a_path_beside_the_source_goes_to_what_reads_the_data(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own / "code").mkdir()
    (own / "code" / "words.data").write_text("a text of some length, with letters in it. " * 20)
    (own / "here").mkdir()
    monkeypatch.chdir(own / "here")

    def data(*overrides: str) -> Any:
        return build.data_of(make_config(LEAST, [*overrides, "--data.options.context=4"]), own / "code")

    beside = data("--data.source=text", "--data.path=words.data")
    assert beside.name == "words"
    (own / "code" / "plain.txt").write_text("plain letters " * 30)
    assert data("--data.source=plain.txt").name == "plain"  # from the folder of the config
    (own / "here" / "other.txt").write_text("letters " * 30)
    assert data("--data.source=text", "--data.path=other.txt").name == "other"
    assert data("--data.path=other.txt").name == "other"  # what lies there says of what kind it is
    (own / "code" / "other.txt").write_text("other letters " * 30)
    assert "h" in data("--data.path=other.txt").info["vocabulary"]
    (own / "code" / "text").mkdir()  # not meant by the name of a kind, where there is a path
    assert data("--data.source=text", "--data.path=words.data").fingerprint() == beside.fingerprint()
    for overrides, words in {
        ("--data.source=text", "--data.path=none.txt"): "data.path = 'none.txt': there is no such file or folder",
        ("--data.path=words.data",): "cannot tell what kind of data",
        ("--data.source=digits", "--data.path=words.data"): "unknown option 'path' for digits",
        ("--data.source=other.txt", "--data.path=words.data"): "unknown kind of data 'other.txt'",
        ("--data.source=text", "--data.path=words.data", "--data.options.path=x"): "are one and the same",
        (): "the config lacks 'data.source'",
    }.items():
        with pytest.raises(WeftError, match=words):
            data(*overrides)


OWN_TEXT = """
from weft import Data
from weft.data import text
from weft.zoo import digits_mlp

def build(vocabulary, width=4):
    return digits_mlp(classes=vocabulary, width=width)

def words(path, context):
    return text(context, path)
"""


def classes(net: Any) -> int:
    return int(net().head.factory().out_features)


def test_a_supernet_with_a_vocabulary_gets_the_size_of_the_datas_unless_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "cfg_text.py").write_text(OWN_TEXT)
    (tmp_path / "words.txt").write_text("abcde" * 40)
    text = {"source": "text", "path": "words.txt", "options": {"context": 4}}

    def net(supernet: Any, data: Any, given: Any = None) -> Any:
        return build.supernet_of(make_config({"supernet": supernet, "data": data}), tmp_path, given)

    assert classes(net("cfg_text:build", text)) == 5
    assert classes(net("cfg_text:build", {**text, "source": "cfg_text:words"})) == 5
    assert classes(net("cfg_text:build", {**text, "options": {"context": 4, "tokens": "bytes"}})) == 256
    assert classes(net({"source": "cfg_text:build", "options": {"vocabulary": 9}}, text)) == 9
    given = build.data_of(make_config({**LEAST, "data": text}), tmp_path)
    assert classes(net("cfg_text:build", "no such data is read", given)) == 5
    made = net({"source": "gpt", "options": {"layers": 1, "width": 12, "context": 4}}, text)
    assert made().head.factory().out.out_features == 5
    assert made.keywords == {"layers": 1, "width": 12, "context": 4, "vocabulary": 5}
    assert net("gpt", "digits") is zoo.language_model  # images have none: its own default
    with pytest.raises(ConfigError, match=r"supernet\.options do not fit .*'vocabulary'"):
        net("cfg_text:build", "digits")


def test_the_number_of_threads_is_the_configs(own: Path) -> None:
    build.set_threads(make_config(LEAST, ["--execution.threads=1"]))
    assert torch.get_num_threads() == 1
    with pytest.raises(TrainError, match=r"threads=0: a whole number, 1 or more"):
        build.set_threads(make_config(LEAST, ["--execution.threads=0"]))
