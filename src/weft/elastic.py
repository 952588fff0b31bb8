"""`weft.supernet.elastic` under the name that users know it by, for ``from weft.elastic import Linear``."""

from __future__ import annotations

import sys

from weft.supernet import elastic

sys.modules[__name__] = elastic
