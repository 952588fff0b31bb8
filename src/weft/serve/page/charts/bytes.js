// How much of a stage's memory is what, over time.
"use strict";
weft.bytes = (() => {
  const { format } = weft;
  const STATES = [
    ["resident", 0],
    ["pinned", 3],
    ["arriving", 2],
    ["leaving", 1],
  ];
  // Pinned layers are a part of the resident ones: the area of the resident is what is left of it, so that the sum is right.
  const amount = (own, name, i) => {
    const [resident, pinned] = [own.resident?.[i] ?? 0, Math.min(own.pinned?.[i] ?? 0, own.resident?.[i] ?? 0)];
    return name === "resident" ? resident - pinned : name === "pinned" ? pinned : (own[name]?.[i] ?? 0);
  };
  const below = (own, name, i) =>
    STATES.slice(0, STATES.findIndex(([other]) => other === name) + 1).reduce(
      (sum, [other]) => sum + amount(own, other, i),
      0,
    );
  // What was so at a time stays so until the next: two points each. Areas that the
  // library stacks may have one point a time alone, so what lies below is added here, and the highest is drawn first.
  const steps = (own, name) =>
    own.time.flatMap((at, i) => [
      [at, below(own, name, i)],
      [own.time[i + 1] ?? at, below(own, name, i)],
    ]);
  const words = {
    resident: "resident, free to leave",
    pinned: "resident, in use",
    arriving: "arriving",
    leaving: "leaving",
  };
  // The areas of one stage, with a line at its budget.
  const option = (own, time, palette) => {
    const most = Math.max(
      own.budget ?? 0,
      ...own.time.map((_, i) => STATES.reduce((sum, [name]) => sum + amount(own, name, i), 0)),
    );
    return {
      grid: { left: 74, right: 14, top: 32, bottom: 60 },
      legend: { data: STATES.map(([name]) => words[name]), selectedMode: false },
      xAxis: time.axis(),
      yAxis: {
        type: "value",
        min: 0,
        max: most * 1.08 || 1,
        interval: 2 ** Math.ceil(Math.log2(Math.max(most / 6, 1))),
        axisLabel: { formatter: format.bytes, showMaxLabel: false },
      },
      dataZoom: time.zooms([0]).map((zoom) => ({ ...zoom, filterMode: "none" })),
      tooltip: {
        trigger: "axis",
        formatter: (found) => {
          const i = [found].flat()[0]?.dataIndex >> 1;
          return own.time[i] === undefined
            ? ""
            : weft.tip(format.seconds(own.time[i]), [
                ...STATES.map(([name]) => [words[name], format.bytes(amount(own, name, i))]),
                ["budget", own.budget ? format.bytes(own.budget) : null],
              ]);
        },
      },
      series: STATES.map(([name, colour], place) => ({
        id: name,
        name: words[name],
        type: "line",
        z: 5 - place,
        showSymbol: false,
        lineStyle: { width: 0 },
        areaStyle: { opacity: 1, origin: "start" },
        itemStyle: { color: palette.series[colour] },
        data: steps(own, name),
        markLine:
          place === 0 && own.budget
            ? {
                silent: true,
                symbol: "none",
                lineStyle: { color: palette.bad, width: 1.5, type: "solid" },
                label: {
                  formatter: `budget ${format.bytes(own.budget)}`,
                  position: "insideEndBottom",
                  color: palette.bad,
                },
                data: [{ yAxis: own.budget }],
              }
            : undefined,
      })),
    };
  };
  const table = (own) =>
    weft.table(
      [
        { name: "at", number: true, value: (i) => own.time[i], show: (i, value) => format.seconds(value) },
        ...STATES.map(([name]) => ({
          name: words[name],
          number: true,
          value: (i) => amount(own, name, i),
          show: (i, value) => format.bytes(value),
        })),
      ],
      own.time.map((_, i) => i),
      { label: "bytes over time", most: 500 },
    );
  return { STATES, option, table };
})();
