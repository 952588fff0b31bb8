// Several runs on one chart, with the settings in which they differ.
"use strict";
weft.views.compare = {
  addresses: (names) =>
    names
      .split(",")
      .filter(Boolean)
      .flatMap((part) => {
        const name = decodeURIComponent(part);
        return [weft.documents.ofRun(name), weft.documents.ofRun(name, "curves")];
      }),
  mount(host) {
    const { el } = weft;
    const settings = { log: false, smooth: 0, bands: false, metric: null };
    let runs = [];
    const picker = el("select", { onchange: () => ((settings.metric = picker.value), chart.draw()) });
    const metrics = () => {
      const found = [...new Set(runs.flatMap(({ curves }) => curves.series.map((own) => `${own.name} (${own.of})`)))];
      return found.sort((a, b) => (b === "loss (train)") - (a === "loss (train)"));
    };
    const lines = () =>
      runs.flatMap(({ run, curves }, colour) =>
        curves.series
          .filter((own) => `${own.name} (${own.of})` === settings.metric)
          .map((own) => ({
            ...own,
            name: run.name,
            colour,
            dashed: runs.slice(0, colour).some((other) => run.fingerprint && other.run.fingerprint === run.fingerprint),
            dots: own.of === "validation" && own.x.length < 60,
          })),
      );
    const chart = weft.chart("Curves", {
      height: 430,
      option: (palette) => weft.lines.option(lines(), settings, palette),
      table: () => weft.lines.table(lines()),
      summary: () => weft.lines.summary(lines()),
      controls: [el("label.control", {}, "Metric", picker), ...weft.curves.controls(settings, () => chart.draw())],
    });
    const summary = el("div");
    const differences = el("div");
    host.append(
      el("div.head", {}, el("h1", {}, "Comparison"), el("span.spring"), el("a", { href: "#/" }, "Choose other runs")),
      chart.element,
      summary,
      differences,
    );
    let shown = null;
    return {
      update(documents) {
        runs = [];
        for (let i = 0; i + 1 < documents.length; i += 2)
          if (documents[i]) runs.push({ run: documents[i], curves: documents[i + 1] ?? { series: [] } });
        const names = metrics();
        if (!names.includes(settings.metric)) settings.metric = names[0] ?? null;
        picker.replaceChildren(
          ...names.map((name) => el("option", { value: name, selected: name === settings.metric }, name)),
        );
        chart.draw();
        summary.replaceChildren(weft.figure("Runs", { body: weft.compare(runs.map(({ run }) => run)) }));
        const configs = JSON.stringify(runs.map(({ run }) => run.config));
        if (configs !== shown) differences.replaceChildren(weft.differences(runs.map(({ run }) => run))); // a press on "All keys" stays
        shown = configs;
      },
    };
  },
};

weft.compare = (runs) => {
  const { el, format } = weft;
  const counts = new Map();
  for (const run of runs) if (run.fingerprint) counts.set(run.fingerprint, (counts.get(run.fingerprint) ?? 0) + 1);
  return weft.table(
    [
      {
        name: "run",
        value: (run) => run.name,
        show: (run) =>
          el(
            "span",
            {},
            el("i.swatch", { style: { background: `var(--c${runs.indexOf(run) % 12})` } }),
            el("a", { href: weft.route.run(run.name) }, run.name),
          ),
      },
      { name: "state", value: (run) => run.state, show: (run) => weft.badge(run.state) },
      { name: "progress", number: true, value: (run) => run.done, show: weft.runLine.progress },
      { name: "loss", number: true, value: (run) => run.loss },
      { name: "metrics", value: (run) => weft.runLine.metrics(run) },
      { name: "stages", number: true, value: (run) => run.stages },
      { name: "duration", number: true, value: (run) => run.seconds, show: (run) => format.duration(run.seconds) },
      {
        name: "fingerprint",
        value: (run) => run.fingerprint ?? "",
        show: (run) =>
          run.fingerprint
            ? el(
                "span",
                {},
                el("code", { title: run.fingerprint }, run.fingerprint.slice(0, 10)),
                counts.get(run.fingerprint) > 1 ? " " : null,
                counts.get(run.fingerprint) > 1 ? weft.badge("equal", "same", "equal to the last bit") : null,
              )
            : format.DASH,
      },
    ],
    runs,
    { label: "the runs compared" },
  );
};
