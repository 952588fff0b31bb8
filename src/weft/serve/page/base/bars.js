// Bars of named parts, as elements that fit their box on any screen.
"use strict";

// rows: {label, parts: [{name, value, words, colour}], note}; `full` fills the width; a line stands at each row's `mark`;
// the parts of a row that is `twin` lie one below the other.
weft.bars = (rows, options = {}) => {
  const { el } = weft;
  const total = (row) => row.parts.reduce((sum, part) => sum + Math.max(part.value || 0, 0), 0);
  const full = options.full ?? Math.max(...rows.map((row) => Math.max(total(row), row.mark ?? 0)), 0);
  const width = (value) => `${full > 0 ? (100 * Math.min(Math.max(value, 0) / full, 1)).toFixed(3) : 0}%`;
  return el(
    "div.bars",
    {},
    rows.map((row) => {
      const label = `${row.label}: ${row.parts.map((part) => `${part.name} ${part.words}`).join(", ")}${row.note ? `; ${row.note}` : ""}`;
      const parts = row.parts
        .filter((part) => row.twin || part.value > 0)
        .map((part) =>
          el("i", {
            title: `${part.name}: ${part.words}`,
            style: { width: width(part.value), background: part.colour },
          }),
        );
      const mark = weft.format.known(row.mark)
        ? el("b", { title: row.markTitle || "", style: { left: width(row.mark) } })
        : null;
      return el(
        "div.row",
        {},
        el("div.label", {}, row.label),
        el(row.twin ? "div.bar.twin" : "div.bar", { role: "img", "aria-label": label }, parts, mark),
        el("div.note", {}, row.note ?? ""),
      );
    }),
  );
};

// What the colours mean: [name, colour].
weft.key = (pairs) =>
  weft.el(
    "ul.key",
    {},
    pairs.map(([name, colour]) => weft.el("li", {}, weft.el("i.swatch", { style: { background: colour } }), name)),
  );
