"""PaSE's published model (Elango, IPDPS 2021): its four networks, configurations and cost tables; and it corrected.

PaSE gives each operator a tuple of split counts, one for each dimension of its iteration space, and adds the costs of
operators and of the tensors between them, in FLOP. It serves as a yardstick: the planner proper works on meshes.
"""

from __future__ import annotations

from pase.configurations import configurations
from pase.corrections import AS_PUBLISHED, CORRECTED, Corrections
from pase.network import Edge, Network, Operand, Vertex
from pase.tables import NETWORKS, Configured, network, tables

__all__ = [
    "AS_PUBLISHED",
    "CORRECTED",
    "NETWORKS",
    "Configured",
    "Corrections",
    "Edge",
    "Network",
    "Operand",
    "Vertex",
    "configurations",
    "network",
    "tables",
]
