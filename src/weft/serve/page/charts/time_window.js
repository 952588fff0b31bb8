// The part of time that charts show: panned and zoomed by keys, and the same in all charts that follow it.
"use strict";
weft.timeWindow = (total) => {
  const charts = new Set();
  const listeners = new Set();
  let [whole, now] = [total, total];
  let quiet = false;

  const least = () => (whole[1] - whole[0]) * 1e-6;
  const show = (from, to) => {
    const width = Math.max(Math.min(to - from, whole[1] - whole[0]), least());
    const start = Math.min(Math.max(from, whole[0]), whole[1] - width);
    now = [start, start + width];
    quiet = true;
    for (const chart of charts)
      chart.instance?.dispatchAction({ type: "dataZoom", dataZoomIndex: 0, startValue: now[0], endValue: now[1] });
    quiet = false;
    listeners.forEach((listener) => listener(now));
  };
  // More than 1 shows more.
  const zoom = (by, at = 0.5) => {
    const width = now[1] - now[0];
    const point = now[0] + width * at;
    show(point - width * by * at, point + width * by * (1 - at));
  };
  const pan = (by) => show(now[0] + (now[1] - now[0]) * by, now[1] + (now[1] - now[0]) * by);
  const keys = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = {
      ArrowLeft: () => pan(-0.2),
      ArrowRight: () => pan(0.2),
      "+": () => zoom(0.5),
      "=": () => zoom(0.5),
      "-": () => zoom(2),
      ArrowUp: () => zoom(0.5),
      ArrowDown: () => zoom(2),
      Home: () => show(...whole),
      0: () => show(...whole),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  };
  return {
    get shown() {
      return now;
    },
    get whole() {
      return whole;
    },
    show,
    zoom,
    pan,
    keys,
    listen: (listener) => listeners.add(listener),
    // What is whole grows while a run goes on; who looks at all of it goes on to see all.
    grow(next) {
      const all = now[0] <= whole[0] && now[1] >= whole[1];
      whole = next;
      if (all) now = next;
    },
    // A chart that shows this window, and sets it when it is zoomed by hand.
    follow(chart, instance) {
      charts.add(chart);
      instance.on("datazoom", () => {
        const own = instance.getOption().dataZoom[0];
        if (quiet || own.startValue === undefined || own.startValue === null) return;
        show(own.startValue, own.endValue);
      });
    },
    axis: (more = {}) => ({
      type: "value",
      min: whole[0],
      max: whole[1],
      axisLabel: { formatter: (value) => weft.format.seconds(value), showMaxLabel: false },
      splitLine: { show: false },
      ...more,
    }),
    zooms: (axes, slider = true) => [
      { type: "inside", xAxisIndex: axes, filterMode: "weakFilter", startValue: now[0], endValue: now[1] },
      ...(slider
        ? [
            {
              type: "slider",
              xAxisIndex: axes,
              filterMode: "weakFilter",
              startValue: now[0],
              endValue: now[1],
              labelFormatter: (value) => weft.format.seconds(value),
            },
          ]
        : []),
    ],
  };
};
