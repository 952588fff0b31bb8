"""The factory of streams: from a name, a subnet, a file or what a stream wrote of itself."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path

from weft.errors import StreamError, nearest
from weft.space.permutation_streams import Fair, Spaced
from weft.space.space import Space
from weft.space.streams import Fixed, FromFile, Iid, Sandwich, Shrinking, Stream
from weft.space.subnet import Subnet

Spec = str | os.PathLike[str] | Subnet | Stream | Mapping[str, object]
KINDS: dict[str, type[Stream]] = {kind.name: kind for kind in (Iid, Fair, Spaced, Sandwich, Shrinking, Fixed, FromFile)}


def make_stream(space: Space, spec: Spec, seed: int = 0, **options: object) -> Stream:
    """A stream over the space.

    `spec` is a name ("iid", "fair", "spaced", "sandwich", "shrinking", "fixed"), a name with its argument ("spaced:6",
    "sandwich:2", "shrinking:kernel,depth,expand", "file:steps.jsonl"), a subnet for every step, the path of a file of
    steps, a stream (returned as it is), or what `to_json` of a stream wrote (its seed counts). Options are those of the
    stream's class.
    """
    if isinstance(spec, Stream):
        if options:
            raise StreamError(f"a ready-made stream takes no options, got {', '.join(sorted(options))}")
        if spec.space_id != space.id:
            raise StreamError(f"the {spec.name} stream is of space {spec.space_id}, not of this one ({space.id})")
        return spec
    if isinstance(spec, Subnet):
        return _make("fixed", space, seed, {"subnet": spec, **options})
    if isinstance(spec, Mapping):
        return _remake(space, {**spec, **options})
    if isinstance(spec, os.PathLike):
        return _make("file", space, seed, {"path": spec, **options})
    if not isinstance(spec, str):
        raise StreamError(f"a stream is a name, a subnet, a path or a stream, not {spec!r}")
    name, colon, argument = spec.partition(":")
    if name in KINDS:
        return _make(name, space, seed, {**(_argument(name, argument) if colon else {}), **options})
    if spec.endswith((".jsonl", ".json")) or Path(spec).is_file():
        return _make("file", space, seed, {"path": spec, **options})
    raise StreamError(f"unknown stream '{name}'{nearest(name, KINDS)}")


def _argument(name: str, argument: str) -> dict[str, object]:
    if name == "file":
        return {"path": argument}
    if name == "shrinking":
        return {"order": argument}
    if name not in ("spaced", "sandwich"):
        raise StreamError(f"the {name} stream takes no argument, got '{argument}'")
    try:
        return {"spacing" if name == "spaced" else "r": int(argument)}
    except ValueError:
        raise StreamError(f"'{name}:{argument}' needs an integer after the colon, such as '{name}:2'") from None


def _remake(space: Space, data: dict[str, object]) -> Stream:
    name, seed, made_for = data.pop("stream", None), data.pop("seed", 0), data.pop("space", space.id)
    sha256 = data.pop("sha256", None)
    if made_for != space.id:
        raise StreamError(f"the stream is of space {made_for}, not of this one ({space.id})")
    stream = _make(str(name), space, seed, data)
    if sha256 is not None and getattr(stream, "sha256", None) != sha256:
        raise StreamError(f"the file '{data.get('path')}' is not what it was when the stream was made")
    return stream


def _make(name: str, space: Space, seed: object, options: dict[str, object]) -> Stream:
    if name not in KINDS:
        raise StreamError(f"unknown stream '{name}'{nearest(name, KINDS)}")
    kind = KINDS[name]
    known = inspect.signature(kind).parameters.keys() - {"space", "seed"}
    for option in options:
        if option not in known:
            raise StreamError(f"the {name} stream has no option '{option}'{nearest(option, known)}")
    if name in ("fixed", "file") and not options:
        raise StreamError(f"the {name} stream needs its {'subnet' if name == 'fixed' else 'path'}")
    ready = {key: space.load_subnet(item) if isinstance(item, Mapping) else item for key, item in options.items()}
    return kind(space, seed=seed, **ready)  # type: ignore[arg-type]
