// Boxes with a heading, and the inside of tooltips.
"use strict";
// A box with a heading; `controls` stand at the right of it.
weft.figure = (title, { about = null, controls = [], body = [] } = {}) => {
  const { el } = weft;
  const note = el("span.about", {}, about ?? "");
  const made = el(
    "section.figure",
    { "aria-label": title },
    el("div.head", {}, el("h2", {}, title), note, el("span.spring"), ...controls),
    el("div.body", {}, ...[body].flat()),
  );
  made.body = made.lastChild;
  made.about = (text) => (note.textContent = text);
  return made;
};

// The inside of a tooltip, as an element: a heading and pairs of a name and a text.
weft.tip = (title, pairs = []) =>
  weft.el(
    "div.tip",
    {},
    weft.el("strong", {}, title),
    weft.el(
      "table",
      {},
      weft.el(
        "tbody",
        {},
        pairs
          .filter(([, value]) => value !== null && value !== undefined && value !== "")
          .map(([name, value]) => weft.el("tr", {}, weft.el("td.quiet", {}, name), weft.el("td", {}, value))),
      ),
    ),
  );
