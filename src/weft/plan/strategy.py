"""What a planner decides: a mesh, and a split for each operator."""

from __future__ import annotations

from dataclasses import dataclass

from weft.plan.graph import Graph
from weft.plan.layout import Layout, Mesh, Split, layout, result_layout


@dataclass(frozen=True, slots=True)
class Strategy:
    """A split for each operator of a graph, in its order."""

    mesh: Mesh
    splits: tuple[Split, ...]

    def operand(self, graph: Graph, place: int, number: int) -> Layout:
        """How operand ``number`` of the operator at ``place`` must lie."""
        return layout(graph.operators[place].reads[number].tensor, self.splits[place])

    def result(self, graph: Graph, place: int, output: int = 0) -> Layout:
        """How an output of the operator at ``place`` comes to lie."""
        return result_layout(graph.operators[place].outputs[output], self.splits[place])
