// All runs: how far they are, how they do, which are equal; several ticked ones are compared.
"use strict";
weft.views.runs = {
  addresses: () => ["/api/runs"],
  mount(host) {
    const { el, format } = weft;
    const ticked = new Set();
    const sparks = new Map(); // name -> {revision, picture}
    const compare = el(
      "button.primary",
      { type: "button", disabled: true, onclick: () => (location.hash = weft.route.compare([...ticked])) },
      "Compare",
    );
    const title = el("h1", {}, "Runs");
    const note = el("span.quiet");
    const filter = el("input", {
      type: "search",
      placeholder: "Filter",
      "aria-label": "filter runs by name, kind or state",
      oninput: () => fill(),
    });
    const list = el("div");
    const plans = el("div");
    host.append(el("div.head", {}, title, note, el("span.spring"), filter, compare), list, plans);
    let [now, table] = [{ runs: [], plans: [] }, null];

    const tick = (run, box) => {
      if (box.checked) ticked.add(run.name);
      else ticked.delete(run.name);
      compare.disabled = ticked.size < 2;
      compare.textContent = ticked.size ? `Compare ${ticked.size}` : "Compare";
    };
    const columns = [
      {
        name: "",
        plain: true,
        value: () => "",
        show: (run) => {
          const box = el("input", {
            type: "checkbox",
            checked: ticked.has(run.name),
            "aria-label": `compare ${run.name}`,
            onchange: () => tick(run, box),
          });
          return box;
        },
      },
      { name: "run", value: (run) => run.name, show: (run) => el("a", { href: weft.route.run(run.name) }, run.name) },
      { name: "state", value: (run) => run.state, show: (run) => weft.badge(run.state, run.state, run.reason) },
      {
        name: "progress",
        number: true,
        value: (run) => (run.steps ? run.done / run.steps : null),
        show: weft.runLine.progress,
      },
      { name: "time left", number: true, value: (run) => run.seconds_left, show: (run) => format.duration(run.seconds_left) },
      { name: "loss curve", plain: true, value: () => "", show: (run) => weft.spark(run, sparks) },
      { name: "loss", number: true, value: (run) => run.loss },
      {
        name: "metrics",
        value: (run) => Object.values(run.metrics ?? {})[0] ?? null,
        show: (run) => weft.runLine.metrics(run),
      },
      { name: "fingerprint", value: (run) => run.fingerprint ?? "", show: (run) => weft.runLine.fingerprint(run) },
      { name: "kind", value: (run) => run.kind },
      {
        name: "stages",
        number: true,
        value: (run) => (run.kind === "tune" ? null : run.stages),
        show: (run, value) => value ?? "",
      },
      { name: "duration", number: true, value: (run) => run.seconds, show: (run) => format.duration(run.seconds) },
      { name: "started", value: (run) => run.created, show: (run) => format.date(run.created) },
    ];
    const fill = () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      const rows = now.runs.filter((run) =>
        words.every((word) => `${run.name} ${run.kind} ${run.state}`.toLowerCase().includes(word)),
      );
      table?.update(rows);
    };
    return {
      update([found]) {
        now = found;
        const going = now.runs.filter((run) => run.state === "running").length;
        note.textContent = `${now.runs.length} in ${now.root}${going ? `, ${going} running` : ""}${now.runs.length > 1 ? "; tick several to compare them" : ""}`;
        for (const name of ticked) if (!now.runs.some((run) => run.name === name)) ticked.delete(name);
        if (!now.runs.length) {
          table = null;
          list.replaceChildren(
            weft.empty(
              "No runs here yet",
              el("span", {}, "try ", el("code", {}, "make demo"), ", or ", el("code", {}, "weft train config.toml")),
            ),
          );
        } else if (!table) {
          table = weft.table(columns, now.runs, { label: "runs", head: 1 });
          list.replaceChildren(weft.el("section.figure.bare", { "aria-label": "all runs" }, table));
        }
        fill();
        plans.replaceChildren(now.plans?.length ? weft.runLine.plans(now.plans) : "");
        note.textContent += now.runs.reduce((sum, run) => sum + (run.damaged || 0), 0)
          ? ", some event lines were damaged and skipped"
          : "";
      },
    };
  },
};
