"""What subnets cost, on average over a mixture too: measured once, as a sum of tables over few choices."""

from weft.search.expected.costs import METRICS, Expected, measure_expected
from weft.search.expected.table import Array, Table, constraint_tables, elimination, tabled

__all__ = ["METRICS", "Array", "Expected", "Table", "constraint_tables", "elimination", "measure_expected", "tabled"]
