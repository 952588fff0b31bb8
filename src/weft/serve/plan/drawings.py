"""The drawing of a graph that comes from a file: whether it is made of what drawings are made of, and nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_TAGS = frozenset(["svg", "style", "defs", "clippath", "rect", "marker", "path", "g", "title", "text", "tspan"])
_ATTRIBUTES = re.compile(
    "width|height|role|aria-label|id|x|y|rx|d|class|viewbox|refx|refy|markerwidth|markerheight|markerunits|orient|"
    "data-ends|marker-end|tabindex|transform|clip-path"
)
_COLOUR = r"\.c\d+\{--c:#[0-9a-f]{6}\}"
_STYLE = re.compile(rf"({_COLOUR})*(@media \(prefers-color-scheme:dark\)\{{({_COLOUR})*\}})?")


def is_drawing(svg: str) -> bool:
    """Whether it has nothing but what the drawing of a graph is made of: no script, no link, no style but colours."""
    return svg.startswith("<svg ") and _Checked(svg).harmless


class _Checked(HTMLParser):
    def __init__(self, svg: str) -> None:
        super().__init__()
        self.harmless = True
        self._style: list[str] | None = None
        self.feed(svg)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.harmless &= tag in _TAGS
        for name, value in attrs:
            local = "url(" not in (value or "").lower() or re.fullmatch(r"url\(#\w+\)", value or "") is not None
            self.harmless &= _ATTRIBUTES.fullmatch(name) is not None and local
        self._style = [] if tag == "style" else None

    def handle_data(self, data: str) -> None:
        if self._style is not None:
            self._style.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag == "style":
            self.harmless &= _STYLE.fullmatch("".join(self._style or ())) is not None
        self._style = None

    def handle_comment(self, data: str) -> None:
        self.harmless = False

    def handle_decl(self, decl: str) -> None:
        self.harmless = False

    def handle_pi(self, data: str) -> None:
        self.harmless = False

    def unknown_decl(self, data: str) -> None:
        self.harmless = False
