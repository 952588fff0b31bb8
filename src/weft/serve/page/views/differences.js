// Configurations side by side: the keys in which they differ, or all.
"use strict";
weft.differences = (runs) => {
  const { el, format } = weft;
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config ?? {})))].sort();
  const differs = (key) => new Set(runs.map((run) => format.value(run.config?.[key]))).size > 1;
  let all = false;
  const rows = () => keys.filter((key) => all || differs(key));
  const table = weft.table(
    [
      { name: "key", value: (key) => key, show: (key) => el("code", {}, key) },
      ...runs.map((run) => ({
        name: run.name,
        wide: true,
        value: (key) => format.value(run.config?.[key]),
        show: (key, value) =>
          value === "" ? el("span.quiet", {}, format.DASH) : differs(key) && all ? el("mark", {}, value) : value,
      })),
    ],
    rows(),
    { label: "configurations", sort: [0, false] },
  );
  const none = el("p.quiet", { hidden: rows().length > 0 }, "These configurations are equal.");
  const toggle = el(
    "button",
    {
      type: "button",
      "aria-pressed": "false",
      onclick: () => {
        all = !all;
        toggle.setAttribute("aria-pressed", String(all));
        table.update(rows());
        none.hidden = rows().length > 0;
      },
    },
    "All keys",
  );
  return weft.figure("Configuration", {
    about: `${keys.filter(differs).length} of ${keys.length} keys differ`,
    controls: [toggle],
    body: [none, table],
  });
};
