// One subnet: its blocks as a chain, what they cost, and how to get it out.
"use strict";
weft.architecture = (member, objectives, closed) => {
  const { el, format } = weft;
  const layers = member.layers?.length
    ? member.layers
    : Object.entries(member.values ?? {}).map(([block, choice]) => ({
        block,
        choice,
        parameters: null,
        flops: null,
        shared: false,
      }));
  const most = Math.max(0, ...layers.map((own) => own.flops ?? own.parameters ?? 0));
  const colour = (own) => (own.shared ? "var(--faint)" : `var(--c${weft.theme.place(own.choice)})`);
  const blocks = layers.map((own) => {
    const cost = own.flops ?? own.parameters ?? 0;
    const facts = [
      own.shared ? "shared by all subnets" : null,
      format.known(own.parameters) ? `${format.number(own.parameters)} parameters` : null,
      format.known(own.flops) ? `${format.number(own.flops)} FLOPs` : null,
    ];
    return el(
      "li",
      {},
      el(
        "div.block",
        { style: { "--c": colour(own) }, title: facts.filter(Boolean).join(", ") },
        el("small", {}, own.block),
        own.shared ? "shared" : String(own.choice ?? ""),
        most > 0 ? el("span.cost", { style: { width: `${Math.max((100 * cost) / most, 1)}%` } }) : null,
      ),
    );
  });
  const chain = el(
    "ol.chain",
    { "aria-label": "blocks in order" },
    el("li", {}, el("span.end", {}, "in")),
    blocks,
    el("li", {}, el("span.end", {}, "out")),
  );
  const sum = (name) =>
    layers.every((own) => format.known(own[name]))
      ? format.number(layers.reduce((total, own) => total + own[name], 0))
      : null;
  const isObjective = (name) => objectives.some((own) => own.name === name);
  const command = el("div", { hidden: true }, member.command ? weft.command(member.command) : "");
  const button = el(
    "button.primary",
    {
      type: "button",
      "aria-expanded": "false",
      onclick: () => {
        command.hidden = !command.hidden;
        button.setAttribute("aria-expanded", String(!command.hidden));
      },
    },
    "Export",
  );
  const rest = Object.entries(member.values ?? {}).filter(
    ([name, value]) => !layers.some((own) => own.block === name && own.choice === value),
  );
  weft.panel.open(
    `Subnet ${member.id}`,
    [
      weft.facts([
        ...objectives.map((own) => [own.name, format.number(member.scores?.[own.name])]),
        ["parameters", isObjective("parameters") ? null : sum("parameters")],
        ["FLOPs", isObjective("flops") ? null : sum("flops")],
      ]),
      el(
        "div",
        {},
        el("h3", {}, "Architecture"),
        chain,
        most > 0 ? el("p.quiet", {}, "The line in a block is its part of the cost.") : null,
      ),
      member.command
        ? el(
            "div",
            {
              style: {
                display: "grid",
                gap: "8px",
                "justify-items": "start",
                "grid-template-columns": "minmax(0, 1fr)",
              },
            },
            button,
            command,
          )
        : null,
      el(
        "div",
        {},
        el("h3", {}, "Layers"),
        weft.table(
          [
            { name: "block", value: (own) => own.block },
            { name: "choice", value: (own) => (own.shared ? "shared" : own.choice) },
            { name: "parameters", number: true, value: (own) => own.parameters },
            { name: "FLOPs", number: true, value: (own) => own.flops },
          ],
          layers,
          { label: "layers of the subnet" },
        ),
      ),
      rest.length
        ? el("div", {}, el("h3", {}, "Choices"), weft.facts(rest.map(([name, value]) => [name, format.value(value)])))
        : null,
    ].filter(Boolean),
    closed,
  );
};
