// How the stages spent their time: busy and waiting in all, and how busy over time.
"use strict";
weft.stages = {
  COLOURS: { busy: "var(--c0)", input: "var(--c1)", weights: "var(--c3)", window: "var(--c10)", other: "var(--line)" },

  // A bar for each stage: busy, what it waited for, and the rest of its bubble.
  stages: (stages) => {
    const { el, format } = weft;
    const all = [...new Set(stages.flatMap((own) => Object.keys(own.waits ?? {})))];
    const names = all.filter((name) => name !== "other" && stages.some((own) => own.waits?.[name] > 0));
    const colour = (name, i) => weft.stages.COLOURS[name] ?? `var(--c${(i + 4) % 11})`;
    const rows = stages.map((own) => {
      const waits = names.map((name, i) => ({
        name: `waiting for ${name}`,
        value: own.waits?.[name] ?? 0,
        words: format.percent(own.waits?.[name] ?? 0, 1),
        colour: colour(name, i),
      }));
      const rest = Math.max(1 - (own.busy ?? 0) - waits.reduce((sum, part) => sum + part.value, 0), 0);
      return {
        label: `stage ${own.stage}`,
        note: `busy ${format.percent(own.busy)}, bubble ${format.percent(own.bubble)}`,
        parts: [
          { name: "busy", value: own.busy ?? 0, words: format.percent(own.busy, 1), colour: "var(--c0)" },
          ...waits,
          { name: "other bubble", value: rest, words: format.percent(rest, 1), colour: "var(--line)" },
        ],
      };
    });
    const mean = stages.reduce((sum, own) => sum + (own.bubble ?? 0), 0) / (stages.length || 1);
    const key = weft.key([
      ["busy", "var(--c0)"],
      ...names.map((name, i) => [`waiting for ${name}`, colour(name, i)]),
      ["other bubble", "var(--line)"],
    ]);
    const box = el("div", { style: { "max-height": "420px", overflow: "auto" } }, weft.bars(rows, { full: 1 }));
    return weft.figure("Stages", { about: `mean bubble ${format.percent(mean, 1)}`, body: [key, box] });
  },

  // Lines for a few stages, a heat map for many.
  overTime: (get) => {
    const { format } = weft;
    const few = () => get().stages.length <= 8;
    const time = (at) => at - (get().time[0] ?? 0);
    const lines = (palette) => ({
      grid: { left: 52, right: 16, top: 32, bottom: 62 },
      legend: {},
      xAxis: { type: "value", axisLabel: { formatter: format.seconds }, splitLine: { show: false } },
      yAxis: { type: "value", min: 0, max: 1, axisLabel: { formatter: (value) => format.percent(value) } },
      dataZoom: [{ type: "inside" }, { type: "slider", labelFormatter: format.seconds }],
      tooltip: {
        trigger: "axis",
        formatter: (found) =>
          weft.tip(
            format.seconds([found].flat()[0]?.axisValue),
            [found].flat().map((own) => [own.seriesName, format.percent(own.value[1], 1)]),
          ),
      },
      series: get().stages.map((values, stage) => ({
        id: `stage ${stage}`,
        name: `stage ${stage}`,
        type: "line",
        showSymbol: values.length < 20,
        lineStyle: { width: 1.5 },
        itemStyle: { color: palette.series[stage] },
        data: values.map((value, i) => [time(get().time[i]), value]),
      })),
    });
    const heat = (palette) => ({
      grid: { left: 68, right: 16, top: 10, bottom: 82 },
      xAxis: { type: "category", data: get().time.map((at) => format.seconds(time(at))) },
      yAxis: weft.lanes.axis(get().stages.map((_, stage) => `stage ${stage}`)),
      visualMap: {
        min: 0,
        max: 1,
        calculable: false,
        orient: "horizontal",
        left: "center",
        bottom: 4,
        itemHeight: 120,
        itemWidth: 10,
        text: ["busy", "idle"],
        textStyle: { color: palette.note },
        inRange: { color: [palette.field, palette.series[0]] },
      },
      tooltip: {
        formatter: (at) =>
          weft.tip(`stage ${at.value[1]}`, [
            ["at", get().time.length ? format.seconds(time(get().time[at.value[0]])) : ""],
            ["busy", format.percent(at.value[2], 1)],
          ]),
      },
      series: [
        {
          id: "heat",
          type: "heatmap",
          progressive: 0,
          data: get().stages.flatMap((values, stage) => values.map((value, i) => [i, stage, value])),
        },
      ],
    });
    return weft.chart("Busy share over time", {
      height: () => (few() ? 290 : Math.min(Math.max(get().stages.length * 8, 220), 560) + 92),
      option: (palette) => (few() ? lines(palette) : heat(palette)),
      summary: () => `${get().stages.length} stages at ${get().time.length} times.`,
      table: () =>
        weft.table(
          [
            { name: "at", number: true, value: (i) => time(get().time[i]), show: (i, value) => format.seconds(value) },
            ...get().stages.map((values, stage) => ({
              name: `stage ${stage}`,
              number: true,
              value: (i) => values[i],
              show: (i, value) => format.percent(value, 1),
            })),
          ],
          get().time.map((_, i) => i),
          { label: "busy share", most: 300 },
        ),
    });
  },
};
