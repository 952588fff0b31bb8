// An operation as documents tell it: its name (`2F0`), what is known of it, and a table of many.
"use strict";
weft.operation = (() => {
  const { el, format } = weft;
  // A name and a place in the palette for each kind.
  const KINDS = { F: ["forward", 0], B: ["backward", 2], U: ["update", 1] };
  // Spans are [stage, kind, micro-batch, step, subnet, start, end, version, backward version, waited for, seconds waited].
  const name = (span) => `${span[0]}${span[1]}${span[2] ?? ""}`;
  const version = (span) =>
    span[7] === null || span[7] === undefined
      ? null
      : span[8] === null || span[8] === undefined || span[8] === span[7]
        ? String(span[7])
        : `${span[7]}, its backward ${span[8]}`;
  const tip = (span, simulated) =>
    weft.tip(`${name(span)}${simulated ? " (simulated)" : ""}`, [
      [
        "op",
        `${KINDS[span[1]]?.[0] ?? span[1]}${span[2] === null ? "" : ` of micro-batch ${span[2]}`} on stage ${span[0]}`,
      ],
      ["step", span[3]],
      ["subnet", span[4]],
      ["version", version(span)],
      ["waited", span[9] ? `${span[9]}${span[10] ? `, ${format.seconds(span[10])}` : ""}` : null],
      ["from", format.seconds(span[5])],
      ["duration", format.seconds(span[6] - span[5])],
    ]);

  const table = (spans) => {
    if (!spans.length) return el("p.quiet", {}, "Zoom in until operations are shown.");
    return weft.table(
      [
        { name: "op", value: name },
        { name: "step", number: true, value: (span) => span[3] },
        { name: "subnet", value: (span) => span[4] },
        { name: "version", value: version },
        { name: "from", number: true, value: (span) => span[5], show: (span) => format.seconds(span[5]) },
        {
          name: "duration",
          number: true,
          value: (span) => span[6] - span[5],
          show: (span, value) => format.seconds(value),
        },
        { name: "waited", value: (span) => span[9] },
        {
          name: "for",
          number: true,
          value: (span) => span[10],
          show: (span, value) => (value ? format.seconds(value) : ""),
        },
      ],
      spans,
      { label: "operations in the window", most: 500 },
    );
  };
  return { KINDS, name, tip, table };
})();
