"""Exported files: what they hold, that they compute what the module does, and that they come whole or not at all."""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from weft.errors import SupernetError, WeftError
from weft.space import Space, Subnet
from weft.supernet import Chain, Choice, Shared, export, extract
from weft.supernet.export import _check_near
from weft.utils.rng import torch_seeded

onnxruntime = pytest.importorskip("onnxruntime")
NETS = ("conv", "tuple")


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(tokens) * mask.unsqueeze(-1), mask


class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        length = mask.sum(1)
        return self.head(hidden.sum(1) / length.unsqueeze(-1)), length.long()


def conv_chain() -> tuple[Chain, Subnet]:
    space = Space()
    choice = Choice(space, "block", {"conv3": nn.Conv2d(4, 4, 3, padding=1), "conv5": nn.Conv2d(4, 4, 5, padding=2)})
    stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(4), nn.Dropout(0.5), nn.Linear(4, 10))
    chain = Chain(Shared(stem, "stem"), choice, Shared(head, "head"))
    chain(torch.randn(8, 1, 8, 8), space.subnet({"block": "conv3"}))  # moves the statistics of the batch norm
    return chain, space.subnet({"block": "conv3"})


def images(rows: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, 1, 8, 8),)


def texts(rows: int) -> tuple[Tensor, ...]:
    mask = (torch.rand(rows, 5) < 0.6).float()
    mask[:, 0] = 1
    return torch.randint(11, (rows, 5)), mask


