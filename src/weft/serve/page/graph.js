// The drawing of a plan's graph: taken over element by element from a list of what drawings are made of, never as HTML.
"use strict";
weft.graph = (svg) => {
  const { el } = weft;
  const ELEMENTS = new Set([
    "svg",
    "g",
    "rect",
    "path",
    "text",
    "tspan",
    "title",
    "defs",
    "marker",
    "clipPath",
    "line",
    "polyline",
    "polygon",
    "circle",
    "ellipse",
  ]);
  const ATTRIBUTES = new Set([
    "class",
    "id",
    "d",
    "x",
    "y",
    "x1",
    "y1",
    "x2",
    "y2",
    "cx",
    "cy",
    "r",
    "rx",
    "ry",
    "dx",
    "dy",
    "width",
    "height",
    "points",
    "transform",
    "viewBox",
    "refX",
    "refY",
    "markerWidth",
    "markerHeight",
    "markerUnits",
    "orient",
    "marker-end",
    "clip-path",
    "text-anchor",
    "role",
    "tabindex",
    "aria-label",
    "data-ends",
  ]);
  const NAMESPACE = "http://www.w3.org/2000/svg";
  const colours = { light: new Map(), dark: new Map() };
  // The page needs no style elements: the colours in them are set on each box instead.
  const read = (style) => {
    const [light, dark = ""] = style.split("@media");
    for (const [text, into] of [
      [light, colours.light],
      [dark, colours.dark],
    ])
      for (const [, number, colour] of text.matchAll(/\.c(\d+)\{--c:(#[0-9a-fA-F]{3,8})\}/g))
        into.set(`c${number}`, colour);
    return "";
  };
  const bare = svg.replace(/<style>([^<]*)<\/style>/g, (_, style) => read(style));
  // Parsed as HTML it may lack a namespace and hold named entities; nothing of what is parsed so is ever run or shown.
  const source = new DOMParser().parseFromString(bare, "text/html").querySelector("svg");
  if (!source) return null;
  const copy = (from) => {
    const made = document.createElementNS(NAMESPACE, from.localName);
    for (const { name, value } of from.attributes) {
      if (ATTRIBUTES.has(name) && (!/url\(/i.test(value) || /^url\(#[\w-]+\)$/.test(value)))
        made.setAttribute(name, value);
    }
    for (const child of from.childNodes) {
      if (child.nodeType === Node.TEXT_NODE) made.append(child.textContent);
      else if (ELEMENTS.has(child.localName)) made.append(copy(child));
    }
    return made;
  };
  const drawing = copy(source);
  const [wide, high] = [Number(source.getAttribute("width")) || 600, Number(source.getAttribute("height")) || 400];
  if (!drawing.hasAttribute("viewBox")) drawing.setAttribute("viewBox", `0 0 ${wide} ${high}`);
  const boxes = [...drawing.querySelectorAll(".box")];
  const paint = () => {
    const now = colours[document.documentElement.dataset.theme === "dark" && colours.dark.size ? "dark" : "light"];
    for (const box of boxes)
      for (const name of box.classList) if (now.has(name)) box.style.setProperty("--c", now.get(name));
  };
  paint();
  const stop = weft.theme.listen(() => (document.contains(place) ? paint() : stop()));

  // Zoom, by buttons and keys; panning is the box's own scrolling, and dragging.
  let scale = 1;
  const zoom = (by) => {
    const before = scale;
    scale = Math.min(Math.max(scale * by, 0.08), 4);
    drawing.setAttribute("width", wide * scale);
    drawing.setAttribute("height", high * scale);
    const change = scale / before;
    place.scrollLeft = (place.scrollLeft + place.clientWidth / 2) * change - place.clientWidth / 2;
    place.scrollTop = (place.scrollTop + place.clientHeight / 2) * change - place.clientHeight / 2;
  };
  const fit = () => zoom(Math.min((place.clientWidth - 4) / wide, (place.clientHeight - 4) / high, 1) / scale);
  const place = el("div.graph", {
    tabIndex: 0,
    role: "region",
    "aria-label": "graph of operators; arrow keys go from box to box, + and - zoom, 0 shows all",
  });
  place.append(drawing);
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

  const told = el(
    "pre.told",
    { "aria-live": "polite" },
    "Point at an operator, tap it, or go there by the arrow keys to read about it.",
  );
  const show = (box) => {
    drawing.querySelectorAll(".near").forEach((line) => line.classList.remove("near"));
    drawing
      .querySelectorAll(".line")
      .forEach((line) => ` ${line.dataset.ends} `.includes(` ${box.id.slice(1)} `) && line.classList.add("near"));
    boxes.forEach((own) => own.setAttribute("tabindex", own === box ? "0" : "-1"));
    told.textContent = box.querySelector("title")?.textContent ?? "";
  };
  boxes.forEach((box, i) => {
    box.onfocus = box.onmouseenter = () => show(box);
    box.onclick = () => box.focus();
    box.onkeydown = (event) => {
      const next = boxes[i + ({ ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key] ?? NaN)];
      if (next) (event.preventDefault(), next.focus());
    };
  });
  const button = (words, label, onclick) => el("button", { type: "button", "aria-label": label, onclick }, words);
  return {
    controls: el(
      "span.segmented",
      { role: "group", "aria-label": "zoom of the graph" },
      button("−", "zoom out", () => zoom(0.8)),
      button("+", "zoom in", () => zoom(1.25)),
      button("Fit", "show the whole graph", fit),
    ),
    body: el("div", {}, place, told),
  };
};
