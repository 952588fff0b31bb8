// Tables that are sorted by a press on a heading, and scroll in a box of their own.
"use strict";

// columns: {name, value(row), show(row, value)?, number?, wide?}; `value` is sorted by, `show` gives text or an element.
// options: label, sort: [column's number, descending], mark(row) -> class, most: rows at most.
weft.table = (columns, rows, options = {}) => {
  const { el, format } = weft;
  const most = options.most ?? 1000;
  let [by, down] = options.sort ?? [null, false];
  let now = rows;
  const body = el("tbody");
  const more = el("p.quiet");

  const compare = (a, b) => {
    const [x, y] = [columns[by].value(a), columns[by].value(b)];
    const [none, other] = [x === null || x === undefined || x === "", y === null || y === undefined || y === ""];
    if (none || other) return none - other; // what is not known stands last, either way
    const order =
      typeof x === "number" && typeof y === "number"
        ? x - y
        : String(x).localeCompare(String(y), undefined, { numeric: true });
    return down ? -order : order;
  };
  const cell = (column, row, first) => {
    const value = column.value(row);
    const shown = column.show ? column.show(row, value) : column.number ? format.number(value) : (value ?? "");
    const made = first ? el("th", { scope: "row" }, shown) : el("td", {}, shown);
    if (column.number) made.classList.add("num");
    if (column.wide) made.classList.add("wide");
    return made;
  };
  const drawn = new WeakMap(); // an element of a row -> the row
  const mark = () => {
    for (const made of body.children) made.className = options.mark?.(drawn.get(made)) ?? "";
  };
  const fill = () => {
    const ordered = by === null ? now : [...now].sort(compare);
    body.replaceChildren(
      ...ordered.slice(0, most).map((row) => {
        const made = el(
          "tr",
          {},
          columns.map((column, i) => cell(column, row, i === (options.head ?? 0))),
        );
        drawn.set(made, row);
        return made;
      }),
    );
    mark();
    more.textContent = ordered.length > most ? `${most} of ${ordered.length} are listed.` : "";
    heads.forEach((head, i) =>
      i === by ? head.setAttribute("aria-sort", down ? "descending" : "ascending") : head.removeAttribute("aria-sort"),
    );
  };
  const heads = columns.map((column, i) => {
    const head = el(
      "th",
      { scope: "col" },
      column.plain
        ? column.name
        : el(
            "button",
            {
              type: "button",
              onclick: () => {
                [by, down] = [i, by === i ? !down : Boolean(column.number)];
                fill();
              },
            },
            column.name,
          ),
    );
    if (column.number) head.classList.add("num");
    return head;
  });
  const label = options.label || "table";
  const box = el(
    "div.scroll",
    { tabIndex: 0, role: "region", "aria-label": label },
    el("table", {}, el("thead", {}, el("tr", {}, heads)), body),
    more,
  );
  // Rows may change; the order, the place in the box and the focus stay.
  box.update = (next) => {
    now = next;
    const lines = () => [...body.querySelectorAll("a, button, input")];
    const at = lines().indexOf(document.activeElement);
    const label = (own) => own?.getAttribute("aria-label") ?? own?.textContent;
    const before = at < 0 ? null : label(document.activeElement);
    fill();
    if (at >= 0) (lines().find((own) => label(own) === before) ?? lines()[at])?.focus({ preventScroll: true });
  };
  box.mark = mark;
  fill();
  return box;
};
