// Trials in parallel coordinates: a line a trial, an axis a parameter and an objective; selected parts of axes filter.
"use strict";
weft.coordinates = (get, filtered) => {
  const { format } = weft;
  const dims = () => [
    ...get().parameters.map((own) => ({ ...own, read: (trial) => trial.params?.[own.name] ?? null })),
    ...get().objectives.map((own, i) => ({
      name: own.name,
      objective: own,
      read: (trial) => trial.values?.[i] ?? null,
    })),
  ];
  const kind = (dim, trials) => {
    const values = trials.map(dim.read).filter((value) => value !== null);
    if (dim.options || values.some((value) => typeof value !== "number")) {
      return { type: "category", data: [...new Set([...(dim.options ?? []), ...values].map(format.value))] };
    }
    const whole =
      !dim.log && !dim.objective && values.every(Number.isInteger) && Math.max(...values) - Math.min(...values) < 12;
    return {
      type: dim.log ? "log" : "value",
      scale: true,
      ...(whole ? { interval: 1 } : {}),
      ...(dim.objective || !format.known(dim.low)
        ? { min: "dataMin", max: "dataMax" }
        : { min: dim.low, max: dim.high }),
      axisLabel: { formatter: (value) => format.number(value, 3) },
    };
  };
  // The better its first objective, the stronger its line.
  const strength = (trials) => {
    const values = trials.map((trial) => trial.values?.[0]).filter(format.known);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const up = get().objectives[0]?.maximize;
    return (trial) => {
      if (!format.known(trial.values?.[0])) return 0.35;
      const share = high > low ? (trial.values[0] - low) / (high - low) : 1;
      return 0.25 + 0.7 * (up ? share : 1 - share) ** 2;
    };
  };
  const option = (palette, width) => {
    const { trials } = get();
    const [axes, strong] = [dims(), strength(trials)];
    const states = [...new Set(trials.map((trial) => trial.state))];
    return {
      parallel: {
        left: 44,
        right: 64,
        top: 62,
        bottom: 28,
        parallelAxisDefault: {
          nameTextStyle: { color: palette.ink },
          nameGap: 14,
          axisLine: { lineStyle: { color: palette.faint } },
          axisTick: { lineStyle: { color: palette.faint } },
          nameTruncate: { maxWidth: Math.max((width - 108) / Math.max(axes.length - 1, 1) - 10, 30) },
          areaSelectStyle: { color: palette.accent, opacity: 0.22, borderColor: palette.accent },
        },
      },
      legend: { data: states },
      parallelAxis: axes.map((dim, i) => {
        const own = kind(dim, trials);
        return {
          dim: i,
          name: dim.name,
          ...own,
          axisLabel: { color: palette.note, width: 80, overflow: "truncate", ...own.axisLabel },
        };
      }),
      tooltip: {
        trigger: "item",
        formatter: (at) =>
          at.data?.trial
            ? weft.tip(`trial ${at.data.trial.number}`, [
                ["state", at.data.trial.state],
                ...axes.map((dim) => [dim.name, format.number(dim.read(at.data.trial))]),
              ])
            : "",
      },
      series: states.map((state) => ({
        id: state,
        name: state,
        type: "parallel",
        smooth: 0.1,
        inactiveOpacity: 0.04,
        activeOpacity: 1,
        progressive: 500,
        itemStyle: { color: palette.series[weft.trials.place(state)] },
        lineStyle: { width: 1.6, color: palette.series[weft.trials.place(state)] },
        data: trials
          .filter((trial) => trial.state === state)
          .map((trial) => ({
            trial,
            lineStyle: { opacity: strong(trial) },
            value: axes.map((dim) =>
              dim.read(trial) === null
                ? "-"
                : typeof dim.read(trial) === "number" && !dim.options
                  ? dim.read(trial)
                  : format.value(dim.read(trial)),
            ),
          })),
      })),
    };
  };
  const chosen = (instance) => {
    const model = instance.getModel();
    const numbers = new Set();
    let all = true;
    model.eachSeriesByType("parallel", (series) => {
      const system = series.coordinateSystem;
      if (system.hasAxisBrushed()) {
        all = false;
        system.eachActiveState(
          series.getData(),
          (state, i) => state === "active" && numbers.add(series.getData().getRawDataItem(i).trial.number),
        );
      }
    });
    filtered(all ? null : numbers);
  };
  return weft.chart("Trials", {
    height: 360,
    option,
    about: "drag along an axis to filter; press the selection again to clear",
    summary: () =>
      `${get().trials.length} trials over ${get().parameters.length} parameters. The table of trials has all values.`,
    ready: (instance) => instance.on("axisareaselected", () => chosen(instance)),
    table: () => weft.trials.table(get),
  });
};
