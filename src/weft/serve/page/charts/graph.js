// The graph of a plan: a box an operator, coloured by its split; made of elements one by one, names always as text.
"use strict";
weft.graph = (graph) => {
  const { el, format } = weft;
  const laid = weft.layout(graph);
  const svg = (tag, given = {}, ...children) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(given)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  };
  const short = (text, most) => (text.length <= most ? text : `…${text.slice(1 - most)}`);

  // Hues that differ clearly for the first splits, then any; grey for what is not split.
  const ORDER = [0, 3, 2, 4, 5, 8, 6, 7, 10, 9];
  const colours = graph.splits.map(({ label }, i) => {
    if (label.startsWith("whole")) return "var(--c11)";
    return i < ORDER.length ? `var(--c${ORDER[i]})` : `hsl(${(i * 137.5) % 360} 45% 45%)`;
  });

  const tip = (kind) =>
    svg(
      "marker",
      {
        id: `arrow-${kind}`,
        viewBox: "0 0 8 8",
        refX: 7,
        refY: 4,
        markerWidth: 9,
        markerHeight: 9,
        markerUnits: "userSpaceOnUse",
        orient: "auto",
      },
      svg("path", { class: `tip ${kind}`, d: "M0 0.5 8 4 0 7.5z" }),
    );
  const frame = ({ x, y, width, height }, shift) =>
    svg("rect", { class: "column", x: x + 5 * shift, y: y - 5 * shift, width, height, rx: 10 });
  const header = ({ title, times, stage }, place, isNew) => {
    const room = Math.floor((place.width - 24) / 7) - (times > 1 ? 7 : 0);
    const words = svg("text", { class: "title", x: place.x + 12, y: place.y + 19 }, short(title, room));
    if (times > 1) words.append(svg("tspan", { class: "times", dx: 7 }, `x ${times}`));
    words.append(svg("title", {}, times > 1 ? `${title}: ${times} equal layers` : title));
    return isNew && stage ? [words, svg("text", { class: "stage", x: place.x, y: place.y - 15 }, stage)] : [words];
  };
  const box = (node) => {
    const { x, y } = laid.nodes.get(node.id);
    const { label } = graph.splits[node.split];
    const made = svg(
      "g",
      { class: "box", role: "img", tabindex: -1, transform: `translate(${x} ${y})` },
      svg("title", {}, `${node.operator}: ${node.kind}, ${node.words}`),
      svg("rect", { class: "back", width: laid.WIDE, height: laid.HIGH, rx: 7 }),
      svg("rect", { class: "body", width: laid.WIDE, height: laid.HIGH, rx: 7 }),
      svg("rect", { class: "edge", width: 6, height: laid.HIGH, rx: 3 }),
      svg("text", { class: "name", x: 15, y: 19 }, short(node.name, 25)),
      svg("text", { class: "note", x: 15, y: 35 }, short(`${node.kind} · ${label.replace(/ on .*/, "")}`, 31)),
    );
    made.style.setProperty("--c", colours[node.split]);
    return made;
  };

  const drawing = svg(
    "svg",
    {
      viewBox: `0 0 ${laid.width} ${laid.height}`,
      width: laid.width,
      height: laid.height,
      role: "group",
      "aria-label": "graph of operators",
    },
    svg("defs", {}, tip("still"), tip("moved")),
  );
  graph.columns.forEach((column, i) => {
    const before = graph.columns[i - 1];
    for (const shift of column.times > 1 ? [2, 1, 0] : [0]) drawing.append(frame(laid.columns[i], shift));
    drawing.append(...header(column, laid.columns[i], !before || before.stage !== column.stage));
  });
  // What moves between devices is drawn above the other lines, and boxes above all.
  const lines = [...laid.lines].sort((a, b) => a.moved - b.moved);
  for (const line of lines) {
    const kind = line.moved ? "moved" : "still";
    line.element = svg("path", { class: `line ${kind}`, d: line.path, "marker-end": `url(#arrow-${kind})` });
    drawing.append(line.element);
  }
  const nodes = graph.columns.flatMap((column) => column.nodes);
  const boxes = nodes.map(box);
  boxes[0].setAttribute("tabindex", "0");
  drawing.append(...boxes);

  // Zoom, by buttons and keys; panning is the box's own scrolling, and dragging.
  let scale = 1;
  const zoom = (by) => {
    const before = scale;
    scale = Math.min(Math.max(scale * by, 0.08), 4);
    drawing.setAttribute("width", laid.width * scale);
    drawing.setAttribute("height", laid.height * scale);
    const change = scale / before;
    place.scrollLeft = (place.scrollLeft + place.clientWidth / 2) * change - place.clientWidth / 2;
    place.scrollTop = (place.scrollTop + place.clientHeight / 2) * change - place.clientHeight / 2;
  };
  const whole = () => Math.min((place.clientWidth - 4) / laid.width, (place.clientHeight - 4) / laid.height, 1);
  const place = el("div.graph", {
    tabIndex: 0,
    role: "region",
    "aria-label": "graph of operators; arrow keys go from box to box, + and - zoom, 0 shows all",
  });
  place.append(drawing);
  const fit = () => zoom(whole() / scale);
  place.onkeydown = (event) => {
    const act = { "+": () => zoom(1.25), "=": () => zoom(1.25), "-": () => zoom(0.8), 0: fit }[event.key];
    if (act && !event.ctrlKey && !event.metaKey) (event.preventDefault(), act());
  };
  let held = null;
  place.onpointerdown = (event) => {
    if (event.pointerType === "mouse" && event.button === 0)
      held = [event.clientX + place.scrollLeft, event.clientY + place.scrollTop];
  };
  place.onpointermove = (event) => {
    if (!held || !(event.buttons & 1)) return ((held = null), place.classList.remove("held"));
    place.classList.add("held");
    [place.scrollLeft, place.scrollTop] = [held[0] - event.clientX, held[1] - event.clientY];
  };
  place.onpointerup = place.onpointerleave = () => ((held = null), place.classList.remove("held"));

  const about = el(
    "div.about-box",
    { "aria-live": "polite" },
    el("p.quiet", {}, "Point at an operator, tap it, or go there by the arrow keys to read about it."),
  );
  const show = (i) => {
    const node = nodes[i];
    for (const line of lines)
      line.element.classList.toggle("near", line.source === node.id || line.reader === node.id);
    boxes.forEach((own, at) => {
      own.setAttribute("tabindex", at === i ? "0" : "-1");
      own.classList.toggle("chosen", at === i);
    });
    about.replaceChildren(...weft.aboutNode(node, graph.splits[node.split].label, colours[node.split]));
  };
  boxes.forEach((own, i) => {
    own.onfocus = own.onmouseenter = () => show(i);
    own.onclick = () => own.focus();
    own.onkeydown = (event) => {
      const next = boxes[i + ({ ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key] ?? NaN)];
      if (next) (event.preventDefault(), next.focus());
    };
  });

  const counted = (number) => `${format.number(number)} operator${number === 1 ? "" : "s"}`;
  const legend = graph.splits.map(({ label, count }, i) => [
    el("span", {}, el("b", {}, label), ` ${counted(count)}`),
    colours[i],
  ]);
  const stroke = (kind, words) => el("li", {}, el(`i.stroke.${kind}`), words);
  const moves = lines.some((line) => line.moved);
  const key = weft.key(legend);
  if (moves) key.append(stroke("moved", "moves between devices"), stroke("still", "stays on its device"));
  const button = (words, label, onclick) => el("button", { type: "button", "aria-label": label, onclick }, words);
  return {
    controls: el(
      "span.segmented",
      { role: "group", "aria-label": "zoom of the graph" },
      button("−", "zoom out", () => zoom(0.8)),
      button("+", "zoom in", () => zoom(1.25)),
      button("Fit", "show the whole graph", fit),
    ),
    body: el("div", {}, key, el("div.graph-and-about", {}, place, about)),
    // Once it is in the page: all of it, unless its names could not be read then.
    shown: () => zoom(Math.max(whole(), 0.75) / scale),
  };
};

