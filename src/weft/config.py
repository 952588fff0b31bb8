"""What a run is, as typed values from TOML with ``--a.b=c`` overrides; unknown keys and wrong types are refused."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from weft.errors import ConfigError
from weft.offload.config import OffloadConfig
from weft.trainer.config import MOVED_TO_OPTIMIZER, OLD_FIELDS, Execution, RunConfig, TrainConfig, Validation

T = TypeVar("T")
Names = str | tuple[str, ...]
"""One name or several: ``maximize = "accuracy"`` and ``maximize = ["accuracy"]`` mean the same."""


def table_of(
    called: str, source: type, /, *, without: Sequence[str] = (), kinds: Mapping[str, Any] = {}, **defaults: Any
) -> Any:
    """The table of a configuration file with the fields of a dataclass; where a field takes code or another object, the
    file has text that names it. ``kinds`` and ``defaults`` are those of fields that the file writes otherwise.

    ``called`` is the name that the table has in this module, by which processes find it when one is sent to them.
    """
    hints = get_type_hints(source)
    entries = []
    for entry in dataclasses.fields(source):
        if entry.name in without:
            continue
        default = defaults.get(entry.name, entry.default)
        default = getattr(default, "__name__", default) if callable(default) else default
        kind = kinds.get(entry.name) or _plain(hints[entry.name], default is None)
        required = default is dataclasses.MISSING
        entries.append((entry.name, kind) if required else (entry.name, kind, default))
    table = msgspec.defstruct(called, entries, frozen=True, forbid_unknown_fields=True, module=__name__)
    table.__doc__ = source.__doc__
    return table


def _plain(hint: Any, optional: bool) -> Any:
    """A type with every part that a file cannot hold as text."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [part if part in (int, float, bool, str, NoneType) or get_origin(part) is tuple else str for part in parts]
    return reduce(or_, dict.fromkeys([*kinds, *([NoneType] if optional else [])]))


class NamedSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something named, with options: ``"digits"``, a path, or ``module:attribute`` in the config's folder."""

    source: str
    """a name, or `module:attribute`"""
    options: dict[str, Any] = {}
    """arguments of what it names"""


class DataSource(NamedSource, frozen=True, forbid_unknown_fields=True):
    """Data by name, kind or code, and perhaps the file or folder that it is read from.

    With a path alone, what lies there says of what kind it is.
    """

    source: str = ""
    """a name, or `module:attribute`"""
    path: str | None = None
    """a file or folder, from the folder of the config"""


if TYPE_CHECKING:
    Train = TrainConfig
    ExecutionTable = Execution
    ValidationTable = Validation
    OffloadTable = OffloadConfig
    RunTable = RunConfig
else:
    Train = table_of("Train", TrainConfig, without=("optimizer", "consistency", "architecture_search"))
    ExecutionTable = table_of("ExecutionTable", Execution, without=("offload",))
    ValidationTable = table_of("ValidationTable", Validation)
    OffloadTable = table_of("OffloadTable", OffloadConfig, kinds={"budget": str | int | None}, budget=None)
    RunTable = table_of(
        "RunTable",
        RunConfig,
        without=("source",),
        kinds={"metrics": Names, "validation": ValidationTable | int | None},
        metrics=("accuracy",),
    )


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the supernet is searched; the names are those of ``weft.search``.

    Gradient methods train it too, as ``Train`` says: then ``targets``, ``warmup``, ``rate`` and ``pick`` count, and of
    the others ``budget``, ``bn_batches`` and ``name``.
    """

    maximize: Names = ()
    """`accuracy` and other metrics of the run"""
    minimize: Names = ()
    """`loss`, `flops`, `parameters`, `latency`, `memory`"""
    constraints: Names = ()
    """such as `"parameters<=1e6"`"""
    budget: int = 200
    """subnets that are scored"""
    method: str | None = None
    """`random`, `evolution`, `nsga2`; or a gradient method, which trains too"""
    seed: int = 0
    """seed of the search"""
    bn_batches: int = 2
    """batches that batch norms see again before a subnet is scored"""
    batch_size: int = 256
    """samples of a batch when subnets are scored"""
    name: str = "search"
    """name of the folder under `results`"""
    targets: Names = ()
    """what the selected subnet must cost, within 2 %: `"parameters=5e6"`; for gradient methods"""
    weight_warmup_steps: int | None = None
    """Steps that train the weights alone, before the architecture learns too; if not given, as suits the method."""
    rate: float | None = None
    """The learning rate of the architecture; if not given, as suits the method and the number of steps."""
    pick: str | None = None
    """How a gradient method chooses its subnet: ``likeliest`` or ``perturbation``; else as suits the method."""


class Export(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which subnet leaves the run, and in which formats."""

    subnet: str | None = None
    """the id of a subnet, or its choices; the best of the front if not given"""
    limits: dict[str, float] = {}
    """what the best may cost: `{flops = 5e7}`"""
    formats: Names = ("safetensors", "torch")
    """`safetensors`, `torch` (a program of torch.export), `onnx`"""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run: a supernet, its data, and what is done with them."""

    supernet: str | NamedSource
    """a name of the zoo, or `module:function` from the folder of the config; a table with its `options`"""
    data: str | DataSource = "digits"
    """`digits`, `text`, a path, or `module:function`; a table with a `path` or `options` for it"""
    train: Train = Train()
    """what decides the bits; below"""
    optimizer: dict[str, Any] = {}
    """`kind` (a class of torch.optim), its options, and `schedule`, `warmup_steps`, `clip`, `groups`, `others`; without
    a kind the options change single values of SGD at 0.05 with momentum 0.9 and weight decay 5e-4"""
    consistency: str | dict[str, str] = {}
    """one for all layers, or a table by layer, by block, or `shared`: `shared = "lagged(4)"`"""
    execution: ExecutionTable = ExecutionTable()
    """how it is executed; below"""
    offload: OffloadTable = OffloadTable()  # type: ignore[call-arg]
    """what stays on the host; below"""
    run: RunTable = RunTable()
    """where it is kept, and what of it; a text is its name; below"""
    search: Search = Search()
    """how it is searched; below"""
    export: Export = Export()
    """what is exported; below"""

    @property
    def path(self) -> Path:
        """The run's directory."""
        return Path(self.run.folder) / str(self.run.name)


