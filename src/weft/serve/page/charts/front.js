// The Pareto front among all that was scored; a click on one of its members opens the panel.
"use strict";
weft.front = (get) => {
  const { el, format } = weft;
  const axes = { x: null, y: null };
  let chosen = null;
  const objectives = () => get().objectives;
  const value = (own, name) => own.scores?.[name] ?? null;
  // The objectives first, then whatever else the members of the front were measured by.
  const names = () => [
    ...new Set([
      ...objectives().map((own) => own.name),
      ...get().front.flatMap((own) => Object.keys(own.scores ?? {})),
    ]),
  ];
  const settle = () => {
    const wanted = names();
    if (!wanted.includes(axes.y)) axes.y = wanted[0] ?? null;
    const second = objectives()[1]?.name ?? wanted.find((own) => own === "flops" || own === "parameters") ?? wanted[1];
    if (!wanted.includes(axes.x)) axes.x = second ?? null;
  };
  const open = (member) => {
    chosen = member.id;
    weft.architecture(member, objectives(), () => ((chosen = null), mark()));
    mark();
  };
  const mark = () => (chart.draw(), table.mark());
  const point = (own, i) => [axes.x ? value(own, axes.x) : i, value(own, axes.y)];
  const titled = (name) => {
    const own = objectives().find((one) => one.name === name);
    return own ? `${name} (${own.maximize ? "more" : "less"} is better)` : (name ?? "");
  };
  const tip = (own) =>
    weft.tip(String(own.id), [
      ...objectives().map((one) => [one.name, format.number(value(own, one.name))]),
      ...Object.entries(own.values ?? {})
        .slice(0, 14)
        .map(([name, choice]) => [name, format.value(choice)]),
    ]);

  const option = (palette) => {
    const { front, scored } = get();
    const members = new Set(front.map((own) => own.id));
    const others = scored.filter((own) => !members.has(own.id));
    const line = front
      .map((own, i) => ({ own, at: point(own, i) }))
      .filter(({ at }) => at.every(format.known))
      .sort((a, b) => a.at[0] - b.at[0]);
    const scale = (name) => {
      const values = [...front, ...scored].map((own) => value(own, name)).filter(format.known);
      const [low, high] = [Math.min(...values), Math.max(...values)];
      return low > 0 && high / low > 100 ? "log" : "value";
    };
    const label = { formatter: (own) => format.number(own, 3) };
    return {
      grid: { left: 70, right: 22, top: 32, bottom: 52 },
      legend: { data: ["front", "scored"] },
      xAxis: {
        type: axes.x ? scale(axes.x) : "value",
        name: axes.x ? titled(axes.x) : "member",
        scale: true,
        axisLabel: label,
        nameGap: 28,
      },
      yAxis: {
        type: scale(axes.y),
        name: titled(axes.y),
        nameGap: 48,
        scale: true,
        axisLabel: label,
      },
      tooltip: { trigger: "item", formatter: (at) => (at.data?.own ? tip(at.data.own) : "") },
      series: [
        {
          id: "scored",
          name: "scored",
          type: "scatter",
          symbolSize: 6,
          large: false,
          itemStyle: { color: palette.faint, opacity: 0.5 },
          data: others.map((own, i) => ({ value: point(own, i), own })),
        },
        {
          id: "front",
          name: "front",
          type: "line",
          step: false,
          symbol: "circle",
          symbolSize: 11,
          z: 4,
          lineStyle: { width: 1.5, color: palette.series[0] },
          itemStyle: { color: palette.series[0], borderColor: palette.box, borderWidth: 1.5 },
          cursor: "pointer",
          triggerLineEvent: false,
          data: line.map(({ own, at }) => ({
            value: at,
            own,
            symbolSize: own.id === chosen ? 17 : 11,
            itemStyle: own.id === chosen ? { color: palette.series[1] } : {},
          })),
        },
      ],
    };
  };
  const pickers = el("span.head");
  const chart = weft.chart("Pareto front", {
    height: 400,
    option,
    controls: [pickers],
    summary: () =>
      `${get().front.length} members of the front among ${get().scored.length} scored. The table below opens each.`,
    table: () =>
      weft.table(
        [
          { name: "id", value: (own) => own.id, show: (own) => el("code", {}, own.id) },
          ...objectives().map((one) => ({ name: one.name, number: true, value: (own) => value(own, one.name) })),
        ],
        get().scored,
        { label: "all that was scored", most: 500, sort: [1, Boolean(objectives()[0]?.maximize)] },
      ),
    ready: (instance) => instance.on("click", (at) => at.seriesId === "front" && at.data?.own && open(at.data.own)),
  });
  settle();
  const table = weft.table(
    [
      {
        name: "subnet",
        value: (own) => own.id,
        show: (own) =>
          el(
            "button.link",
            { type: "button", "aria-haspopup": "dialog", onclick: () => open(own) },
            el("code", {}, String(own.id)),
          ),
      },
      ...objectives().map((one) => ({ name: one.name, number: true, value: (own) => value(own, one.name) })),
      {
        name: "choices",
        value: (own) =>
          Object.values(own.values ?? {})
            .map(format.value)
            .join(" "),
      },
    ],
    get().front,
    { label: "members of the front", mark: (own) => (own.id === chosen ? "chosen" : null), most: 200 },
  );
  return {
    chart,
    table,
    update() {
      settle();
      const options = names().map((own) => [own, own]);
      chart.element.hidden = get().front.length + get().scored.length < 2;
      pickers.replaceChildren(
        ...(options.length > 2
          ? [
              weft.choose("x", options, axes.x, (own) => ((axes.x = own), chart.draw())),
              weft.choose("y", options, axes.y, (own) => ((axes.y = own), chart.draw())),
            ]
          : []),
      );
      chart.draw();
      table.update(get().front);
    },
  };
};
