// The devices of a study over time: each job a bar, packed into lanes.
"use strict";
weft.devices = (get) => {
  const { format } = weft;
  const lanes = () =>
    get().devices.flatMap((device) =>
      Array.from({ length: Math.max(0, ...device.bars.map((bar) => bar.lane)) + 1 }, (_, lane) => ({ device, lane })),
    );
  const bars = () => {
    const found = [];
    let first = 0;
    for (const device of get().devices) {
      for (const bar of device.bars) found.push({ bar, device, lane: first + bar.lane });
      first += Math.max(0, ...device.bars.map((bar) => bar.lane)) + 1;
    }
    return found;
  };
  // Times are counted from the study's start; a job that runs goes to the newest moment known.
  const newest = () => {
    const bars = get().devices.flatMap((device) => device.bars);
    const last = Math.max(0, ...bars.map((bar) => bar.end ?? bar.start));
    // What runs is drawn a little beyond the last that is known.
    return bars.some((bar) => bar.end === null) ? last * 1.04 : last;
  };
  const option = (palette) => {
    const [all, last] = [bars(), newest()];
    const ink = document.documentElement.dataset.theme === "dark" ? "#10151c" : "#ffffff";
    const states = [...new Set(all.map(({ bar }) => bar.state))];
    return {
      grid: { left: 104, right: 16, top: 32, bottom: 56 },
      legend: { data: states, selectedMode: false },
      xAxis: {
        type: "value",
        min: 0,
        max: Math.max(last, 1e-3),
        axisLabel: { formatter: format.seconds },
        splitLine: { show: false },
      },
      yAxis: weft.lanes.axis(
        lanes().map(({ device, lane }) => (lane ? `${device.name} ·${lane + 1}` : device.name)),
        { axisLabel: { interval: 0, width: 90, overflow: "truncate" } },
      ),
      dataZoom: [
        { type: "inside", filterMode: "weakFilter" },
        { type: "slider", filterMode: "weakFilter", labelFormatter: format.seconds },
      ],
      tooltip: { trigger: "item" },
      series: states.map((state) => {
        const own = all.filter(({ bar }) => bar.state === state);
        const colour = palette.series[weft.trials.place(state)];
        return weft.lanes.series(
          state,
          own.map(({ bar, lane }, i) => [bar.start, bar.end ?? last, lane, i]),
          (i) => ({
            fill: colour,
            from: 0.08,
            to: 0.92,
            text: own[i].bar.trials.join(" "),
            ink,
            opacity: own[i].bar.end === null ? 0.6 : 1,
          }),
          { name: state, itemStyle: { color: colour }, tooltip: { formatter: (at) => tip(own[at.value[3]], last) } },
        );
      }),
    };
  };
  const tip = ({ bar, device }, last) =>
    weft.tip(`trial${bar.trials.length > 1 ? "s" : ""} ${bar.trials.join(", ")}`, [
      ["state", bar.state],
      ["device", device.name],
      ["estimated memory", format.known(bar.estimated) ? format.bytes(bar.estimated) : "not known"],
      ["measured memory", format.known(bar.measured) ? format.bytes(bar.measured) : "not known"],
      ["memory of the device", format.known(device.memory) ? format.bytes(device.memory) : null],
      ["duration", format.seconds((bar.end ?? last) - bar.start)],
      ["job", bar.job],
    ]);
  return weft.chart("Devices over time", {
    height: () => weft.lanes.height(lanes().length, 240) + 96,
    option,
    about: "one bar a job, with the trials in it",
    summary: () =>
      get()
        .devices.map((device) => `${device.name}: ${device.bars.length} jobs`)
        .join("; "),
    table: () =>
      weft.table(
        [
          { name: "job", value: ({ bar }) => bar.job },
          { name: "trials", value: ({ bar }) => bar.trials.join(" ") },
          { name: "device", value: ({ device }) => device.name },
          { name: "state", value: ({ bar }) => bar.state },
          {
            name: "from",
            number: true,
            value: ({ bar }) => bar.start,
            show: (own, value) => format.seconds(value),
          },
          {
            name: "duration",
            number: true,
            value: ({ bar }) => (bar.end ?? newest()) - bar.start,
            show: (own, value) => format.seconds(value),
          },
          {
            name: "estimated",
            number: true,
            value: ({ bar }) => bar.estimated,
            show: (own, value) => format.bytes(value),
          },
          {
            name: "measured",
            number: true,
            value: ({ bar }) => bar.measured,
            show: (own, value) => format.bytes(value),
          },
        ],
        bars(),
        { label: "jobs" },
      ),
  });
};
