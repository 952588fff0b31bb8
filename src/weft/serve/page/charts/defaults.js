// What all charts share: colours of the theme, no motion, tooltips that stay inside.
"use strict";
weft.chart.dressed = (option, width) => {
  const p = weft.theme.palette();
  const axis = (given) => ({
    nameTextStyle: { color: p.note },
    nameGap: 24,
    nameLocation: "middle",
    ...given,
    axisLine: { lineStyle: { color: p.line }, ...given.axisLine },
    axisTick: { lineStyle: { color: p.line }, ...given.axisTick },
    axisLabel: { color: p.note, hideOverlap: true, ...given.axisLabel },
    splitLine: { lineStyle: { color: p.grid }, ...given.splitLine },
    minorSplitLine: { lineStyle: { color: p.grid } },
  });
  const many = (value, each) =>
    value === undefined ? undefined : Array.isArray(value) ? value.map(each) : each(value);
  const zoom = (given) =>
    given.type !== "slider"
      ? { preventDefaultMouseMove: false, zoomOnMouseWheel: "ctrl", ...given }
      : {
          height: 14,
          bottom: 8,
          borderColor: p.line,
          fillerColor: `${p.accent}22`,
          backgroundColor: "transparent",
          brushSelect: false,
          dataBackground: { lineStyle: { opacity: 0 }, areaStyle: { opacity: 0 } },
          selectedDataBackground: { lineStyle: { opacity: 0 }, areaStyle: { opacity: 0 } },
          handleStyle: { color: p.box, borderColor: p.faint },
          moveHandleStyle: { color: p.line },
          textStyle: { color: p.note },
          ...given,
        };
  return {
    animation: false,
    backgroundColor: "transparent",
    color: p.series,
    textStyle: { color: p.ink, fontFamily: "system-ui, sans-serif" },
    ...option,
    xAxis: many(option.xAxis, axis),
    yAxis: many(option.yAxis, axis),
    dataZoom: many(option.dataZoom, zoom),
    tooltip: {
      confine: true,
      backgroundColor: p.box,
      borderColor: p.line,
      padding: [7, 10],
      textStyle: { color: p.ink },
      transitionDuration: 0,
      ...option.tooltip,
    },
    legend: option.legend && {
      type: "scroll",
      top: 0,
      left: 0,
      width: Math.max(width - 10, 60),
      textStyle: { color: p.note },
      icon: "roundRect",
      itemWidth: 11,
      itemHeight: 11,
      pageTextStyle: { color: p.note },
      pageIconColor: p.note,
      pageIconInactiveColor: p.line,
      inactiveColor: p.line,
      ...option.legend,
    },
  };
};
