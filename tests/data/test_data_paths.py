"""Data on disk: files written here byte by byte or by the real libraries, and read back whole."""

from __future__ import annotations

import gzip
import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from weft.data import Data, Source, load
from weft.data.images import decode
from weft.errors import DataError

rng = np.random.Generator(np.random.PCG64(0))
PIXELS = rng.integers(0, 256, (20, 4, 5), dtype=np.uint8)
LABELS = (np.arange(20) % 2).astype(np.uint8)


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def everything(source: Source | None) -> dict[str, torch.Tensor]:
    assert source is not None
    return source.take(np.arange(len(source)))


def assert_holds(data: Data, pixels: np.ndarray, labels: np.ndarray) -> None:
    """Training and validation samples together are these, in any order."""
    parts = [everything(data.train), everything(data.validation)]
    images = torch.cat([part["image"] for part in parts])
    wanted = torch.from_numpy(pixels.copy()).float() / 255
    found_order, order = (np.lexsort(rows.flatten(1).numpy().T[::-1]) for rows in (images, wanted))
    assert torch.equal(images[torch.from_numpy(found_order)], wanted[torch.from_numpy(order)])
    assert (
        torch.cat([part["label"] for part in parts])[torch.from_numpy(found_order)].tolist() == labels[order].tolist()
    )


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def mnist(folder: Path, suffix: str = "") -> Path:
    pack: Callable[[bytes], bytes] = gzip.compress if suffix else bytes
    folder.mkdir(exist_ok=True)
    for part, chosen in (("train", slice(0, 16)), ("t10k", slice(16, 20))):
        (folder / f"{part}-images-idx3-ubyte{suffix}").write_bytes(pack(idx(PIXELS[chosen])))
        (folder / f"{part}-labels-idx1-ubyte{suffix}").write_bytes(pack(idx(LABELS[chosen])))
    return folder


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_pairs_come_back_pixel_for_pixel(tmp_path: Path, suffix: str) -> None:
    data = load(mnist(tmp_path / "fashion", suffix), validation=0.25)
    assert data.name == "fashion"
    assert data.info == {"shape": (1, 4, 5), "classes": 2}
    assert_holds(data, PIXELS[:16, None], LABELS[:16])
    held, test = everything(data.validation), everything(data.test)
    assert sorted(held["label"].tolist()) == [0, 0, 1, 1]
    assert torch.equal(test["image"], torch.from_numpy(PIXELS[16:, None]).float() / 255)
    assert test["label"].tolist() == LABELS[16:].tolist()
    file = load(tmp_path / "fashion" / f"train-images-idx3-ubyte{suffix}", validation=0.25)
    assert file.fingerprint() == data.fingerprint()
    few = load(tmp_path / "fashion", limit=3, validation=0)
    assert (len(few.train), few.validation, len(everything(few.test)["label"])) == (3, None, 3)
    assert torch.equal(everything(few.train)["image"], torch.from_numpy(PIXELS[[0, 5, 10], None]).float() / 255)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte", b"\x89PNG" + bytes(30), "not an IDX file: it begins with 89504e47"),
        ("train-images-idx3-ubyte", b"", "begins with nothing"),
        ("train-images-idx3-ubyte", idx(PIXELS)[:-1], r"announces the shape \(20, 4, 5\), .* it has 415"),
        ("train-images-idx3-ubyte", idx(PIXELS) + b"\0", "it has 417"),
        ("train-images-idx3-ubyte", idx(PIXELS)[:9], "announces the shape"),
        ("train-images-idx3-ubyte", idx(PIXELS), "has 20 images, .* 16 labels"),
        ("train-images-idx3-ubyte", idx(LABELS[:16]), "bytes in 3 dimensions"),
        ("train-labels-idx1-ubyte", idx(LABELS[:15]), "16 images, .* 15 labels"),
        ("train-labels-idx1-ubyte", None, "no train labels"),
        ("t10k-images-idx3-ubyte", None, "no test images"),
        ("train-images-idx3-ubyte.gz", gzip.compress(idx(PIXELS), mtime=0)[:40], "cannot read .*train-images"),
    ],
)
def test_malformed_idx_files_are_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    mnist(tmp_path, ".gz" if name.endswith(".gz") else "")
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("grey", ("x_train", "y_train", "x_test", "y_test")),
        ("last", ("x_train", "y_train", "x_test", "y_test")),
        ("first", ("train_images", "train_labels", "test_images", "test_labels")),
    ],
)
def test_npz_images_come_back_in_any_layout(tmp_path: Path, layout: str, names: tuple[str, ...]) -> None:
    colour = rng.integers(0, 256, (20, 3, 4, 5), dtype=np.uint8)
    stored = {"grey": PIXELS, "last": colour.transpose(0, 2, 3, 1), "first": colour}[layout]
    wanted = PIXELS[:, None] if layout == "grey" else colour
    arrays = (stored[:16], LABELS[:16, None], stored[16:], LABELS[16:, None])
    np.savez(tmp_path / "a.npz", **dict(zip(names, arrays, strict=True)))
    data = load(tmp_path / "a.npz")
    assert_holds(data, wanted[:16], LABELS[:16])
    assert torch.equal(everything(data.test)["image"], torch.from_numpy(wanted[16:].copy()).float() / 255)
    assert data.info["shape"] == wanted.shape[1:]


