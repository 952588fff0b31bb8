// A chart in a box: drawn when it has a size, drawn anew on a change of theme, and always with a table beside it.
"use strict";
weft.timings = []; // {title, ms} of each drawing, for whoever measures

// options: height (a number or a function), option(palette) -> ECharts option, table() -> element, summary() -> text,
// about, controls, keys: what the arrow keys do, ready(instance): once, after the first drawing.
weft.chart = (title, options) => {
  const { el } = weft;
  const place = el("div.chart", { role: options.keys ? "application" : "img", tabIndex: options.keys ? 0 : -1 });
  const alternative = el("div", { hidden: true });
  const toggle = el(
    "button",
    {
      type: "button",
      "aria-pressed": "false",
      onclick: () => {
        alternative.hidden = !alternative.hidden;
        place.hidden = !alternative.hidden;
        toggle.setAttribute("aria-pressed", String(!alternative.hidden));
        if (!alternative.hidden) alternative.replaceChildren(options.table());
      },
    },
    "Table",
  );
  const element = weft.figure(title, {
    about: options.about,
    controls: [...(options.controls ?? []), options.table ? toggle : null].filter(Boolean),
    body: [place, alternative],
  });
  let instance = null;

  const draw = () => {
    place.setAttribute("aria-label", `${title}. ${options.summary?.() ?? ""} ${options.keys ?? ""}`.trim());
    const height = typeof options.height === "function" ? options.height() : (options.height ?? 300);
    place.style.setProperty("height", `${height}px`);
    if (!alternative.hidden && options.table) alternative.replaceChildren(options.table());
    if (!instance) return;
    if (instance.getHeight() !== height) instance.resize();
    const began = performance.now();
    instance.setOption(
      weft.chart.dressed(options.option(weft.theme.palette(), instance.getWidth()), instance.getWidth()),
      { replaceMerge: ["series", "xAxis", "yAxis", "grid", "visualMap"] },
    );
    instance.getZr().flush();
    weft.timings.push({ title, ms: performance.now() - began });
    if (weft.timings.length > 500) weft.timings.shift();
  };
  const watcher = new ResizeObserver(() => {
    if (!place.clientWidth || !place.clientHeight) return;
    if (instance) {
      const narrow = instance.getWidth() < 560;
      instance.resize();
      if (narrow !== instance.getWidth() < 560) draw();
      return;
    }
    instance = echarts.init(place, null, { renderer: "canvas" });
    draw();
    place.dataset.drawn = "";
    options.ready?.(instance, place);
  });
  watcher.observe(place);
  const chart = {
    element,
    place,
    draw,
    get instance() {
      return instance;
    },
    title,
    dispose: () => (watcher.disconnect(), instance?.dispose()),
  };
  weft.chart.all.add(chart);
  draw();
  return chart;
};
weft.chart.all = new Set();
weft.theme.listen(() => weft.chart.all.forEach((chart) => chart.draw()));

// Charts that are no longer in the page let go of their canvases.
weft.chart.sweep = () =>
  weft.chart.all.forEach((chart) => {
    if (!document.contains(chart.element)) {
      chart.dispose();
      weft.chart.all.delete(chart);
    }
  });
