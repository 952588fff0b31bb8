"""How `make docs` makes a site of these pages: Sphinx reads the Markdown, and nothing from the network.

The links in index.md are the navigation. reference/api.md gets the docstrings of the names that it lists.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent

project = "weft"
author = "the authors of weft"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build", "scripts"]
html_theme = "furo"
html_title = "weft"
html_show_copyright = False
html_copy_source = False
myst_heading_anchors = 3
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "exclude-members": "__init__, __new__"}
pygments_style, pygments_dark_style = "friendly", "monokai"


def navigation(index: str) -> str:
    """The pages that index.md links to, as a hidden table of contents for each of its headings.

    >>> print(navigation("## How to\\n- [Plan](how-to/plan.md): where"))
    ```{toctree}
    :hidden:
    :caption: How to
    <BLANKLINE>
    how-to/plan.md
    ```
    """
    found = []
    for heading, section in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", index, re.DOTALL | re.MULTILINE):
        pages = re.findall(r"\]\((?!\.\.|https?:)([^)#]+\.md)\)", section)
        if pages:
            found.append("\n".join(["```{toctree}", ":hidden:", f":caption: {heading}", "", *pages, "```"]))
    return "\n\n".join(found)


def docstrings(page: str) -> str:
    """The page with the docstring of each public name in the place of its one line."""

    def directive(match: re.Match[str]) -> str:
        name = "autoclass" if match["kind"] == "class" else "autofunction"
        return f"{match['head']}\n```{{eval-rst}}\n.. {name}:: {match['home']}\n```\n"

    pattern = r"(?P<head>^### `weft\.\w+`\n)\n(?P<kind>class|function) `(?P<home>[\w.]+)`.*?(?=\n#|\n## |\Z)"
    return re.sub(pattern, directive, page, flags=re.DOTALL | re.MULTILINE)


def inside(page: str, folder: Path) -> str:
    """The page with links to folders, and to Markdown outside of docs, as plain text, since the site lacks them."""

    def plain(match: re.Match[str]) -> str:
        target = (folder / match[2].split("#")[0]).resolve()
        outside = not target.is_relative_to(HERE.resolve()) and (target.is_dir() or target.suffix == ".md")
        return match[1] if outside else match[0]

    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)", plain, page)


def setup(app: Sphinx) -> None:
    def read(_: Sphinx, name: str, source: list[str]) -> None:
        source[0] = inside(source[0], (HERE / name).parent)
        if name == "index":
            source[0] += f"\n\n{navigation(source[0])}\n"
        elif name == "reference/api":
            source[0] = docstrings(source[0])

    app.connect("source-read", read)
