// Which layers were on the device of a stage, and when.
"use strict";
weft.layers = (() => {
  const { format } = weft;
  const colour = (name) => weft.bytes.STATES.find(([own]) => own === name)?.[1] ?? 11;
  const option = (own, time, palette) => {
    const bars = own.layers.flatMap((layer, lane) => layer.spans.map((span) => [span, lane, layer]));
    return {
      grid: { left: 118, right: 14, top: 8, bottom: 56 },
      xAxis: time.axis(),
      yAxis: weft.lanes.axis(own.layers.map((layer) => layer.name)),
      dataZoom: time.zooms([0]),
      tooltip: { trigger: "item" },
      series: [
        weft.lanes.series(
          "layers",
          bars.map(([[, start, end], lane], i) => [start, end ?? time.whole[1], lane, i]),
          (i) => ({ fill: palette.series[colour(bars[i][0][0])], from: 0.15, to: 0.85, opacity: 0.85 }),
          {
            tooltip: {
              formatter: (at) => {
                const [[state, start, end], , layer] = bars[at.value[3]];
                return weft.tip(layer.name, [
                  ["state", state],
                  ["size", format.bytes(layer.bytes)],
                  ["from", format.seconds(start)],
                  ["for", format.seconds((end ?? time.whole[1]) - start)],
                ]);
              },
            },
          },
        ),
      ],
    };
  };
  const key = () =>
    weft.key(["arriving", "resident", "leaving"].map((state) => [state, `var(--c${colour(state)})`]));
  const table = (own) =>
    weft.table(
      [
        { name: "layer", value: (layer) => layer.name },
        { name: "size", number: true, value: (layer) => layer.bytes, show: (layer, value) => format.bytes(value) },
        {
          name: "times resident",
          number: true,
          value: (layer) => layer.spans.filter(([state]) => state === "resident").length,
        },
      ],
      own.layers,
      { label: "layers" },
    );
  return { option, key, table };
})();