_TABLES = {"train": TrainConfig, "execution": Execution, "run": RunConfig}
_TABLE_OF = {
    entry.name: table
    for table, source in _TABLES.items()
    for entry in dataclasses.fields(source)
    if entry.name not in ("name", "offload", "source")
}
RENAMED = {
    "runs": "run.folder",
    "residency": "offload",
    "offload.ahead": "offload.prefetch",
    "search.recalibrate": "search.bn_batches",
    "search.warmup": "search.weight_warmup_steps",
    **{f"train.{name}": f"{table}.{name}" for name, table in _TABLE_OF.items() if table != "train"},
    **{f"train.{before}": f"{_TABLE_OF[now]}.{now}" for before, now in OLD_FIELDS.items() if now in _TABLE_OF},
    **{f"train.{before}": f"optimizer.{now}" for before, now in MOVED_TO_OPTIMIZER.items()},
}
"""What keys of a configuration were called in format 1, and are called now."""

_REMOVED = (
    *(f"train.{name}" for name in ("teacher", "flow", "rescale", "ranks", "placement")),
    "offload.disk",
    "offload.host",
)
_SCHEDULES = {"backward": "1f1b", "forward": "gpipe", "alternate": "naspipe"}


def modern(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration in a run's manifest, which an older weft may have written, under today's keys."""
    values = _copy(saved)
    if "runs" not in values:
        return values
    values["run"] = {"name": values.get("run")}
    for before, now in RENAMED.items():
        value = _pop(values, before)
        if value is not None:
            table, _, key = now.rpartition(".")
            (values.setdefault(table, {}) if table else values)[key] = value
    for key in _REMOVED:
        _pop(values, key)
    execution = values.setdefault("execution", {})
    if "pipeline_schedule" in execution:
        execution["pipeline_schedule"] = _SCHEDULES[execution["pipeline_schedule"]]
    execution["split_backward"] = bool(execution.get("split_backward"))
    return values


def _pop(values: dict[str, Any], key: str) -> Any:
    table, _, name = key.rpartition(".")
    holder = values.get(table, {}) if table else values
    return holder.pop(name, None)


def read_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a TOML file, with ``--a.b=c`` overrides applied; raises ConfigError in one clear line."""
    return make_config(read_values(path), overrides)


def read_values(path: Path | str) -> dict[str, Any]:
    """What a TOML file says, unchecked; raises ConfigError if it cannot be read."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"cannot read the config '{path}': {getattr(problem, 'strerror', None) or problem}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"'{path}' is not TOML: {problem}") from None


def make_config(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The configuration that a nested mapping means."""
    return convert(values, overrides, Config)


def convert(
    values: Mapping[str, Any], overrides: Sequence[str], kind: type[T], renamed: Mapping[str, str] = RENAMED
) -> T:
    """The value of some kind of configuration that a nested mapping means, with overrides applied; keys by the name
    that they had before are refused with the one that they have now."""
    merged = _copy(values)
    if isinstance(merged.get("run"), str) and _kinds(["run", "name"], kind):
        merged["run"] = {"name": merged["run"]}
    for override in overrides:
        _apply(merged, override, kind)
    try:
        return msgspec.convert(merged, kind, strict=True)
    except msgspec.ValidationError as problem:
        raise ConfigError(_explain(str(problem), kind, renamed)) from None


def values_of(table: Any) -> dict[str, Any]:
    """The entries of a table by name."""
    return msgspec.structs.asdict(table)


def _apply(values: dict[str, Any], override: str, root: type) -> None:
    match = re.fullmatch(r"--([A-Za-z_][\w.-]*)=(.*)", override, re.DOTALL)
    if match is None:
        raise ConfigError(f"cannot read '{override}': an override is written --a.b=c")
    head, dot, rest = match[1].partition(".")
    # What follows `consistency` is the name of a layer, in which dots and dashes have their place.
    names = [head, rest] if head == "consistency" and dot else match[1].replace("-", "_").split(".")
    at = values
    for part in names[:-1]:
        below = at.setdefault(part, {})
        if isinstance(below, str) and part in ("data", "supernet"):  # the short form of a table: `data = "digits"`
            below = at[part] = {"source": below}
        if not isinstance(below, dict):
            raise ConfigError(f"'{override}': '{part}' is a value, not a table")
        at = below
    if names == ["run"] and _kinds(["run", "name"], root):  # the short form of `run.name`
        at, names = at.setdefault("run", {}), ["run", "name"]
    at[names[-1]] = _value(match[2], names, root)


def _value(text: str, names: Sequence[str], root: type) -> Any:
    """The text as a TOML value or a number such as ``.5``; as it is where text is wanted (a run called 7)."""
    wanted = _kinds(names, root)
    as_text = str in wanted and float not in wanted
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return float(text) if not as_text and re.fullmatch(r"[+-]?(\d+\.|\.\d+)(e[+-]?\d+)?", text) else text
    # A list or a table is one where it may be; the subnet {} of a space without choices is text.
    nested = isinstance(value, (list, dict)) and any(kind not in (str, type(None)) for kind in wanted)
    return text if as_text and not nested and not isinstance(value, str) else value


def _explain(message: str, root: type, renamed: Mapping[str, str]) -> str:
    place = re.search(r" - at `\$\.?(.*?)`$", message)
    path = place[1] if place else ""
    field = re.match(r"Object (contains unknown|missing required) field `(.*?)`", message)
    if field:
        full = f"{path}.{field[2]}" if path else field[2]
        if full in renamed:
            return f"the key '{full}' has another name now: '{renamed[full]}'"
        if field[1] == "contains unknown":
            return f"unknown key '{full}'{_hint(path, field[2], root)}"
        own = ': for example supernet = "digits-conv", or "mynet:build" for your own code'
        return f"the config lacks '{full}'{own if full == 'supernet' else ''}"
    wrong = re.match(r"Expected `(.*?)`, got `(.*?)`", message)
    if wrong is None:
        return f"'{path}': {message}"
    wanted, got = (re.sub(r"\w+", lambda word: _WORDS.get(word[0], word[0]), kinds) for kinds in wrong.groups())
    return f"'{path}' must be {wanted.replace(' | ', ' or ')}, not {got}"


_WORDS = {"array": "list", "object": "table", "null": "nothing"}


def _hint(path: str, key: str, root: type) -> str:
    """The nearest key of the same table; at the top also of the tables, for a key that was put beside its own."""
    keys = {name: f"{path}.{name}" if path else name for name in _fields(path, root)}
    inner = {} if path else {name: f"{table}.{name}" for table in keys for name in _fields(table, root)}
    close = difflib.get_close_matches(key, [*keys, *inner], n=1)
    return f"; did you mean '{keys.get(close[0]) or inner[close[0]]}'?" if close else f"; known: {', '.join(keys)}"


def _fields(path: str, root: type) -> tuple[str, ...]:
    table = next((kind for kind in _kinds(path.split(".") if path else (), root) if _is_struct(kind)), None)
    return () if table is None else tuple(field.name for field in msgspec.structs.fields(table))


def _kinds(names: Sequence[str], root: type) -> tuple[Any, ...]:
    """The types that the value under these names may have; none if there is no such key."""
    kinds: tuple[Any, ...] = (root,)
    for name in names:
        table = next((kind for kind in kinds if _is_struct(kind)), None)
        field = next((f for f in msgspec.structs.fields(table) if f.name == name), None) if table is not None else None
        kinds = () if field is None else get_args(field.type) or (field.type,)
    return kinds


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in values.items()}
