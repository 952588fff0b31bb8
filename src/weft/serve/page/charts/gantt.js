// The Gantt chart: what each stage did and when, and above or below it what the simulator says it would do.
"use strict";
weft.gantt = (time, more) => {
  const { el, format } = weft;
  const { KINDS, name, tip } = weft.operation;
  let [by, base, detail] = ["kind", null, null];

  const inWindow = ([from, to], start, end) => end > from && start < to;
  const worked = (own) => (own.buckets ?? []).filter((bucket) => bucket[3] > 0);
  const parts = (which) => {
    const whole = base?.[which];
    const fine = detail?.[which];
    if (!whole) return null;
    if (!fine) return { spans: whole.spans ?? [], buckets: worked(whole) };
    const outside = (own) => !inWindow(detail.window, own[1], own[2]);
    return { spans: fine.spans ?? [], buckets: [...worked(whole).filter(outside), ...worked(fine)] };
  };
  const look = (palette) => {
    const ink = document.documentElement.dataset.theme === "dark" ? "#10151c" : "#ffffff";
    const kinds = Object.fromEntries(Object.entries(KINDS).map(([kind, [, colour]]) => [kind, palette.series[colour]]));
    return (span) => ({
      fill:
        by === "kind" || !span[4] ? (kinds[span[1]] ?? palette.series[11]) : palette.series[weft.theme.place(span[4])],
      opacity: by === "subnet" && span[1] !== "F" ? 0.62 : 1,
      from: span[1] === "U" ? 0.55 : 0.06,
      to: 0.94,
      text: name(span),
      ink,
    });
  };
  const lanes = () =>
    base?.stages?.length ||
    Math.max(0, ...[...(base?.real.spans ?? []), ...(base?.real.buckets ?? [])].map((own) => own[0] + 1));
  const lasting = (which) => {
    const { spans, buckets } = { spans: base[which].spans ?? [], buckets: base[which].buckets ?? [] };
    return format.seconds(
      spans.length
        ? Math.max(...spans.map((span) => span[6]))
        : Math.max(0, ...buckets.filter((bucket) => bucket[3] > 0).map((bucket) => bucket[2])),
    );
  };
  // A simulation holds the first steps of a run; the real time of the same operations stands beside it.
  const compared = (isNarrow) => {
    const { steps, seconds, real_seconds: real } = base.simulated;
    if (!format.known(seconds) || !format.known(real) || !(real > 0)) return `simulated, ${lasting("simulated")}`;
    const error = seconds / real - 1;
    const part = `the same ${steps} ${steps === 1 ? "step" : "steps"}`;
    const difference = `${error < 0 ? "−" : "+"}${format.percent(Math.abs(error))}`;
    if (isNarrow) return `simulated, ${format.seconds(seconds)} of ${format.seconds(real)} (${difference})`;
    return `simulated, ${format.seconds(seconds)}; ${part} took ${format.seconds(real)} (${difference})`;
  };
  const series = (palette) =>
    ["real", "simulated"].flatMap((which, axis) => {
      const own = parts(which);
      if (!own) return [];
      const [drawn, shared] = [look(palette), { xAxisIndex: axis, yAxisIndex: axis, name: which }];
      return [
        weft.lanes.series(
          `${which} spans`,
          own.spans.map((span, i) => [span[5], span[6], span[0], i]),
          (i) => drawn(own.spans[i]),
          { ...shared, tooltip: { formatter: (at) => tip(own.spans[at.value[3]], axis === 1) } },
        ),
        weft.lanes.series(
          `${which} buckets`,
          own.buckets.map((bucket, i) => [bucket[1], bucket[2], bucket[0], i]),
          (i) => ({
            fill: palette.series[axis ? 7 : 0],
            from: 0.94 - 0.88 * own.buckets[i][3],
            to: 0.94,
            opacity: 0.8,
          }),
          {
            ...shared,
            tooltip: {
              formatter: (at) => {
                const [stage, start, end, busy] = own.buckets[at.value[3]];
                return weft.tip(`stage ${stage}${axis ? " (simulated)" : ""}`, [
                  ["busy", format.percent(busy, 1)],
                  ["from", format.seconds(start)],
                  ["to", format.seconds(end)],
                  ["", "zoom in to see operations"],
                ]);
              },
            },
          },
        ),
      ];
    });
  const option = (palette, width) => {
    const [count, two] = [lanes(), Boolean(base?.simulated)];
    const high = weft.lanes.height(count, two ? 300 : 420);
    const names = Array.from({ length: count }, (_, stage) => `stage ${stage}`);
    const bounds = (axis) => ({ left: 68, right: 14, top: axis ? 22 + high + 36 : 22, height: high });
    const heading = (text, top) => ({
      type: "text",
      left: 68,
      top,
      silent: true,
      style: { text, fill: palette.note, font: "600 12px system-ui, sans-serif" },
    });
    return {
      graphic: {
        elements: [
          heading(`real, ${lasting("real")}`, 4),
          two ? heading(compared(width < 560), 22 + high + 18) : null,
        ].filter(Boolean),
      },
      grid: two ? [bounds(0), bounds(1)] : [bounds(0)],
      xAxis: [
        time.axis({
          gridIndex: 0,
          axisLabel: { show: !two, formatter: (value) => format.seconds(value), showMaxLabel: false },
          axisTick: { show: !two },
        }),
        ...(two ? [time.axis({ gridIndex: 1 })] : []),
      ],
      yAxis: [weft.lanes.axis(names, { gridIndex: 0 }), ...(two ? [weft.lanes.axis(names, { gridIndex: 1 })] : [])],
      dataZoom: time.zooms(two ? [0, 1] : [0]),
      tooltip: { trigger: "item" },
      series: series(palette),
    };
  };
  const button = (words, label, act) => el("button", { type: "button", "aria-label": label, onclick: act }, words);
  const chart = weft.chart("Schedule", {
    height: () =>
      22 +
      (weft.lanes.height(lanes(), base?.simulated ? 300 : 420) + (base?.simulated ? 36 : 0)) *
        (base?.simulated ? 2 : 1) +
      (base?.simulated ? -36 : 0) +
      60,
    option,
    table: () => weft.operation.table((parts("real")?.spans ?? []).filter((span) => inWindow(time.shown, span[5], span[6]))),
    summary: () => `${lanes()} stages over ${format.seconds(time.whole[1] - time.whole[0])}.`,
    keys: "Arrow keys pan and zoom, + and - zoom, 0 shows all.",
    controls: [
      weft.segmented(
        "colour by",
        [
          ["kind", "By kind"],
          ["subnet", "By subnet"],
        ],
        by,
        (value) => ((by = value), chart.draw(), more.coloured?.(value)),
      ),
      el(
        "span.segmented",
        { role: "group", "aria-label": "zoom" },
        button("−", "zoom out", () => time.zoom(2)),
        button("+", "zoom in", () => time.zoom(0.5)),
        button("All", "show all", () => time.show(...time.whole)),
      ),
    ],
    ready: (instance, place) => (time.follow(chart, instance), place.addEventListener("keydown", time.keys)),
  });
  return {
    chart,
    KINDS,
    // `fine` is a document of a narrower window, where the whole one has only buckets.
    update: (whole, fine = null) => ((base = whole), (detail = fine), chart.draw()),
    get by() {
      return by;
    },
    get drawn() {
      return [...(parts("real")?.spans ?? []), ...(parts("simulated")?.spans ?? [])];
    },
    get coarse() {
      return Boolean(base?.real.buckets || base?.simulated?.buckets);
    },
  };
};
