// A study: its trials, which parameters matter, and how the devices were packed.
"use strict";
weft.views.tune = {
  addresses: (run) => [weft.documents.ofRun(run, "tune"), weft.documents.ofRun(run)],
  mount(host) {
    const { el, format } = weft;
    const [head, facts, body] = [
      el("div"),
      el("div"),
      el("div", { style: { display: "grid", gap: "14px", "grid-template-columns": "minmax(0, 1fr)" } }),
    ];
    host.append(head, facts, body);
    let [now, parts, only, shape] = [null, null, null, ""];

    const best = () => {
      const up = now.objectives[0]?.maximize;
      return now.trials
        .filter((trial) => trial.state === "complete" && format.known(trial.values?.[0]))
        .reduce(
          (found, trial) =>
            !found || (up ? trial.values[0] > found.values[0] : trial.values[0] < found.values[0]) ? trial : found,
          null,
        );
    };
    const importances = () => {
      const groups = Object.entries(now.importances ?? {}).filter(([, pairs]) => pairs.length);
      if (!groups.length)
        return weft.figure("Importances", { body: el("p.quiet", {}, "Known once enough trials are complete.") });
      return weft.figure("Importances", {
        about: "how much of the objective's variance a parameter explains",
        body: groups.map(([name, pairs]) =>
          el(
            "div",
            {},
            groups.length > 1 ? el("h3", {}, name) : null,
            weft.bars(
              [...pairs]
                .sort((a, b) => b[1] - a[1])
                .map(([label, value]) => ({
                  label,
                  note: format.percent(value),
                  parts: [{ name: "importance", value, words: format.percent(value, 1), colour: "var(--c0)" }],
                })),
              { full: 1 },
            ),
          ),
        ),
      });
    };
    // What trials reported on their way.
    const reports = () =>
      weft.chart("Reports", {
        height: 300,
        summary: () => `${now.trials.filter((trial) => trial.reports?.length).length} trials reported.`,
        option: (palette) => ({
          grid: { left: 56, right: 16, top: 14, bottom: 60 },
          xAxis: { type: "value", name: "step", splitLine: { show: false } },
          yAxis: { type: "value", scale: true, axisLabel: { formatter: (value) => format.number(value, 3) } },
          dataZoom: [{ type: "inside" }, { type: "slider" }],
          tooltip: {
            trigger: "item",
            formatter: (at) =>
              weft.tip(at.seriesName, [
                ["step", at.value[0]],
                ["value", format.number(at.value[1])],
              ]),
          },
          series: now.trials
            .filter((trial) => trial.reports?.length)
            .slice(-300)
            .map((trial) => ({
              id: String(trial.number),
              name: `trial ${trial.number}`,
              type: "line",
              data: trial.reports,
              symbolSize: 5,
              showSymbol: true,
              lineStyle: { width: 1.2, opacity: 0.7 },
              itemStyle: {
                color: palette.series[weft.trials.place(trial.state)],
              },
            })),
        }),
        table: () =>
          weft.table(
            [
              { name: "trial", number: true, value: (row) => row[0] },
              { name: "step", number: true, value: (row) => row[1] },
              { name: "value", number: true, value: (row) => row[2] },
            ],
            now.trials.flatMap((trial) => (trial.reports ?? []).map(([at, value]) => [trial.number, at, value])),
            { label: "reports" },
          ),
      });
    const rows = () => now.trials.filter((trial) => !only || only.has(trial.number));
    const build = () => {
      const listed = el("span.quiet");
      const coordinates = weft.coordinates(
        () => now,
        (numbers) => {
          only = numbers;
          parts.table.update(rows());
          parts.describe();
        },
      );
      const table = weft.trials.table(() => now, { sort: [2, Boolean(now.objectives[0]?.maximize)] });
      const describe = () =>
        (listed.textContent = only
          ? `${only.size} of ${now.trials.length} are selected above`
          : `${now.trials.length} trials`);
      parts = {
        coordinates,
        devices: now.devices?.length ? weft.devices(() => now) : null,
        reports: now.trials.some((trial) => trial.reports?.length) ? reports() : null,
        important: el("div"),
        table,
        describe,
      };
      body.replaceChildren(
        coordinates.element,
        el("div.pair", {}, parts.important, parts.reports?.element ?? null),
        ...(parts.devices ? [parts.devices.element] : []),
        weft.figure("All trials", { controls: [listed], body: table }),
      );
    };
    return {
      update([found, run]) {
        now = found;
        head.replaceChildren(weft.curves.about(run));
        const counts = Object.entries(
          now.trials.reduce((sums, trial) => ({ ...sums, [trial.state]: (sums[trial.state] ?? 0) + 1 }), {}),
        )
          .map(([state, count]) => `${count} ${state}`)
          .join(", ");
        const first = best();
        facts.replaceChildren(
          weft.facts([
            ["study", found.study],
            ["objectives", found.objectives.map((own) => `${own.maximize ? "max" : "min"} ${own.name}`).join(", ")],
            ["trials", counts],
            ["listed", found.count > now.trials.length ? `${now.trials.length} of ${found.count}` : null],
            ["best", first ? `${format.number(first.values[0])} (trial ${first.number})` : null],
            [
              "how they fit",
              Object.entries(found.fit ?? {})
                .map(([name, count]) => `${count} ${name}`)
                .join(", "),
            ],
          ]),
        );
        if (!now.trials.length)
          return (
            body.replaceChildren(
              weft.empty("No trials yet", el("span", {}, "They appear as soon as the first is proposed.")),
            ),
            (parts = null)
          );
        const columns = JSON.stringify([
          now.parameters.map((own) => own.name),
          now.objectives,
          Boolean(now.devices?.length),
          now.trials.some((trial) => trial.reports?.length),
        ]);
        if (!parts || columns !== shape) build();
        shape = columns;
        parts.important.replaceChildren(importances());
        parts.coordinates.draw();
        parts.devices?.draw();
        parts.reports?.draw();
        parts.table.update(rows());
        parts.describe();
      },
    };
  },
};