def test_npz_numbers_stay_x_and_y_with_a_given_validation_part(tmp_path: Path) -> None:
    x, y = rng.normal(size=(6, 3)), rng.normal(size=(6, 2))
    np.savez(tmp_path / "a.npz", x=x, y=y, x_val=x[:2], y_val=y[:2])
    data = load(tmp_path / "a.npz")
    assert np.array_equal(everything(data.train)["x"].numpy(), x.astype(np.float32))
    assert np.array_equal(everything(data.train)["y"].numpy(), y.astype(np.float32))
    assert np.array_equal(everything(data.validation)["x"].numpy(), x[:2].astype(np.float32))
    assert data.test is None
    np.savez(tmp_path / "b.npz", x=x, y=np.array([0, 2, 1, 0, 2, 1]))
    assert load(tmp_path / "b.npz", validation=0.5).info == {"shape": (3,), "classes": 3}


def packed(path: Path, **changes: Any) -> Path:
    images = rng.integers(0, 256, (12, 6, 7, 3), dtype=np.uint8)
    files = [encoded(image, "JPEG") for image in images]
    arrays: dict[str, Any] = {
        "jpeg": np.frombuffer(b"".join(files), dtype=np.uint8),
        "offsets": np.cumsum([0, *map(len, files)]),
        "labels": (np.arange(12) % 3).astype(np.uint8),
        "is_test": (np.arange(12) % 4 == 3).astype(np.uint8),
        "class_names": np.array(["cat", "dog", "owl"]),
    }
    arrays |= {name: change(arrays[name]) for name, change in changes.items() if change is not None}
    np.savez(path, **{name: array for name, array in arrays.items() if changes.get(name, True) is not None})
    return path


