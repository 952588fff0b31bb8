"""Streams: the subnets of every step, as a pure function of the seed and the step."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from weft.errors import SpaceError, StreamError, nearest
from weft.space import sampling
from weft.space.choice import Choice
from weft.space.expression import Value
from weft.space.space import Space
from weft.space.subnet import Subnet
from weft.utils.rng import generator


class Stream(ABC):
    """`stream[i]` holds the subnets of step i, one for each micro-batch, or a single one for all of them.

    The space is taken as it is when the stream is made. `length` is None for a stream without end.
    """

    name: str
    summary: str  # what a step is, in a few words
    microbatches: int | None = None  # None: any number
    length: int | None = None

    def __init__(self, space: Space, seed: int = 0) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise StreamError(f"a seed is an integer, not {seed!r}")
        self.space = space
        self.seed = seed
        self._rules = space.rules

    @property
    def space_id(self) -> str:
        """The id that the space had when the stream was made."""
        return self._rules.layout.space_id

    @property
    def bits(self) -> float:
        """The freedom of a step in bits, summed over the choices that are always active; infinite with a real one.

        Exact where all choices are always active and nothing constrains them.
        """
        always = [choice for name, choice in self._rules.choices.items() if name not in self._rules.conditions]
        return sum((math.inf if c.options is None else self._bits_of(len(c.options)) for c in always), 0.0)

    def _bits_of(self, count: int) -> float:
        """The freedom of a step in a choice of so many options."""
        return math.log2(count)

    @abstractmethod
    def _step(self, index: int) -> tuple[Subnet, ...]: ...

    def options(self) -> dict[str, object]:
        """What else it takes to make this stream again, as JSON."""
        return {}

    def describe(self) -> str:
        """One line for a person."""
        return f"{self.name}: {self.summary}; {self.bits:.1f} bits a step"

    def to_json(self) -> dict[str, object]:
        """What `make_stream` takes to make this stream again."""
        return {"stream": self.name, "space": self.space_id, "seed": self.seed, **self.options()}

    def __getitem__(self, index: int) -> tuple[Subnet, ...]:
        try:
            step = operator.index(index)
        except TypeError:
            raise StreamError(f"a step is an integer, not {index!r}") from None
        if step < 0 or isinstance(index, bool):
            raise StreamError(f"a step is an integer from 0 on, not {index!r}")
        if self.length is not None and step >= self.length:
            raise StreamError(f"step {step} is beyond the end of the {self.name} stream, which has {self.length} steps")
        return self._step(step)

    def __iter__(self) -> Iterator[tuple[Subnet, ...]]:
        step = 0
        while self.length is None or step < self.length:
            yield self[step]
            step += 1

    def __repr__(self) -> str:
        return f"Stream({self.describe()})"


class Iid(Stream):
    """Every step draws every choice anew, uniformly."""

    name = "iid"
    summary = "every step draws every choice anew"

    def _step(self, index: int) -> tuple[Subnet, ...]:
        return (sampling.sample(self._rules, generator(self.seed, "iid", index)),)


class Fixed(Stream):
    """Every step uses the same subnet."""

    name = "fixed"
    summary = "every step uses the same subnet"
    bits = 0.0

    def __init__(self, space: Space, subnet: Subnet, seed: int = 0) -> None:
        super().__init__(space, seed)
        space.check(subnet)
        self._step_subnets = (subnet,)

    def options(self) -> dict[str, object]:
        return {"subnet": self._step_subnets[0].to_json()}

    def _step(self, index: int) -> tuple[Subnet, ...]:
        return self._step_subnets


class Sandwich(Stream):
    """A step of r + 2 micro-batches: the largest subnet, the smallest, and r random ones.

    Largest and smallest are the last and first option of every choice unless given.
    """

    name = "sandwich"

    def __init__(
        self, space: Space, r: int = 2, seed: int = 0, largest: Subnet | None = None, smallest: Subnet | None = None
    ) -> None:
        super().__init__(space, seed)
        if isinstance(r, bool) or not isinstance(r, int) or r < 0:
            raise StreamError(f"a sandwich has r >= 0 random subnets, got {r!r}")
        self.r = r
        self.largest = space.last() if largest is None else largest
        self.smallest = space.first() if smallest is None else smallest
        space.check(self.largest)
        space.check(self.smallest)
        self.microbatches = 2 + r
        self.summary = f"every step uses the largest subnet, the smallest and {r} random ones"

    @property
    def bits(self) -> float:
        return self.r * super().bits if self.r else 0.0

    def options(self) -> dict[str, object]:
        return {"r": self.r, "largest": self.largest.to_json(), "smallest": self.smallest.to_json()}

    def _step(self, index: int) -> tuple[Subnet, ...]:
        rngs = (generator(self.seed, "sandwich", index, part) for part in range(self.r))
        return (self.largest, self.smallest, *(sampling.sample(self._rules, rng) for rng in rngs))


# Progressive shrinking (Cai et al., 2020): first the largest subnet alone, then smaller options, one kind after the
# other.

_TRIES = 100


class Shrinking(Stream):
    """The first ``alone`` of the steps trains the last option of every choice; then the options open from the last to
    the first, ``order`` by ``order``, each kind in as many equal parts as it takes.

    A kind is the beginning of the names of its choices, as in ``("kernel", "depth", "expand")``; choices of no kind are
    open from the start of the second part. Depth that opens so is warmed up from the deepest on. Once open, an option
    is as likely as the others; `bits` are those of the end, when all is open.
    """

    name = "shrinking"

    def __init__(
        self, space: Space, steps: int, order: Sequence[str] | str = (), alone: float = 0.2, seed: int = 0
    ) -> None:
        super().__init__(space, seed)
        kinds = tuple(order.split(",")) if isinstance(order, str) else tuple(order)
        if steps < 1 or not 0 <= alone < 1:
            raise StreamError(f"shrinking needs steps >= 1 and 0 <= alone < 1, not {steps} and {alone}")
        for kind in kinds:
            if not any(name.startswith(kind) for name in space.choices):
                raise StreamError(f"no choice begins with '{kind}'; there are {', '.join(list(space.choices)[:8])}")
        self.steps, self.order, self.alone = steps, kinds, alone
        self._largest = space.last()
        self._kind = {name: next((k for k in kinds if name.startswith(k)), "") for name in space.choices}
        self._levels = [(kind, level) for kind in kinds for level in range(1, self._options(kind))]
        self.summary = f"the largest subnet for {alone:.0%} of {steps} steps, then ever more options"

    def options(self) -> dict[str, object]:
        return {"steps": self.steps, "order": list(self.order), "alone": self.alone}

    def opened(self, index: int) -> dict[str, int]:
        """How many options of each kind are open in a step, from the last on; all of a kind that is not named."""
        begun = self.alone * self.steps
        if index < begun:
            return dict.fromkeys((*self.order, ""), 1)
        part = (self.steps - begun) / max(len(self._levels), 1)
        passed = min(int((index - begun) / part) + 1, len(self._levels)) if self._levels else 0
        counts = dict.fromkeys(self.order, 1)
        for kind, level in self._levels[:passed]:
            counts[kind] = level + 1
        return counts

    def _options(self, kind: str) -> int:
        choices = [self.space.choices[name] for name, k in self._kind.items() if k == kind]
        return max(len(choice.options) if choice.options is not None else 1 for choice in choices)

    def _step(self, index: int) -> tuple[Subnet, ...]:
        opened = self.opened(index)
        if set(opened.values()) == {1} and index < self.alone * self.steps:
            return (self._largest,)
        rng = generator(self.seed, "shrinking", index)

        def pick(name: str, choice: Choice) -> Value:
            options = choice.options
            if options is None:
                return choice.sample(rng)
            few = options[-min(opened.get(self._kind[name], len(options)), len(options)) :]
            return few[int(rng.random() * len(few))]

        return (sampling.first_valid(self._rules, pick, _TRIES) or self._largest,)


# A stream that was written down: one line of JSON a step.


class FromFile(Stream):
    """The steps of a file.

    A line holds a subnet as `Subnet.to_json` writes it, or a list of them, one for each micro-batch. All lines are
    read and checked at once; a mistake names its line.
    """

    name = "file"
    bits = 0.0

    def __init__(self, space: Space, path: str | os.PathLike[str], seed: int = 0) -> None:
        super().__init__(space, seed)
        self.path = Path(path)
        try:
            text = self.path.read_bytes()
        except OSError as error:
            raise StreamError(f"cannot read the stream '{self.path}': {error.strerror}") from None
        self.sha256 = hashlib.sha256(text).hexdigest()
        lines = text.rstrip(b"\n").split(b"\n") if text.strip() else []
        self._steps = [self._read(line, number) for number, line in enumerate(lines, start=1)]
        if not self._steps:
            raise StreamError(f"the stream '{self.path}' is empty; write one subnet a line")
        self.length = len(self._steps)
        self.summary = f"{self.length} steps of '{self.path}'"

    def options(self) -> dict[str, object]:
        return {"path": str(self.path), "sha256": self.sha256}

    def _read(self, line: bytes, number: int) -> tuple[Subnet, ...]:
        where = f"line {number} of '{self.path}'"
        try:
            data = json.loads(line)
            subnets = tuple(self.space.load_subnet(item) for item in (data if isinstance(data, list) else [data]))
        except (ValueError, RecursionError) as error:
            raise StreamError(f"{where} is not JSON: {error}") from None
        except SpaceError as error:
            raise StreamError(f"{where}: {error}") from None
        if not subnets:
            raise StreamError(f"{where} holds no subnet")
        if len(subnets) > 1:
            if self.microbatches not in (None, len(subnets)):
                raise StreamError(f"{where} has {len(subnets)} micro-batches, lines before it {self.microbatches}")
            self.microbatches = len(subnets)
        return subnets

    def _step(self, index: int) -> tuple[Subnet, ...]:
        return self._steps[index]


# From a name, a subnet, a file, or what a stream wrote of itself.

Spec = str | os.PathLike[str] | Subnet | Stream | Mapping[str, object]


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
    given: dict[str, object] = {}
    if isinstance(spec, str):
        name, colon, argument = spec.partition(":")
        if name in _kinds():
            given = _argument(name, argument) if colon else {}
        elif spec.endswith((".jsonl", ".json")) or Path(spec).is_file():
            name, given = "file", {"path": spec}
    elif isinstance(spec, Subnet):
        name, given = "fixed", {"subnet": spec}
    elif isinstance(spec, os.PathLike):
        name, given = "file", {"path": spec}
    elif isinstance(spec, Mapping):
        given = dict(spec)
        name, seed = str(given.pop("stream", None)), given.pop("seed", 0)  # type: ignore[assignment]
        made_for = given.pop("space", space.id)
        if made_for != space.id:
            raise StreamError(f"the stream is of space {made_for}, not of this one ({space.id})")
    else:
        raise StreamError(f"a stream is a name, a subnet, a path or a stream, not {spec!r}")
    sha256 = given.pop("sha256", None)
    stream = _make(name, space, seed, {**given, **options})
    if sha256 is not None and getattr(stream, "sha256", None) != sha256:
        raise StreamError(f"the file '{given.get('path')}' is not what it was when the stream was made")
    return stream


def _argument(name: str, argument: str) -> dict[str, object]:
    option = {"file": "path", "shrinking": "order", "spaced": "spacing", "sandwich": "r"}.get(name)
    if option is None:
        raise StreamError(f"the {name} stream takes no argument, got '{argument}'")
    try:
        return {option: argument if option in ("path", "order") else int(argument)}
    except ValueError:
        raise StreamError(f"'{name}:{argument}' needs an integer after the colon, such as '{name}:2'") from None


def _make(name: str, space: Space, seed: object, options: dict[str, object]) -> Stream:
    if name not in (kinds := _kinds()):
        raise StreamError(f"unknown stream '{name}'{nearest(name, kinds)}")
    kind = kinds[name]
    known = inspect.signature(kind).parameters.keys() - {"space", "seed"}
    for option in options:
        if option not in known:
            raise StreamError(f"the {name} stream has no option '{option}'{nearest(option, known)}")
    if name in ("fixed", "file") and not options:
        raise StreamError(f"the {name} stream needs its {'subnet' if name == 'fixed' else 'path'}")
    ready = {key: space.load_subnet(item) if isinstance(item, Mapping) else item for key, item in options.items()}
    return kind(space, seed=seed, **ready)  # type: ignore[arg-type]


def _kinds() -> dict[str, type[Stream]]:
    from weft.space.permutation_streams import Fair, Spaced  # which are made of what is here

    return {kind.name: kind for kind in (Iid, Fair, Spaced, Sandwich, Shrinking, Fixed, FromFile)}
