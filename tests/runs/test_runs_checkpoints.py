from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.errors import CheckpointError, RunError
from weft.runs import Checkpoints, shards
from weft.utils.rng import generator

DTYPES = sorted(shards.DTYPES, key=str)


def random_tensor(seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Any bit pattern of the dtype, NaNs among them."""
    count = torch.empty(shape, dtype=dtype).numel()
    draw = generator(seed, str(dtype), *shape)
    if dtype == torch.bool:
        return torch.from_numpy(draw.integers(0, 2, count).astype(bool)).reshape(shape)
    raw = draw.integers(0, 256, count * dtype.itemsize).astype("uint8")
    return torch.from_numpy(raw).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def assert_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        a, b = left[name], right[name]
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        raw = [x.contiguous().reshape(-1).view(torch.uint8).tolist() for x in (a, b)]
        assert raw[0] == raw[1], name


def example(seed: int = 0) -> dict[str, Tensor]:
    return {
        "block0.conv3.weight": random_tensor(seed, torch.float32, (4, 3)),
        "block0.conv3.weight#exp_avg": random_tensor(seed, torch.bfloat16, (4, 3)),
        "block0.conv3.weight#step": torch.tensor(7, dtype=torch.int64),
        "stem.mask": torch.tensor([True, False, True]),
        "stem.empty": torch.empty(0, 5),
    }


def test_a_checkpoint_on_disk_is_a_folder_of_safetensors_and_a_manifest(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(1200, example(), {"loss": 0.5})
    assert path == tmp_path / "step-00001200"
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "shard0.safetensors"]
    assert_same(safetensors.torch.load_file(path / "shard0.safetensors"), example())
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["step"], manifest["meta"]) == (1200, {"loss": 0.5})
    (shard,) = manifest["shards"]
    assert shard["bytes"] == (path / "shard0.safetensors").stat().st_size
    assert shard["layers"] == {
        "block0.conv3": ["block0.conv3.weight", "block0.conv3.weight#exp_avg", "block0.conv3.weight#step"],
        "stem": ["stem.empty", "stem.mask"],
    }


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4).map(tuple), st.booleans()),
        max_size=5,
    ),
    st.integers(0, 2**63),
)
def test_every_tensor_comes_back_bit_by_bit(kinds: dict[str, Any], step: int) -> None:
    tensors = {name: random_tensor(step, dtype, shape) for name, (dtype, shape, _) in kinds.items()}
    tensors = {name: tensor.T if kinds[name][2] and tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        Checkpoints(folder).save(step, tensors, {"names": sorted(tensors)})
        got = Checkpoints(folder).load()
        assert (got.step, got.meta) == (step, {"names": sorted(tensors)})
        assert_same(got.tensors, tensors)


def test_views_shared_memory_and_parameters_are_saved_by_value(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "a.view": base[1:, ::2],
        "b.same": base,
        "c.expanded": torch.tensor([1.0]).expand(3, 2),
        "d.parameter": torch.nn.Parameter(base.T),
        "e.negative": torch.tensor([1 + 2j]).conj().imag,
    }
    Checkpoints(tmp_path).save(1, tensors, {})
    want = {name: tensor.tolist() for name, tensor in tensors.items()}
    got = Checkpoints(tmp_path).load(1).tensors
    assert {name: tensor.tolist() for name, tensor in got.items()} == want
    folder = tmp_path / "step-00000001"
    with open(folder / "shard0.safetensors", "r+b") as file:
        file.write(bytes((folder / "shard0.safetensors").stat().st_size))
    assert {name: tensor.tolist() for name, tensor in got.items()} == want  # what is loaded is shared with nothing


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_tensors_on_a_gpu_are_saved_by_value(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(1, {name: tensor.cuda() for name, tensor in example().items()}, {})
    assert_same(Checkpoints(tmp_path).load(1).tensors, example())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2, dtype=torch.complex64), "cannot hold tensor 'stem.w'"),
        (torch.eye(2).to_sparse(), "cannot hold tensor 'stem.w'"),
        (torch.empty(2, device="meta"), "cannot hold tensor 'stem.w'"),
        ({"seen": 3}, "cannot hold 'stem.w', a dict: it takes tensors"),
    ],
    ids=["complex", "sparse", "meta", "dict"],
)
def test_a_tensor_that_cannot_be_saved_is_named(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoints(tmp_path).save(1, {"stem.w": value}, {})
    assert list(tmp_path.iterdir()) == []


def test_only_the_last_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 10, 100_000_000, 20):
        checkpoints.save(step, {"a.b": torch.tensor(step)}, {})
    assert checkpoints.steps() == [20, 100_000_000]
    checkpoints.save(3, {}, {})  # of a run that was resumed from an early step
    assert checkpoints.steps() == [3, 20, 100_000_000]
    with pytest.raises(CheckpointError, match="keep must be 1 or more"):
        Checkpoints(tmp_path, keep=0)


def test_a_step_is_published_once(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, example(0), {"n": 0})
    for again in (checkpoints, Checkpoints(tmp_path)):
        with pytest.raises(CheckpointError, match=r"step 1 has a checkpoint .* already"):
            again.save(1, {"other.w": torch.ones(3)}, {"n": 1})
    entry = checkpoints.write_shard(1, "stage0", {"other.w": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"step 1 has a checkpoint .* already"):
        checkpoints.publish(1, [entry], {"n": 1})
    got = checkpoints.load(1)
    assert got.meta == {"n": 0}
    assert_same(got.tensors, example(0))
    checkpoints.save(2, {}, {})  # which tidies up
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    checkpoints.drop_after(0)
    checkpoints.save(1, {"other.w": torch.ones(3)}, {"n": 1})  # a run that went back
    assert checkpoints.load(1).meta == {"n": 1}


def test_shards_of_several_writers_become_one_checkpoint_when_published(tmp_path: Path) -> None:
    first, second = Checkpoints(tmp_path), Checkpoints(tmp_path)
    entries = [first.write_shard(3, "stage0", {"a.w": torch.ones(2)})]
    entries.append(second.write_shard(3, "stage1", {"b.w": torch.zeros(3)}))
    second.write_shard(3, "stage2", {"left.over": torch.zeros(3)})  # of a writer that was killed
    later = first.write_shard(4, "stage0", {"a.w": torch.zeros(2)})  # which the publication of step 3 leaves alone
    assert Checkpoints(tmp_path).steps() == []
    first.publish(3, entries, {})
    assert_same(Checkpoints(tmp_path).load().tensors, {"a.w": torch.ones(2), "b.w": torch.zeros(3)})
    assert sorted(path.name for path in (tmp_path / "step-00000003").iterdir()) == [
        "manifest.json",
        "stage0.safetensors",
        "stage1.safetensors",
    ]
    first.publish(4, [later], {})
    assert Checkpoints(tmp_path).steps() == [3, 4]


def test_shards_that_do_not_make_a_checkpoint_are_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    one, two = (checkpoints.write_shard(3, f"stage{i}", {"a.w": torch.ones(2)}) for i in range(2))
    for entries, message in (([one, two], r"'a\.w' is in two"), ([], "there are none")):
        with pytest.raises(CheckpointError, match=message):
            checkpoints.publish(3, entries, {})
    (tmp_path / ".step-00000003.tmp" / "stage0.safetensors").unlink()
    with pytest.raises(CheckpointError, match="stage0"):
        checkpoints.publish(3, [one], {})
    with pytest.raises(CheckpointError, match="cannot be called"):
        checkpoints.write_shard(3, "../stage0", {})
    with pytest.raises(CheckpointError, match="step -1"):
        checkpoints.save(-1, {}, {})
    assert checkpoints.steps() == []


def test_only_the_chosen_layers_are_read_and_verified(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    low, high = ({f"block{i}.w": torch.full((2,), float(i)) for i in pair} for pair in ((0, 1), (2, 3)))
    folder = checkpoints.publish(
        1, [checkpoints.write_shard(1, "low", low), checkpoints.write_shard(1, "high", high)], {}
    )
    assert_same(checkpoints.load(1, only=lambda name: name == "block1.w").tensors, {"block1.w": low["block1.w"]})
    damage(folder / "high.safetensors", flip)
    assert_same(checkpoints.load(1, only=lambda name: name in low).tensors, low)
    with pytest.raises(CheckpointError, match="high"):
        checkpoints.load(1, only=lambda name: name == "block2.w")
    with pytest.raises(CheckpointError):  # without a step every process must come to the same choice
        checkpoints.load(only=lambda name: name == "block1.w")


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def damage(path: Path, how: Callable[[bytes], bytes]) -> None:
    path.write_bytes(how(path.read_bytes()))


def signed(path: Path, file: str) -> None:
    """Names another file in the manifest, whose hash is right all the same."""
    body = json.loads((path / "manifest.json").read_text())
    del body["sha256"]
    body["shards"][0]["file"] = file
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**body, "sha256": digest}))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda path: damage(path / "shard0.safetensors", flip), "SHA-256"),
    "a cut shard": (lambda path: damage(path / "shard0.safetensors", lambda data: data[:-1]), "bytes instead of"),
    "a lost shard": (lambda path: (path / "shard0.safetensors").unlink(), "cannot be read"),
    "a cut manifest": (lambda path: damage(path / "manifest.json", lambda data: data[:50]), "malformed"),
    "a manifest of another type": (lambda path: damage(path / "manifest.json", lambda data: b"[1]"), "malformed"),
    "a changed number": (
        lambda path: damage(path / "manifest.json", lambda data: data.replace(b'"loss": 2', b'"loss": 3')),
        "other content",
    ),
    "a lost manifest": (lambda path: (path / "manifest.json").unlink(), "no manifest"),
    "a manifest that names files elsewhere": (
        lambda path: signed(path, "../step-00000001/shard0.safetensors"),
        "outside",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, example(step), {"loss": step})
    act, words = DAMAGES[name]
    damage(tmp_path / "step-00000001" / "shard0.safetensors", flip)
    assert checkpoints.load().step == 2  # the older one is not looked at
    damage(tmp_path / "step-00000001" / "shard0.safetensors", flip)
    act(tmp_path / "step-00000002")
    with caplog.at_level(logging.WARNING, logger="weft"):
        got = checkpoints.load()
    assert (got.step, got.meta) == (1, {"loss": 1})
    assert_same(got.tensors, example(1))
    (record,) = caplog.records
    assert "step 2 is damaged" in record.getMessage()
    assert words in record.getMessage()
    assert "using the checkpoint of step 1" in record.getMessage()
    with pytest.raises(CheckpointError, match=words):
        checkpoints.load(2)
    act(tmp_path / "step-00000001") if name != "a changed number" else shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match=r"no whole checkpoint in .*step 2 is damaged"):
        checkpoints.load()
    checkpoints.save(3, example(3), {})  # and training goes on
    assert_same(checkpoints.load().tensors, example(3))


def test_no_byte_of_a_checkpoint_can_change_unseen(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.save(2, {"a.w": torch.arange(3.0)}, {"loss": 2, "name": "x"})
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        for index in range(len(whole)):
            file.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
            try:
                got = checkpoints.load(2)
            except CheckpointError:
                continue
            assert file.name == "manifest.json"  # where white space is free
            assert (got.step, got.meta) == (2, {"loss": 2, "name": "x"})
            assert_same(got.tensors, {"a.w": torch.arange(3.0)})
        file.write_bytes(whole)
    checkpoints.load(2)


def test_a_missing_checkpoint_is_an_error_that_says_which_there_are(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "none")
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        checkpoints.load()
    checkpoints.save(4, {}, {})
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5 .*there are: 4"):
        checkpoints.load(5)
    with pytest.raises(RunError, match="as JSON"):
        checkpoints.save(5, {}, {"x": object()})
    assert checkpoints.steps() == [4]
    checkpoints.save(6, example(), {})

    def drop(name: str) -> bool:
        checkpoints.drop_after(4)
        return True

    with pytest.raises(CheckpointError, match=r"no checkpoint of step 6 .*there are: 4"):  # not a damaged one
        Checkpoints(tmp_path / "none").load(6, only=drop)


def test_a_checkpoint_that_an_earlier_weft_was_replacing_when_it_was_killed_is_whole_again(tmp_path: Path) -> None:
    old = tmp_path / ".step-00000002.old"
    Checkpoints(tmp_path).save(2, example(), {}).rename(old)
    Checkpoints(tmp_path).clean()
    assert_same(Checkpoints(tmp_path).load().tensors, example())
    old.mkdir()  # and where the new one was in place, the old one goes
    Checkpoints(tmp_path).clean()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
