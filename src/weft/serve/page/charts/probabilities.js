// How the probabilities of a choice's options went while a gradient method trained.
"use strict";
weft.probabilities = (get) => {
  const { el, format } = weft;
  let name = null;
  const now = () => get().choices.find((own) => own.name === name) ?? get().choices[0] ?? { options: [], values: [] };
  const option = (palette) => ({
    grid: { left: 52, right: 16, top: 34, bottom: 64 },
    legend: {},
    xAxis: { type: "value", name: "step", min: "dataMin", max: "dataMax", splitLine: { show: false } },
    yAxis: { type: "value", min: 0, max: 1, axisLabel: { formatter: (value) => format.percent(value) } },
    dataZoom: [
      { type: "inside", filterMode: "none" },
      { type: "slider", filterMode: "none" },
    ],
    tooltip: {
      trigger: "axis",
      formatter: (found) =>
        weft.tip(
          `${now().name}, step ${[found].flat()[0]?.axisValue}`,
          [found]
            .flat()
            .map((own) => [own.seriesName, format.percent(own.value[1], 1)])
            .reverse(),
        ),
    },
    series: now().options.map((words, i) => ({
      id: String(i),
      name: format.value(words),
      type: "line",
      stack: "all",
      showSymbol: false,
      lineStyle: { width: 0.5 },
      areaStyle: { opacity: 0.75 },
      itemStyle: { color: palette.series[i % 12] },
      data: get().steps.map((step, at) => [step, now().values[i]?.[at] ?? 0]),
    })),
  });
  const picker = el("select", { onchange: () => ((name = picker.value), chart.draw()) });
  const last = () =>
    now()
      .options.map((words, i) => `${words} ${format.percent(now().values[i]?.at(-1))}`)
      .join(", ");
  const chart = weft.chart("Choice probabilities", {
    height: 330,
    option,
    controls: [el("label.control", {}, "Choice", picker)],
    summary: () => `${now().name} at the end: ${last()}.`,
    table: () =>
      weft.table(
        [
          { name: "step", number: true, value: (i) => get().steps[i] },
          ...now().options.map((words, at) => ({
            name: format.value(words),
            number: true,
            value: (i) => now().values[at]?.[i],
          })),
        ],
        get().steps.map((_, i) => i),
        { label: "probabilities", sort: [0, true], most: 500 },
      ),
  });
  return {
    element: chart.element,
    update() {
      const names = get().choices.map((own) => own.name);
      if (!names.includes(name)) name = names[0] ?? null;
      picker.replaceChildren(...names.map((own) => el("option", { value: own, selected: own === name }, own)));
      chart.draw();
    },
  };
};
