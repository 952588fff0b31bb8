"""The public face: light to import, every name where it says it is, and a package that can be called."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import weft

LOOK = """
import json, sys
import weft
heavy = {"torch", "numpy", "rich", "typer", "msgspec", "sklearn", "safetensors"} & set(sys.modules)
assert weft.__version__ and weft.WeftError and not {"torch", "numpy"} & set(sys.modules)
package = weft.search
print(json.dumps({
    "heavy": sorted(heavy),
    "called": callable(package) and callable(weft.search),
    "package": package.__name__,
    "inner": package.Front is weft.Front,
    "torch": "torch" in sys.modules,
}))
"""


def test_importing_weft_imports_nothing_heavy_and_search_can_be_called_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    assert seen == {"heavy": [], "called": True, "package": "weft.search", "inner": True, "torch": True}


def test_every_public_name_exists_and_is_listed() -> None:
    for name in weft.__all__:
        found = getattr(weft, name)
        assert found is not None
        assert name in dir(weft)
        if name in weft._HOMES:
            assert found is getattr(importlib.import_module(weft._HOMES[name]), name)


def test_type_checkers_see_the_public_names_and_no_others() -> None:
    source = inspect.getsource(weft)
    for_types = source[source.index("if TYPE_CHECKING") : source.index("__version__ =")]
    assert set(re.findall(r"import (\w+) as \1\n", for_types)) == set(weft.__all__) - {"__version__"}


def test_packages_are_attributes_without_being_imported_first_and_search_is_called_as_its_function() -> None:
    for name in weft._PACKAGES:
        assert getattr(weft, name) is importlib.import_module(f"weft.{name}")
        assert name in dir(weft)
    with pytest.raises(AttributeError, match="module 'weft' has no attribute 'serach'"):
        weft.serach  # noqa: B018
    assert next(iter(inspect.signature(weft.search).parameters)) == "run"
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'run'"):
        weft.search()


def test_the_version_is_that_of_the_package() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'\nversion = "{weft.__version__}"\n' in text
