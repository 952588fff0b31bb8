// The memory of a stage over time: how much of it is what, and which layers were on the device when.
"use strict";
weft.memory = (time) => {
  const { el, format } = weft;
  let [stages, stage, offload] = [[], null, null];
  const now = () => stages.find((own) => own.stage === stage) ?? stages[0] ?? { time: [], layers: [] };

  const picker = el("select", {
    "aria-label": "stage",
    onchange: () => ((stage = Number(picker.value)), total.draw(), lanes.draw()),
  });
  const ready = (get) => (instance, place) => (
    time.follow(get(), instance),
    place.addEventListener("keydown", time.keys)
  );
  const keys = "Arrow keys pan and zoom.";
  const total = weft.chart("Memory", {
    height: 300,
    option: (palette) => weft.bytes.option(now(), time, palette),
    keys,
    ready: ready(() => total),
    controls: [picker],
    summary: () => `stage ${now().stage}, budget ${format.bytes(now().budget)}.`,
    table: () => weft.bytes.table(now()),
  });
  const lanes = weft.chart("Layers on the device", {
    height: () => Math.max(weft.lanes.height(now().layers.length, 420), 60) + 70,
    option: (palette) => weft.layers.option(now(), time, palette),
    keys,
    ready: ready(() => lanes),
    summary: () => `${now().layers.length} layers.`,
    table: () => weft.layers.table(now()),
  });
  lanes.element.body.prepend(weft.layers.key());
  const facts = el("div");
  return {
    element: el(
      "div",
      { style: { display: "grid", gap: "14px", "grid-template-columns": "minmax(0, 1fr)" } },
      facts,
      total.element,
      lanes.element,
    ),
    update(found, counts) {
      [stages, offload] = [found, counts];
      const busiest = stages.reduce((most, own) => (!most || own.time.length > most.time.length ? own : most), null);
      if (!stages.some((own) => own.stage === stage)) stage = busiest?.stage ?? null;
      picker.replaceChildren(
        ...stages.map((own) => el("option", { value: own.stage, selected: own.stage === stage }, `stage ${own.stage}`)),
      );
      const uses = offload ? offload.hits + offload.misses : 0;
      facts.replaceChildren(
        offload
          ? weft.facts([
              ["layers found on the device", uses ? format.percent(offload.hits / uses, 1) : null],
              ["hits", format.number(offload.hits)],
              ["misses", format.number(offload.misses)],
              ["loaded", format.bytes(offload.loaded_bytes)],
              ["evicted", format.bytes(offload.evicted_bytes)],
            ])
          : "",
      );
      total.draw();
      lanes.draw();
      const rest = now().left_out;
      lanes.element.about(rest ? `${rest} smaller layers are left out` : "");
    },
  };
};
