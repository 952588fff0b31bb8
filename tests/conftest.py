"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def require() -> Callable[[str, bool, str], None]:
    """`require("data", present, reason)` skips when absent, or fails if WEFT_REQUIRE (a,b,c) lists "data"."""

    def check(what: str, present: bool, reason: str) -> None:
        if not present:
            (pytest.fail if what in os.environ.get("WEFT_REQUIRE", "").split(",") else pytest.skip)(f"{what}: {reason}")

    return check
