"""Hugging Face data sets that were saved on disk: read row by row from their Arrow files, never downloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.data.dataset import PARTS, Data, evenly_spaced
from weft.data.images import channels_first, log, scale_pixels
from weft.data.source import Batch, Indices, Source, Subset, check_indices, hash_samples
from weft.errors import DataError, install_extra


def read(path: Path, *, limit: int | None = None, columns: Sequence[str] | None = None) -> Data:
    """What `save_to_disk` wrote, a Dataset or a DatasetDict with train, validation and test.

    An image column becomes "image", a class label "label"; other columns keep their names. Columns of strings are left
    out; `columns` picks those to keep.
    """
    try:
        from datasets import DatasetDict, load_from_disk
    except ImportError as error:
        raise DataError(f"Hugging Face data sets are read by their own library: {install_extra('hf')}") from error
    try:
        loaded = load_from_disk(str(path))
    except Exception as error:  # the library raises what it likes for damaged folders
        raise DataError(f"cannot read {path} as a saved Hugging Face data set: {error}") from error
    loaded_parts = dict(loaded) if isinstance(loaded, DatasetDict) else {"train": loaded}
    parts = {PARTS[name]: rows for name, rows in loaded_parts.items() if name in PARTS}
    if "train" not in parts:
        raise DataError(f"{path} has no 'train' part; it has {sorted(loaded_parts)}")
    train = parts["train"]
    keys = _keys(path, train.features, columns)
    sources: dict[str, Source] = {}
    for part, rows in parts.items():
        source: Source = Rows(rows, keys)
        sources[part] = source if limit is None else Subset(source, evenly_spaced(len(source), limit))
    label = next((name for name, key in keys.items() if key == "label" and _whole(train.features[name])), None)
    info: dict[str, Any] = {"columns": tuple(keys.values())}
    if label is not None and hasattr(train.features[label], "names"):
        class_names = tuple(train.features[label].names)
        info |= {"classes": len(class_names), "class_names": class_names}
    elif label is not None:
        info["classes"] = int(max(np.max(rows.with_format("numpy")[label][:]) for rows in parts.values())) + 1
    if "image" in keys.values():
        info["shape"] = tuple(sources["train"].take(np.zeros(1, dtype=np.int64))["image"].shape[1:])
    return Data(path.name, **sources, info=info)


class Rows:
    """Rows of a Hugging Face Dataset, read from its memory-mapped files as they are taken."""

    def __init__(self, dataset: Any, keys: Mapping[str, str]) -> None:
        if len(dataset) == 0:
            raise DataError("the Hugging Face data set has no rows")
        self.dataset, self.keys = dataset.with_format("numpy", columns=list(keys)), dict(keys)
        self._digest: str | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, indices: Indices) -> Batch:
        rows = self.dataset[check_indices(indices, len(self)).tolist()]
        return {key: self._tensor(name, rows[name]) for name, key in self.keys.items()}

    def column(self, name: str) -> torch.Tensor:
        source = next((column for column, key in self.keys.items() if key == name), None)
        if source is None:
            raise DataError(f"samples have no key '{name}'; they have {sorted(self.keys.values())}")
        return self._tensor(source, self.dataset.select_columns([source])[:][source])

    def fingerprint(self) -> str:
        """Reads every row once."""
        if self._digest is None:
            self._digest = hash_samples(self)
        return self._digest

    def _tensor(self, name: str, values: Any) -> torch.Tensor:
        try:
            array = np.asarray(values)
        except ValueError:  # rows of different shapes
            array = np.empty(0, dtype=object)
        if array.dtype.kind not in "iubf":
            raise DataError(f"column '{name}' is not of numbers in one shape (rows differ, or hold other things)")
        if self.keys[name] == "image" and array.dtype == np.uint8:
            return scale_pixels(torch.from_numpy(channels_first(array, f"column '{name}'").copy()))
        kind = np.float32 if array.dtype.kind == "f" else np.bool_ if array.dtype.kind == "b" else np.int64
        return torch.from_numpy(array.astype(kind))


def _whole(feature: Any) -> bool:
    return hasattr(feature, "names") or str(getattr(feature, "dtype", "")).startswith(("int", "uint"))


def _keys(path: Path, features: Any, columns: Sequence[str] | None) -> dict[str, str]:
    """The key of each column that is kept."""
    keys: dict[str, str] = {}
    chosen = list(features if columns is None else columns)
    for name in chosen:
        if name not in features:
            raise DataError(f"{path} has no column '{name}'; it has {sorted(features)}")
        feature = features[name]
        if str(getattr(feature, "dtype", "")) in ("string", "large_string", "binary", "large_binary"):
            if columns is not None:
                raise DataError(f"column '{name}' of {path} holds strings: turn it into tokens before saving")
            log.warning("leaving out column '%s' of %s: it holds strings", name, path)
            continue
        key = {"Image": "image", "ClassLabel": "label"}.get(type(feature).__name__, name)
        keys[name] = name if key in chosen or key in keys.values() else key
    if not keys:
        raise DataError(f"{path} has no column of numbers or images; it has {sorted(features)}")
    return keys