@dataclass(frozen=True)
class Exported:
    module: nn.Module
    inputs: tuple[Tensor, ...]
    draw: Callable[[int], tuple[Tensor, ...]]
    folder: Path
    paths: dict[str, Path]
    program: Any
    session: Any

    def wanted(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return as_tuple(self.module(*inputs))


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    with torch_seeded("export"):
        chain, subnet = conv_chain()
        chains = Chain(Shared(Embed(), "embed"), Shared(Pool(), "pool"), inputs=("tokens", "mask"))
        example = texts(3)
        batch = dict(zip(("tokens", "mask"), example, strict=True))
        made: dict[str, tuple[nn.Module, tuple[Tensor, ...], Any]] = {
            "conv": (extract(chain, subnet), images(4), images),
            "tuple": (extract(chains, chains.space.subnet({}), batch), example, texts),
        }
    exported = {}
    for name, (module, inputs, draw) in made.items():
        folder = tmp_path_factory.mktemp("export") / name
        metadata = {"subnet": subnet, "scores": {"accuracy": np.float32(0.5)}, "command": ["weft", "export"]}
        paths = export(module, inputs, folder, metadata=metadata)
        exported[name] = Exported(module, inputs, draw, folder, paths, loaded(paths), session_of(paths))
    return exported


def as_tuple(found: Any) -> tuple[Any, ...]:
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def described(paths: dict[str, Path]) -> dict[str, Any]:
    return json.loads(paths["json"].read_text())


def loaded(paths: dict[str, Path]) -> Any:
    return torch.export.load(paths["torch"]).module()


def session_of(paths: dict[str, Path]) -> Any:
    return onnxruntime.InferenceSession(paths["onnx"], providers=["CPUExecutionProvider"])


def assert_same(found: Any, wanted: Any) -> None:
    for one, other in zip(as_tuple(found), as_tuple(wanted), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def assert_near(found: list[Any], wanted: Any) -> None:
    for one, other in zip(found, as_tuple(wanted), strict=True):
        _check_near("output", torch.from_numpy(np.asarray(one)), other)


@pytest.mark.parametrize("name", NETS)
def test_the_folder_holds_the_files_with_the_state_of_the_module_and_nothing_else(
    nets: dict[str, Exported], name: str
) -> None:
    net = nets[name]
    files = ["model.json", "model.onnx", "model.pt2", "model.safetensors"]
    assert sorted(path.name for path in net.folder.iterdir()) == files
    assert sorted(path.name for path in net.paths.values()) == files
    assert len({path.stat().st_mode for path in net.folder.iterdir()}) == 1
    state, saved = net.module.state_dict(), load_file(net.paths["safetensors"])
    assert saved.keys() == state.keys()
    assert_same([saved[name] for name in state], list(state.values()))
    parts = [path.read_bytes() for path in net.paths.values()]
    with zipfile.ZipFile(net.paths["torch"]) as archive:
        parts += [archive.read(name) for name in archive.namelist()]
    for part in parts:  # nobody learns from a file where its sources lay
        assert Path(__file__).name.encode() not in part
        assert str(Path.home()).encode() + b"/" not in part
        assert b"site-packages" not in part


def test_the_description_says_how_to_call_the_module_and_where_it_comes_from(nets: dict[str, Exported]) -> None:
    net = nets["tuple"]
    about = described(net.paths)
    known = list(distributions(name="weft"))  # none where the tests run on the sources, without an installation
    assert about["versions"] == {"torch": torch.__version__, "weft": known[0].version if known else None}
    assert {name: about[name] for name in ("subnet", "scores", "command")} == {
        "subnet": conv_chain()[1].to_json(),
        "scores": {"accuracy": 0.5},
        "command": ["weft", "export"],
    }
    assert about["dynamic_batch"] == {"torch": True, "onnx": True}
    assert about["files"] == {name: path.name for name, path in net.paths.items() if name != "json"}
    outputs = net.wanted(net.inputs)
    for key, names, values in (
        ("inputs", ("tokens", "mask"), net.inputs),
        ("outputs", ("output_0", "output_1"), outputs),
    ):
        assert [one["name"] for one in about[key]] == list(names)
        assert [one["shape"] for one in about[key]] == [list(value.shape) for value in values]
        assert [f"torch.{one['dtype']}" for one in about[key]] == [str(value.dtype) for value in values]
    for part, sizes in ((net.session.get_inputs(), [[5], [5]]), (net.session.get_outputs(), [[3], []])):
        assert [one.shape for one in part] == [["batch", *rest] for rest in sizes]


@pytest.mark.parametrize("name", NETS)
@settings(max_examples=12, deadline=None)
@given(rows=st.integers(1, 9), seed=st.integers(0, 99))
def test_the_programs_repeat_the_module_for_any_batch_torch_to_the_last_bit(
    nets: dict[str, Exported], name: str, rows: int, seed: int
) -> None:
    net = nets[name]
    with torch_seeded(seed, "rows"):
        inputs = net.draw(rows)
    with torch.no_grad():
        assert_same(net.program(*inputs), net.wanted(inputs))
    names = [one.name for one in net.session.get_inputs()]
    feed = {one: value.numpy() for one, value in zip(names, inputs, strict=True)}
    assert_near(net.session.run(None, feed), net.wanted(inputs))


FRESH = """
import sys
sys.modules["weft"] = None  # so that an import of it fails
import numpy as np, torch
case = np.load(sys.argv[1] + "/case.npz")
found = torch.export.load(sys.argv[1] + "/model.pt2").module()(*(torch.from_numpy(case[name]) for name in case.files))
np.savez(sys.argv[1] + "/found.npz", *(value.detach().numpy() for value in found))
"""


def test_the_torch_program_runs_in_a_process_that_cannot_import_weft(nets: dict[str, Exported], tmp_path: Path) -> None:
    net = nets["tuple"]
    shutil.copy(net.paths["torch"], tmp_path)
    inputs = net.draw(6)
    np.savez(tmp_path / "case.npz", *(value.numpy() for value in inputs))
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # other counts may round otherwise
    subprocess.run([sys.executable, "-I", "-c", FRESH, str(tmp_path)], check=True, env=os.environ | threads)
    found = np.load(tmp_path / "found.npz")
    assert_same([torch.from_numpy(found[name]) for name in found.files], net.wanted(inputs))


def test_the_module_and_its_inputs_and_the_process_are_left_as_they_were(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    module[0].eval()
    module[0].weight.requires_grad_(False)
    module[1].weight.grad = torch.ones(4)
    inputs = (torch.randn(5, 3, requires_grad=True),)

    def state() -> list[Any]:
        tensors = [*module.state_dict(keep_vars=True).values(), *inputs]
        facts = [(id(one), one.data_ptr(), one.requires_grad, one.grad is None, one.tolist()) for one in tensors]
        flags = [(name, part.training, sorted(vars(part))) for name, part in module.named_modules()]
        torch_state = torch.get_rng_state().tolist(), torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled()
        streams = sys.stdout, sys.stderr, list(warnings.filters), logging.root.manager.disable
        return [facts, flags, [sorted(vars(one)) for one in inputs], torch_state, streams]

    before = state()
    paths = export(module, inputs, tmp_path, ["torch"])
    assert state() == before
    with torch.no_grad():  # dropout is off in the files, whatever the module's own mode
        assert_same(loaded(paths)(*inputs), copy.deepcopy(module).eval()(*inputs))


class Baked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(4, 2, 3).sum(1)


def test_a_module_with_a_fixed_batch_is_exported_for_that_batch_and_the_reason_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = (torch.randn(4, 6),)
    paths = export(Baked(), inputs, tmp_path)
    assert described(paths)["dynamic_batch"] == {"torch": False, "onnx": False}
    messages = [record.getMessage() for record in caplog.records if record.name == "weft.supernet"]
    assert ["constant (4)" in message for message in messages] == [True, True]
    assert_same(loaded(paths)(*inputs), Baked()(*inputs))
    assert session_of(paths).get_inputs()[0].shape == [4, 6]
    assert_near(session_of(paths).run(None, {"x": inputs[0].numpy()}), Baked()(*inputs))


class Squares(nn.Module):
    def forward(self, x: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
        return x @ square, x.sum()


@pytest.mark.parametrize(
    ("make", "example", "others"),
    [
        # A second input that only happens to be as long as the batch keeps its shape.
        (Squares, [(6, 6), (6, 6)], [[(9, 6), (6, 6)]]),
        # An example of a single row gives a program for any batch.
        (lambda: nn.Linear(3, 2), [(1, 3)], [[(1, 3)], [(2, 3)], [(5, 3)]]),
        # With gradients, the layer itself takes the path that was traced, and not the fused one.
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), [(3, 5, 8)], [[(3, 5, 8)], [(4, 5, 8)]]),
    ],
    ids=["square", "row", "attention"],
)
def test_a_program_takes_other_batches_than_that_of_the_example(
    make: Callable[[], nn.Module], example: list[Any], others: list[list[Any]], tmp_path: Path
) -> None:
    with torch_seeded("shapes"):
        module = make().eval()
        paths = export(module, tuple(torch.randn(shape) for shape in example), tmp_path)
        assert described(paths)["dynamic_batch"] == {"torch": True, "onnx": True}
        program, session = loaded(paths), session_of(paths)
        assert [one.shape for one in session.get_inputs()][1:] == [list(shape) for shape in example[1:]]
        for shapes in others:
            inputs = tuple(torch.randn(shape) for shape in shapes)
            assert_same(program(*inputs), module(*inputs))
            feed = {one.name: value.numpy() for one, value in zip(session.get_inputs(), inputs, strict=True)}
            assert_near(session.run(None, feed), [value.detach() for value in as_tuple(module(*inputs))])


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", dtype=torch.bfloat16)]
)
def test_the_mode_in_which_export_is_called_is_no_part_of_the_program(mode: Any, tmp_path: Path) -> None:
    with mode():
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
        paths = export(module, (torch.randn(5, 3),), tmp_path, "torch")
    assert described(paths)["outputs"] == [{"name": "output", "shape": [5, 4], "dtype": "float32"}]
    nodes = torch.export.load(paths["torch"]).graph.nodes
    calls = [str(node.target) for node in nodes if node.op == "call_function"]
    assert calls == ["aten.linear.default", "aten.batch_norm.default"]


def test_tied_weights_and_views_are_saved_as_they_look(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    module.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T)
    module.register_buffer("slice", torch.arange(10.0)[2:5])
    saved = load_file(export(module, (torch.ones(3, 4),), tmp_path, "safetensors")["safetensors"])
    assert saved.keys() == module.state_dict().keys()
    assert_same([saved[name] for name in module.state_dict()], list(module.state_dict().values()))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"formats": ["torch", "onxx"]}, "unknown format 'onxx'; did you mean 'onnx'"),
        ({"formats": []}, "at least one format"),
        ({"inputs": torch.ones(1, 2)}, "tuple of example tensors"),
        ({"inputs": ([1.0, 2.0],)}, "tuple of example tensors"),
        ({"inputs": (torch.ones(1, 3),)}, "cannot be exported with these inputs: .*mat"),
        ({"inputs": (torch.ones(1, 2), torch.ones(1, 2))}, "cannot be exported with these inputs: .*arguments"),
        ({"metadata": {"inputs": []}}, "the key 'inputs' of model.json is written by export"),
        ({"metadata": {"scores": {"loss": float("nan")}}}, "cannot be written to model.json"),
        ({"metadata": {"subnet": object()}}, "use numbers, strings, lists or mappings"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_anything_is_written(
    arguments: dict[str, Any], word: str, tmp_path: Path
) -> None:
    with pytest.raises(SupernetError, match=word):
        export(nn.Linear(2, 2), **{"inputs": (torch.ones(1, 2),), "folder": tmp_path / "new", **arguments})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_before_anything_is_written(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # import now fails, as if it were not installed
    with pytest.raises(SupernetError, match=rf"needs {package}: pip install -e .\.\[onnx\]"):
        export(nn.Linear(2, 2), (torch.ones(1, 2),), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    export(nn.Linear(2, 2), (torch.ones(1, 2),), tmp_path / "new", ["safetensors"])  # which needs none of them


class Dice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else 2 * x


@pytest.mark.parametrize(
    ("module", "formats", "word"),
    [
        (Dice(), ["safetensors", "torch"], "does not repeat the outputs of the module to the last bit"),
        (Branch(), ["safetensors", "torch"], r"torch.export cannot trace .*formats=\('safetensors',\)"),
        (nn.Linear(4, 4).bfloat16(), ["torch", "onnx"], "ONNX cannot hold the module: .*; leave 'onnx' out"),
    ],
)
def test_an_export_that_fails_leaves_the_folder_as_it_was_and_one_that_does_not_replaces_its_files(
    module: nn.Module, formats: list[str], word: str, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    for size in (3, 4):
        paths = export(nn.Linear(size, size), (torch.ones(2, size),), old, ["safetensors"])
        assert described(paths)["inputs"][0]["shape"] == [2, size]
        assert load_file(paths["safetensors"])["weight"].shape == (size, size)
    before = {path: path.read_bytes() for path in old.iterdir()}
    assert {path.name for path in before} == {"model.json", "model.safetensors"}
    x = torch.ones(2, 4, dtype=next(iter(module.state_dict().values()), torch.ones(1)).dtype)
    for folder in (old, tmp_path / "new"):
        with pytest.raises(SupernetError, match=word):
            export(module, (x,), folder, formats)
    assert list(tmp_path.iterdir()) == [old]
    assert {path: path.read_bytes() for path in old.iterdir()} == before


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(WeftError, match=r"cannot write '.*taken'"):
        export(nn.Linear(2, 2), (torch.ones(1, 2),), tmp_path / "taken", ["safetensors"])
    assert (tmp_path / "taken").read_text() == "mine"


QUIET = """
import sys
import weft.supernet
heavy = {"onnx", "onnxscript", "onnxruntime", "torch.onnx._internal.exporter._core", "torch._dynamo"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
import logging, warnings
import torch
from torch import nn

class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else 2 * x

logging.getLogger("weft").addHandler(logging.NullHandler())
warnings.simplefilter("always")
try:
    weft.supernet.export(Branch(), (torch.ones(2, 2),), sys.argv[1], ["torch"])
except weft.errors.SupernetError:
    pass
weft.supernet.export(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), (torch.ones(2, 1, 5, 5),), sys.argv[1])
logging.getLogger("torch.export").warning("logged afterwards")
print("printed")
"""


def test_nothing_is_printed_and_heavy_packages_are_imported_only_when_needed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", QUIET, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "printed\n"
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.strip().endswith("logged afterwards")


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_an_onnx_output_is_near_within_the_tolerance_of_its_scale_and_type(scale: float) -> None:
    wanted = torch.from_numpy(np.random.Generator(np.random.PCG64(0)).normal(size=6) * scale)
    step = torch.eye(6)[2] * (1e-5 * wanted.abs().max() + 1e-4 * wanted.abs())
    _check_near("output", wanted + 0.5 * step, wanted)
    for other in (wanted + 2 * step, wanted.float(), wanted[None], wanted * np.nan):
        with pytest.raises(SupernetError, match="output"):
            _check_near("output", other, wanted)
