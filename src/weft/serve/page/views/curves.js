// The curves of one run: the loss first, then each metric, training and validation together.
"use strict";
weft.views.curves = {
  addresses: (run) => [weft.documents.ofRun(run, "curves"), weft.documents.ofRun(run)],
  mount(host) {
    const { el } = weft;
    const settings = { log: false, smooth: 0 };
    const head = el("div");
    const grid = el("div.pair");
    const controls = weft.curves.controls(settings, () => charts.forEach((chart) => chart.draw()));
    host.append(head, el("div.head", {}, ...controls), grid);
    const charts = new Map();
    let groups = new Map();

    const make = (name) =>
      weft.chart(name, {
        height: 310,
        option: (palette) => weft.lines.option(groups.get(name) ?? [], settings, palette),
        table: () => weft.lines.table(groups.get(name) ?? []),
        summary: () => weft.lines.summary(groups.get(name) ?? []),
      });
    return {
      update([curves, run]) {
        head.replaceChildren(weft.curves.about(run, curves));
        groups = weft.curves.grouped(curves.series);
        for (const [name, chart] of charts) if (!groups.has(name)) (chart.element.remove(), charts.delete(name));
        for (const name of groups.keys()) {
          if (charts.has(name)) charts.get(name).draw();
          else {
            charts.set(name, make(name));
            grid.append(charts.get(name).element);
          }
        }
        const none = grid.querySelector(".empty");
        if (!groups.size && !none)
          grid.append(weft.empty("No steps yet", el("span", {}, "Curves appear with the first step event.")));
        else if (groups.size) none?.remove();
      },
    };
  },
};

weft.curves = {
  controls: (settings, changed) => [
    weft.segmented(
      "scale of the y axis",
      [
        [false, "Linear"],
        [true, "Log"],
      ],
      settings.log,
      (value) => ((settings.log = value), changed()),
    ),
    weft.slider("Smoothing", settings.smooth, 0.99, 0.01, (value) => ((settings.smooth = value), changed())),
  ],

  // Name of a metric -> its lines; "loss" stands first.
  grouped: (series) => {
    const groups = new Map();
    const order = (own) => (own.name === "loss" ? 0 : own.of === "progress" ? 2 : 1);
    for (const own of series
      .filter((one) => one.of !== "progress" || one.name !== "seconds")
      .sort((a, b) => order(a) - order(b))) {
      const group = own.of === "validation" ? own.name.replace(/ \([^)]*\)$/, "") : own.name; // "accuracy (largest)" lies with "accuracy"
      const lines = groups.get(group) ?? [];
      lines.push({
        ...own,
        name: own.of === "validation" ? `validation${own.name.slice(group.length)}` : own.name,
        colour: lines.length,
        dots: own.of === "validation" && own.x.length < 60,
      });
      groups.set(group, lines);
    }
    return groups;
  },

  // What is known of the run as a whole.
  about: (run, curves = null) => {
    const { el, format } = weft;
    const failed = run.reason ? el("p.problem", {}, run.reason) : null;
    const damaged = run.damaged || curves?.damaged;
    return el(
      "div",
      { style: { display: "grid", gap: "10px" } },
      el("div.head", {}, el("h1", {}, run.name), weft.badge(run.state, run.state)),
      failed,
      weft.facts([
        ["kind", run.kind],
        ["progress", weft.runLine.progress(run)],
        ["time left", run.seconds_left === null ? null : format.duration(run.seconds_left)],
        ["duration", run.seconds === null ? null : format.duration(run.seconds)],
        ["loss", run.loss === null ? null : format.number(run.loss)],
        ...Object.entries(run.metrics ?? {}).map(([name, value]) => [name, format.number(value)]),
        ["stages", run.kind === "tune" ? null : run.stages],
        ["device", run.device],
        ["started", format.date(run.created)],
        ["fingerprint", run.fingerprint ? weft.runLine.fingerprint(run) : null],
        [
          "equal to",
          run.same?.length
            ? el(
                "span",
                {},
                ...run.same.flatMap((name, i) => [i ? ", " : "", el("a", { href: weft.route.run(name) }, name)]),
              )
            : null,
        ],
        ["downsampled from", curves?.points > 1000 ? `${format.number(curves.points)} points` : null],
        ["damaged lines skipped", damaged || null],
      ]),
    );
  },
};
