"""A plan as one HTML file: what was chosen, the graph coloured by it, memory, cost, and what it was compared with."""

from __future__ import annotations

from weft.plan.page.document import page
from weft.plan.page.parts import parts, picked

__all__ = ["page", "parts", "picked"]