// What is known of one operator, as elements.
weft.aboutNode = (node, split, colour) => {
  const { el, format } = weft;
  const costs = node.costs ?? {};
  const each = node.copies > 1 ? ", on average" : "";
  return [
    el("h3", {}, node.operator, node.copies > 1 ? el("span.quiet", {}, ` and ${node.copies - 1} more that are equal`) : null),
    weft.facts([
      ["module", node.module],
      ["operator", node.target],
      ["dimensions", node.space],
      ["split", el("span", {}, el("i.swatch", { style: { background: colour } }), node.words)],
      ["stage", node.stage],
      [`computing a step${each}`, node.costs ? format.seconds(costs.compute) : null],
      [`communicating a step${each}`, node.costs ? format.seconds(costs.communication) : null],
      [`parameters, gradients and states on a device${each}`, costs.parameters ? format.bytes(costs.parameters) : null],
      [`activations of a micro-batch on a device${each}`, costs.activations ? format.bytes(costs.activations) : null],
    ]),
    node.tensors.length
      ? el(
          "table",
          {},
          el("thead", {}, el("tr", {}, ["tensor", "whole", "on a device"].map((words) => el("th", {}, words)))),
          el(
            "tbody",
            {},
            node.tensors.map((row) => el("tr", {}, row.map((words, i) => el(i ? "td" : "td.wide", {}, words || "the same")))),
          ),
        )
      : null,
  ].filter(Boolean);
};