def test_packed_jpegs_decode_as_pillow_decodes_them(tmp_path: Path) -> None:
    path = packed(tmp_path / "p.npz")
    data = load(path, validation=0)
    with np.load(path) as archive:
        files = [
            archive["jpeg"][a:b].tobytes() for a, b in zip(archive["offsets"], archive["offsets"][1:], strict=False)
        ]
    images = np.stack([np.asarray(Image.open(io.BytesIO(file))).transpose(2, 0, 1) for file in files])
    test = np.arange(12) % 4 == 3
    for part, members in ((data.train, ~test), (data.test, test)):
        batch = everything(part)
        assert torch.equal(batch["image"], torch.from_numpy(images[members]).float() / 255)
        assert batch["label"].tolist() == (np.arange(12) % 3)[members].tolist()
    assert data.info == {"shape": (3, 6, 7), "classes": 3, "class_names": ("cat", "dog", "owl")}
    grey = load(path, validation=0, channels=1, size=(3, 2), limit=2)
    assert grey.info["shape"] == (1, 3, 2)
    assert len(grey.train) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, "no 'labels'"),
        ({"offsets": lambda o: o[:-1]}, "needs 13 numbers; it has 12"),
        ({"offsets": lambda o: o + 1}, "must rise from 0"),
        ({"offsets": lambda o: o * 1.0}, "whole numbers"),
        ({"jpeg": lambda j: j[:-1]}, "must rise from 0"),
        (
            {"jpeg": lambda j: np.where(np.arange(len(j)) < 9, 0, j).astype(np.uint8)},
            "image 0 of p.npz is not an image",
        ),
        ({"is_test": lambda t: t[:5]}, "'is_test' has the shape"),
        ({"class_names": lambda c: c[:2]}, "the label 2, but only 2 class names"),
        ({"is_test": lambda t: t * 0 + 1}, "no images"),
    ],
)
def test_malformed_packed_files_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(packed(tmp_path / "p.npz", **changes))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros(3)}, r"has the arrays \['a'\]; expected x and y"),
        ({"x": np.zeros(3)}, "only one of x and y"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, r"x of shape \(3,\) and y of shape \(4,\)"),
        ({"x": np.zeros(3), "data": np.zeros(3), "y": np.zeros(3)}, "two arrays for x"),
        ({"x": np.array(["a"] * 4), "y": np.arange(4) % 2}, "only numbers"),
        ({"x": np.zeros((4, 9, 9, 9), np.uint8), "y": np.arange(4) % 2}, "1, 3 or 4 channels"),
        ({"x": np.zeros((4, 9, 9), np.uint8), "y": np.arange(4) - 1}, "one whole number from 0"),
        ({"x": np.array([{}] * 4), "y": np.arange(4)}, "plain arrays"),
        (b"no zip", "cannot read .*a.npz"),
        (None, "cannot read .*a.npz"),  # an archive that is cut in half
    ],
)
def test_npz_files_of_other_arrays_are_refused(tmp_path: Path, arrays: Any, message: str) -> None:
    path = tmp_path / "a.npz"
    if isinstance(arrays, dict):
        np.savez(path, **arrays)
    else:
        whole = packed(path).read_bytes()
        path.write_bytes(arrays or whole[: len(whole) // 2])
    with pytest.raises(DataError, match=message):
        load(path)


def image_folder(root: Path, parts: tuple[str, ...] = ("",), kind: str = "png") -> np.ndarray:
    images = rng.integers(0, 256, (8, 6, 7, 3), dtype=np.uint8)
    for part in parts:
        for at, image in enumerate(images):
            folder = root / part / ("cat" if at < 4 else "dog")
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{at}.{kind}")
    return images


def test_image_folders_come_back_pixel_for_pixel(tmp_path: Path) -> None:
    images = image_folder(tmp_path / "pets")
    data = load(tmp_path / "pets", validation=0.25)
    assert_holds(data, images.transpose(0, 3, 1, 2), np.arange(8) // 4)
    assert sorted(everything(data.validation)["label"].tolist()) == [0, 1]
    assert data.info == {"shape": (3, 6, 7), "classes": 2, "class_names": ("cat", "dog")}


def test_image_folders_with_parts_keep_them_and_are_resized(tmp_path: Path) -> None:
    image_folder(tmp_path, ("train", "val", "test"), "jpg")
    data = load(tmp_path, size=4)
    assert [len(part) for part in data.parts().values()] == [8, 8, 8]
    assert data.info["shape"] == (3, 4, 4)
    with Image.open(tmp_path / "val" / "dog" / "5.jpg") as image:
        pixels = np.asarray(image.convert("RGB").resize((4, 4), Image.Resampling.BILINEAR))
    expected = torch.from_numpy(pixels.transpose(2, 0, 1).copy()).float() / 255
    assert torch.equal(everything(data.validation)["image"][5], expected)
    assert sorted(everything(load(tmp_path, limit=2, validation=0).train)["label"].tolist()) == [0, 1]


def test_malformed_image_folders_are_refused(tmp_path: Path) -> None:
    image_folder(tmp_path, ("train", "test"))
    Image.new("RGB", (9, 9)).save(tmp_path / "train" / "dog" / "9.png")
    with pytest.raises(DataError, match=r"9.png is 9 by 9 pixels, .*0.png 6 by 7: give size="):
        load(tmp_path)
    assert len(load(tmp_path, size=4, validation=0).train) == 9
    (tmp_path / "train" / "dog" / "9.png").write_bytes(encoded(PIXELS[0])[:40])
    with pytest.raises(DataError, match=r"9.png is not an image that can be read"):
        load(tmp_path)
    (tmp_path / "train" / "dog" / "9.png").unlink()
    (tmp_path / "test" / "owl").mkdir()
    Image.new("RGB", (7, 6)).save(tmp_path / "test" / "owl" / "0.png")
    with pytest.raises(DataError, match=r"the class 'owl', which .*train has not"):
        load(tmp_path)
    with pytest.raises(DataError, match="no sub-folders of images"):
        load(tmp_path / "test" / "owl", kind="folder")
    with pytest.raises(DataError, match="channels=2"):
        decode([encoded(PIXELS[0])], ["a"], channels=2)


def test_a_saved_dataset_gives_its_columns_of_numbers(tmp_path: Path) -> None:
    columns = {"x": [[n, n + 0.5] for n in range(10)], "label": [n % 2 for n in range(10)], "name": ["a"] * 10}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "saved")
    data = load(tmp_path / "saved", validation=0.2)
    assert data.info == {"columns": ("x", "label"), "classes": 2}
    parts = [everything(data.train), everything(data.validation)]
    x = torch.cat([part["x"] for part in parts])
    label = torch.cat([part["label"] for part in parts])
    order = x[:, 0].argsort()
    assert x[order].tolist() == columns["x"]
    assert label[order].tolist() == columns["label"]
    assert sorted(parts[1]["label"].tolist()) == [0, 1]
    assert data.fingerprint() == load(tmp_path / "saved", validation=0.2).fingerprint()
    with pytest.raises(DataError, match=r"column 'name' .* holds strings"):
        load(tmp_path / "saved", columns=["name"])
    with pytest.raises(DataError, match="no column 'y'"):
        load(tmp_path / "saved", columns=["y"])


def test_a_saved_dict_of_images_keeps_parts_pixels_and_class_names(tmp_path: Path) -> None:
    pixels = rng.integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)
    features = datasets.Features({"img": datasets.Image(), "fine": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"img": [Image.fromarray(image) for image in pixels], "fine": [0, 1, 0, 1, 0, 1]}
    part = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": part, "validation": part, "test": part}).save_to_disk(tmp_path / "saved")
    data = load(tmp_path / "saved")
    assert data.info == {"columns": ("image", "label"), "classes": 2, "class_names": ("cat", "dog"), "shape": (3, 4, 5)}
    for source in data.parts().values():
        batch = everything(source)
        assert torch.equal(batch["image"], torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()).float() / 255)
        assert batch["label"].tolist() == rows["fine"]
    assert [len(source) for source in load(tmp_path / "saved", limit=2).parts().values()] == [2, 2, 2]


def test_malformed_saved_datasets_are_refused(tmp_path: Path) -> None:
    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"x": [1]})}).save_to_disk(tmp_path / "a")
    with pytest.raises(DataError, match=r"no 'train' part; it has \['test'\]"):
        load(tmp_path / "a")
    datasets.Dataset.from_dict({"x": [[1], [1, 2]]}).save_to_disk(tmp_path / "b")
    with pytest.raises(DataError, match="column 'x' is not of numbers in one shape"):
        everything(load(tmp_path / "b", validation=0).train)
    for file in (tmp_path / "b").glob("*.arrow"):
        file.write_bytes(b"damaged")
    with pytest.raises(DataError, match="cannot read"):
        load(tmp_path / "b")


@pytest.mark.parametrize(
    ("file", "kind", "options", "message"),
    [
        ("a.bin", None, {}, "cannot tell .*a.bin .*folder, huggingface, idx, npz, text"),
        (".", None, {}, "cannot tell .*folder, huggingface, idx, npz, text"),
        ("a.bin", "npy", {}, "unknown kind of data 'npy'; did you mean 'npz'"),
        ("absent", None, {}, "there is no file or folder"),
        ("a.bin", "npz", {"sise": 3}, "unknown option 'sise' for npz; did you mean 'size'"),
        ("mnist", None, {"validation": -0.1}, "from 0 to below 1"),
        ("mnist", None, {"validation": 1.0}, "from 0 to below 1"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_choices(
    tmp_path: Path, file: str, kind: str | None, options: dict[str, Any], message: str
) -> None:
    (tmp_path / "a.bin").write_bytes(b"?")
    if file == "mnist":
        mnist(tmp_path / "mnist")
    with pytest.raises(DataError, match=message):
        load(tmp_path / file, kind, **options)
