"""Parameters and FLOPs of many subnets: counted for the first, then read from tables that are as exact."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from weft.errors import WeftError
from weft.search.expected import Expected, measure_expected
from weft.search.score import CHEAP, Scorer
from weft.space import Subnet

log = logging.getLogger("weft.search")
COUNTED = 12
"""Subnets that are counted one by one: tables cost as much as counting some ten or twenty."""


class CheapCosts:
    """Gives the costs of a subnet that no forward is needed for.

    Tables are measured when many subnets are asked for, from no more than ``most`` of them. A space that needs more,
    that has none (a choice of real numbers), or whose tables are off for a subnet that was counted, is counted to the
    end. Tables that are ``known`` already are not measured.
    """

    def __init__(self, scorer: Scorer, most: int, known: Iterable[Expected] = ()) -> None:
        self._scorer, self._most = scorer, max(most, 4 * COUNTED)
        self._known = {one.metric: one for one in known}
        self._counted: dict[Subnet, dict[str, float]] = {}
        self._tables: list[Expected] | None = None

    def __call__(self, subnet: Subnet) -> dict[str, float]:
        if self._tables is not None:
            return self._read(subnet, self._tables)
        found = self._counted[subnet] = self._scorer.cheap(subnet)
        if len(self._counted) == COUNTED:
            self._tables = self._measured()
        return found

    def _measured(self) -> list[Expected] | None:
        try:
            tables = [self._known.get(metric) or self._measure(metric) for metric in CHEAP]
        except WeftError as problem:
            log.info("parameters and FLOPs are counted subnet by subnet: %s", problem)
            return None
        off = [str(subnet) for subnet, costs in self._counted.items() if self._read(subnet, tables) != costs]
        if off:
            log.info("parameters and FLOPs are counted subnet by subnet: tables are off for '%s'", off[0])
        return None if off else tables

    def _measure(self, metric: str) -> Expected:
        return measure_expected(self._scorer.chain, self._scorer.example, metric, most=self._most)

    def _read(self, subnet: Subnet, tables: Iterable[Expected]) -> dict[str, float]:
        return {table.metric: int(table.of(subnet)) for table in tables}
