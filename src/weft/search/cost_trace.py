"""Values of a subnet that note which of them are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from typing import Any

from weft.space import Value


class Noted(dict[str, Value]):
    """The values of a subnet; tells ``note`` of every name that is asked for, whether there or not."""

    def __init__(self, values: Mapping[str, Value], names: Iterable[str], note: Callable[[str], None]) -> None:
        super().__init__(values)
        self._every, self._note = tuple(names), note

    def __getitem__(self, name: str) -> Value:
        self._note(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._note(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._note(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        self._note_all()
        return super().__iter__()

    def __len__(self) -> int:
        self._note_all()
        return super().__len__()

    def items(self) -> Any:
        self._note_all()
        return super().items()

    def values(self) -> Any:
        self._note_all()
        return super().values()

    def keys(self) -> Any:
        return _NotedKeys(self)

    def _note_all(self) -> None:
        for name in self._every:
            self._note(name)


class _NotedKeys(KeysView[str]):
    def __ge__(self, other: Any) -> bool:
        """Asks for every name, where a set would look at the lengths first."""
        return sum(name not in self for name in other) == 0
