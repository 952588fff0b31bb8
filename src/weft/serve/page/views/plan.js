// A plan: its graph by strategy, what a step costs and a device holds, and the alternatives.
"use strict";
weft.views.plan = {
  addresses: (plan) => [weft.documents.ofPlan(plan)],
  mount(host) {
    const { el, format } = weft;
    let last = null; // the plan that is shown, as text
    const COLOURS = {
      compute: "var(--c0)",
      communication: "var(--c1)",
      bubble: "var(--faint)",
    };
    const SHADES = ["var(--c0)", "var(--c3)", "var(--c2)", "var(--c8)", "var(--c4)", "var(--c5)"];
    const part = (name, value, words, colour) => ({ name, value: value ?? 0, words, colour });

    const cost = (plan) => {
      const pairs = Object.entries(plan.seconds ?? {}).filter(
        ([name, value]) => name in COLOURS && format.known(value) && (name !== "bubble" || value > 0),
      );
      const total = pairs.reduce((sum, [, value]) => sum + value, 0);
      return weft.figure("A step", {
        about: format.seconds(total),
        body: [
          weft.key(
            pairs.map(([name, value]) => [
              `${name} ${format.seconds(value)} (${format.percent(total ? value / total : 0)})`,
              COLOURS[name],
            ]),
          ),
          weft.bars([
            {
              label: "step",
              note: format.seconds(total),
              parts: pairs.map(([name, value]) => part(name, value, format.seconds(value), COLOURS[name])),
            },
          ]),
        ],
      });
    };
    const memory = (plan) => {
      const names = [...new Set(plan.memory.flatMap((row) => Object.keys(row.parts)))];
      const limit = Math.max(0, ...plan.memory.map((row) => row.limit ?? 0));
      return weft.figure("Memory of a device", {
        about: limit ? `of ${format.bytes(limit)}, the line` : "there is no limit",
        body: [
          weft.key(names.map((name, i) => [name, SHADES[i % 6]])),
          weft.bars(
            plan.memory.map((row) => {
              const sum = Object.values(row.parts).reduce((total, value) => total + (value ?? 0), 0);
              return {
                label: format.value(row.device ?? row.stage),
                mark: row.limit,
                markTitle: `limit ${format.bytes(row.limit)}`,
                note: row.limit ? `${format.bytes(sum)}, ${format.percent(sum / row.limit)}` : format.bytes(sum),
                parts: names.map((name, i) =>
                  part(name, row.parts[name], format.bytes(row.parts[name]), SHADES[i % 6]),
                ),
              };
            }),
          ),
        ],
      });
    };
    // Whatever keys the rows have become columns.
    const compared = (plan) => {
      const known = (value) => value !== null && value !== undefined && value !== "";
      const keys = [...new Set(plan.comparisons.flatMap((row) => Object.keys(row).filter((key) => known(row[key]))))];
      const shown = (key, value) => {
        if (typeof value === "boolean") return value ? "yes" : "no";
        if (typeof value !== "number") return value === null || value === undefined ? "" : format.value(value);
        if (/memory|bytes|limit|parameters|activations/.test(key)) return format.bytes(value);
        if (/faster|ratio|times/.test(key)) return `${value.toFixed(2)}x`;
        return /second|step|time|compute|communication|bubble/.test(key) ? format.seconds(value) : format.number(value);
      };
      return weft.figure("Compared with", {
        body: weft.table(
          keys.map((key) => ({
            name: key.replaceAll("_", " "),
            number: plan.comparisons.some((row) => typeof row[key] === "number"),
            wide: key === "reason",
            value: (row) => row[key],
            show: (row, value) => shown(key, value),
          })),
          plan.comparisons,
          {
            label: "comparison with other ways",
            mark: (row) => (row.own || row.name === "this plan" ? "chosen" : null),
          },
        ),
      });
    };
    const untried = (plan) =>
      plan.untried ? `the time was up: ${plan.untried} that might be faster were not tried` : null;
    return {
      update([plan]) {
        if (last === JSON.stringify(plan)) return;
        last = JSON.stringify(plan);
        const graph = plan.graph ? weft.graph(plan.graph) : null;
        host.replaceChildren(
          ...[
            el("h1", {}, `${plan.model} on ${plan.devices} x ${plan.machine}`),
            weft.facts([
              ["plan", plan.name],
              ["mesh", format.value(plan.mesh)],
              ["stages", plan.stages],
              ["micro-batches", plan.microbatches],
              ["activations", plan.recompute === undefined ? null : plan.recompute ? "recomputed" : "kept"],
              [
                "proof",
                format.known(plan.gap)
                  ? plan.gap < 1e-9
                    ? "the best with this mesh"
                    : `within ${format.percent(Math.max(plan.gap, 0.001), 1)} of the best with this mesh`
                  : null,
              ],
              ["other ways to use the devices", untried(plan)],
              ["without a rule", plan.without_rule?.join(", ")],
            ]),
            el("div.pair", {}, cost(plan), plan.memory?.length ? memory(plan) : null),
            graph
              ? weft.figure("Strategy", {
                  controls: [graph.controls],
                  about: "a box is an operator, its colour says how it is split; layers that repeat are shown once",
                  body: [graph.body],
                })
              : plan.note
                ? weft.empty("The graph is not shown", el("span", {}, plan.note))
                : null,
            plan.comparisons?.length ? compared(plan) : null,
          ].filter(Boolean),
        );
        graph?.shown();
      },
    };
  },
};
