// Curves over steps: lines with the band between the extremes of what was downsampled, smoothing, and a logarithmic axis.
"use strict";
weft.lines = (() => {
  // A running mean that forgets; starts as the mean of what it has seen, so that its first points are not drawn to 0.
  const smoothed = (values, weight) => {
    if (!weight) return values;
    let [sum, total] = [0, 0];
    return values.map((value) => {
      if (!weft.format.known(value)) return null;
      [sum, total] = [sum * weight + value, total * weight + 1];
      return sum / total;
    });
  };

  const band = (line, colour, log) => {
    const points = line.x
      .map((x, i) => [x, line.low[i], line.high[i]])
      .filter(([, low, high]) => weft.format.known(low) && weft.format.known(high) && (!log || low > 0));
    return {
      id: `${line.name} band`,
      name: line.name,
      type: "custom",
      silent: true,
      z: 1,
      clip: true,
      tooltip: { show: false },
      data: points.length > 1 ? [[points[0][0], points[0][1]]] : [],
      encode: { x: -1, y: -1 },
      renderItem: (params, api) => ({
        type: "polygon",
        style: { fill: colour, opacity: 0.16 },
        shape: {
          points: [
            ...points.map(([x, low]) => api.coord([x, low])),
            ...points.reverse().map(([x, , high]) => api.coord([x, high])),
          ],
        },
      }),
    };
  };

  // lines: {name, x, y, low?, high?, colour: number, dots?}; settings: {log, smooth, bands, name of y}
  const option = (lines, settings, palette) => {
    const series = [];
    for (const line of lines) {
      const colour = palette.series[line.colour % 12];
      const fits = (value) => (weft.format.known(value) && (!settings.log || value > 0) ? value : null);
      const pairs = (values) => line.x.map((x, i) => [x, fits(values[i])]);
      const smooth = settings.smooth > 0 && line.x.length > 5 && !line.dots;
      const shared = { name: line.name, type: "line", connectNulls: true, itemStyle: { color: colour } };
      if (line.low && !smooth && settings.bands !== false) series.push(band(line, colour, settings.log));
      if (smooth)
        series.push({
          ...shared,
          id: `${line.name} raw`,
          data: pairs(line.y),
          showSymbol: false,
          silent: true,
          lineStyle: { width: 1, color: colour, opacity: 0.25 },
          tooltip: { show: false },
        });
      series.push({
        ...shared,
        id: line.name,
        z: 3,
        data: pairs(smooth ? smoothed(line.y, settings.smooth) : line.y),
        showSymbol: Boolean(line.dots) || line.x.length < 30,
        symbolSize: line.dots ? 7 : 5,
        lineStyle: { width: 1.6, color: colour, type: line.dashed || line.dots ? "dashed" : "solid" },
      });
    }
    return {
      grid: { left: 58, right: 18, top: lines.length > 1 ? 32 : 14, bottom: 66 },
      legend: lines.length > 1 ? { data: lines.map((line) => line.name) } : { show: false },
      xAxis: {
        type: "value",
        name: "step",
        min: ({ min, max }) => (min < 0.02 * max ? 0 : Math.floor(min)),
        max: ({ max }) => Math.ceil(max),
        splitLine: { show: false },
      },
      yAxis: {
        type: settings.log ? "log" : "value",
        scale: true,
        axisLabel: { formatter: (value) => weft.format.number(value, 3) },
      },
      dataZoom: [
        { type: "inside" },
        { type: "slider", labelFormatter: (value) => weft.format.number(Math.round(value)) },
      ],
      tooltip: {
        trigger: "axis",
        axisPointer: { lineStyle: { color: palette.faint } },
        formatter: (found) => tip(found, lines),
      },
      series,
    };
  };

  const tip = (found, lines) => {
    const shown = [found].flat().filter((own) => lines.some((line) => line.name === own.seriesId));
    if (!shown.length) return "";
    return weft.tip(
      `step ${weft.format.number(shown[0].axisValue)}`,
      shown.map((own) => [own.seriesName, weft.format.number(own.value[1])]),
    );
  };

  const summary = (lines) =>
    lines
      .map((line) => {
        const last = line.y.findLast((value) => weft.format.known(value));
        return `${line.name}: ${line.x.length} points, last ${weft.format.number(last)}`;
      })
      .join("; ");

  const table = (lines) => {
    const rows = new Map();
    lines.forEach((line, i) =>
      line.x.forEach((x, at) => {
        if (!rows.has(x)) rows.set(x, { x, y: [] });
        rows.get(x).y[i] = line.y[at];
      }),
    );
    return weft.table(
      [
        { name: "step", number: true, value: (row) => row.x },
        ...lines.map((line, i) => ({ name: line.name, number: true, value: (row) => row.y[i] })),
      ],
      [...rows.values()],
      { sort: [0, true], label: "values", most: 500 },
    );
  };

  return { option, smoothed, summary, table };
})();
