// Light and dark: what the system asks for until a person says otherwise; charts are drawn anew on a change.
"use strict";
weft.theme = (() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const listeners = new Set();
  let chosen = null;
  try {
    chosen = localStorage.getItem("weft-theme");
  } catch {} // a page from disk may have no storage

  const set = () => {
    root.dataset.theme = chosen || (system.matches ? "dark" : "light");
    const button = document.getElementById("theme");
    button.textContent = root.dataset.theme === "dark" ? "☀" : "☾";
    button.setAttribute("aria-label", root.dataset.theme === "dark" ? "use the light theme" : "use the dark theme");
    listeners.forEach((listener) => listener());
  };
  system.addEventListener("change", set);
  document.getElementById("theme").onclick = () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("weft-theme", chosen);
    } catch {}
    set();
  };

  // The colours of the style sheet, by name.
  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const palette = () => {
    const style = getComputedStyle(root);
    const of = (name) => style.getPropertyValue(`--${name}`).trim();
    const found = { series: Array.from({ length: 12 }, (_, i) => of(`c${i}`)) };
    for (const name of [
      "page",
      "box",
      "field",
      "ink",
      "note",
      "faint",
      "line",
      "grid",
      "accent",
      "good",
      "bad",
      "warn",
    ])
      found[name] = of(name);
    return found;
  };

  // One place of the palette for a name, the same wherever it is seen.
  const places = new Map();
  const place = (name) => {
    if (!places.has(name)) {
      let hash = 2166136261;
      for (const letter of String(name)) hash = Math.imul(hash ^ letter.codePointAt(0), 16777619);
      places.set(name, (hash >>> 0) % 11); // the twelfth is grey, for what has no name
    }
    return places.get(name);
  };

  set();
  return { colour, palette, place, listen: (listener) => (listeners.add(listener), () => listeners.delete(listener)) };
})();
