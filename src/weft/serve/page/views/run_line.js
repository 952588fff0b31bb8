// What the line about a run is made of: progress, metrics, fingerprint; and the list of plans.
"use strict";
weft.runLine = {
  progress: (run) => {
    if (!run.steps) return weft.format.DASH;
    const share = Math.min((run.done ?? 0) / run.steps, 1);
    return weft.el(
      "span",
      {},
      weft.el("span.progress", { "aria-hidden": "true" }, weft.el("i", { style: { width: `${100 * share}%` } })),
      `${run.done ?? 0} / ${run.steps}`,
    );
  },
  metrics: (run) =>
    Object.entries(run.metrics ?? {})
      .map(([name, value]) => `${name} ${weft.format.number(value, 3)}`)
      .join(", "),
  fingerprint: (run) => {
    if (!run.fingerprint) return weft.format.DASH;
    const same = run.same?.length
      ? weft.badge(
          run.same.length > 1 ? `= ${run.same.length} others` : `= ${run.same[0]}`,
          "same",
          `equal to the last bit: ${run.same.join(", ")}`,
        )
      : null;
    return weft.el(
      "span",
      {},
      weft.el("code", { title: run.fingerprint }, run.fingerprint.slice(0, 10)),
      same ? " " : null,
      same,
    );
  },
  plans: (plans) => {
    return weft.figure("Plans", {
      body: weft.table(
        [
          {
            name: "plan",
            value: (plan) => plan.name,
            show: (plan) => weft.el("a", { href: weft.route.plan(plan.name) }, plan.name),
          },
          { name: "model", value: (plan) => plan.model },
          { name: "devices", number: true, value: (plan) => plan.devices },
        ],
        plans,
        { label: "plans" },
      ),
    });
  },
};
