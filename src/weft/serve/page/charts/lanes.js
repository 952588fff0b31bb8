// Bars on lanes over time: what the Gantt chart, the layers in memory and the devices of a study are drawn with.
"use strict";
weft.lanes = (() => {
  // A series whose data are [start, end, lane, number]; `look(number)` says {fill, from, to, text?, opacity?}, where from
  // and to are the part of the lane's height that a bar takes, from the top.
  const series = (id, data, look, more = {}) => ({
    id,
    type: "custom",
    data,
    clip: true,
    encode: { x: [0, 1], y: 2 },
    progressive: 3000,
    progressiveThreshold: 8000,
    emphasis: { disabled: true },
    ...more,
    renderItem: (params, api) => {
      const lane = api.value(2);
      const [left, middle] = api.coord([api.value(0), lane]);
      const [right] = api.coord([api.value(1), lane]);
      const high = api.size([0, 1])[1];
      const own = look(api.value(3));
      const gap = high > 12 ? 1 : 0;
      const width = Math.max(right - left - (right - left > 4 ? 0.7 : 0), 0.6);
      const shape = echarts.graphic.clipRectByRect(
        {
          x: left,
          y: middle - high / 2 + high * own.from + gap,
          width,
          height: Math.max(high * (own.to - own.from) - 2 * gap, 0.5),
        },
        params.coordSys,
      );
      if (!shape) return undefined;
      const rect = { type: "rect", shape, style: { fill: own.fill, opacity: own.opacity ?? 1 } };
      if (own.text && shape.width > 7 * own.text.length + 4 && shape.height > 11) {
        rect.textContent = { type: "text", style: { text: own.text, fill: own.ink, fontSize: 10.5 } };
        rect.textConfig = { position: "inside" };
      }
      return rect;
    },
  });

  // As high as lanes need to be read, within reason.
  const height = (lanes, room = 420) => Math.min(Math.max(Math.round(room / Math.max(lanes, 1)), 7), 30) * lanes;

  const axis = (names, more = {}) => ({
    type: "category",
    inverse: true,
    data: names,
    axisTick: { show: false },
    splitLine: { show: names.length < 40 },
    axisLabel: { interval: names.length > 24 ? Math.ceil(names.length / 16) - 1 : 0, width: 110, overflow: "truncate" },
    ...more,
  });

  return { series, height, axis };
})();
