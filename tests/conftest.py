"""What all tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from hypothesis import settings

# A machine that is busy takes long over what it took no time over before.
settings.register_profile("weft", deadline=None)
settings.load_profile("weft")

# A shell starts what it runs in the background with Ctrl-C switched off, and processes would inherit that from here.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Files of which a single test takes long: first, so that no worker is at one of them when the others have ended.
FIRST = ("test_docs_site.py", "test_demo.py", "test_zoo_transformers.py", "test_docs_pages.py", "test_tune_split.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))


@pytest.fixture(scope="session")
def require() -> Callable[[str, bool, str], None]:
    """`require("data", present, reason)` skips when absent, or fails if WEFT_REQUIRE (a,b,c) lists "data"."""

    def check(what: str, present: bool, reason: str) -> None:
        if not present:
            (pytest.fail if what in os.environ.get("WEFT_REQUIRE", "").split(",") else pytest.skip)(f"{what}: {reason}")

    return check
