"""A plan beside what others would do with the same devices."""

from __future__ import annotations

import math
from collections.abc import Iterator

from weft.plan import baselines
from weft.plan.candidate import Shape, solved
from weft.plan.graph import Graph
from weft.plan.layout import Mesh
from weft.plan.plan import Row
from weft.plan.redistribution import meshes
from weft.plan.request import Request


def compared(graph: Graph, request: Request) -> Iterator[Row]:
    """What others would do with the same devices: the batch whole, one stage, no recomputation."""
    flat = Mesh((request.devices,))
    ways = [
        ("data parallel", flat, baselines.data_parallel(graph, flat)),
        ("fully sharded", flat, baselines.fully_sharded(graph, flat)),
    ]
    for name, mesh, rule in ways:
        found = solved(Shape(graph, mesh, 1, request.training), request.machine, math.inf, rule)
        yield Row(name, found.cost, str(mesh))
    best: Row | None = None
    for mesh in meshes(request.devices, 2) if request.devices > 1 else []:
        expert = baselines.expert(graph, mesh)
        if expert is None:
            continue
        cost = solved(Shape(graph, mesh, 1, request.training), request.machine, math.inf, expert).cost
        if best is None or best.cost is None or cost.step < best.cost.step:
            best = Row("expert", cost, str(mesh))
    yield best or Row("expert", None, "", "needs at least 4 devices in two mesh axes")
