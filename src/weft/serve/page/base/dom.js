// Elements: the only way that text from a run reaches the page, always as text and never as HTML.
"use strict";
var weft = (globalThis.weft = globalThis.weft || { views: {} });

// el("button.link", {type: "button", onclick}, "text", child, ...): null and undefined children are left out.
weft.el = (what, given = {}, ...children) => {
  const [tag, ...classes] = what.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  for (const [name, value] of Object.entries(given)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made[name] = value;
    else if (name === "style") for (const [key, own] of Object.entries(value)) made.style.setProperty(key, own);
    else if (name in made && name !== "list" && !name.startsWith("aria")) made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
};

// <dl class="facts">: pairs of a name and a text or an element; those without a value are left out.
weft.facts = (pairs) =>
  weft.el(
    "dl.facts",
    {},
    pairs
      .filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([name, value]) => weft.el("div", {}, weft.el("dt", {}, name), weft.el("dd", {}, value))),
  );

weft.empty = (title, ...more) => weft.el("div.empty", {}, weft.el("strong", {}, title), ...more);

weft.badge = (word, tone = word, title = null) => {
  const made = weft.el("span.badge", { title }, word);
  if (/^[a-z]+$/.test(tone)) made.classList.add(tone);
  return made;
};

// Buttons of which one is pressed; `changed` gets its value.
weft.segmented = (label, options, value, changed) => {
  const buttons = options.map(([own, words]) =>
    weft.el(
      "button",
      {
        type: "button",
        "aria-pressed": String(own === value),
        "data-value": own,
        onclick: () => {
          buttons.forEach((button) =>
            button.setAttribute("aria-pressed", String(button.dataset.value === String(own))),
          );
          changed(own);
        },
      },
      words,
    ),
  );
  return weft.el("span.segmented", { role: "group", "aria-label": label }, buttons);
};

// A <select> with a label; options are [value, words].
weft.choose = (label, options, value, changed) => {
  const select = weft.el(
    "select",
    { onchange: () => changed(select.value) },
    options.map(([own, words]) => weft.el("option", { value: own, selected: own === value }, words)),
  );
  return weft.el("label.control", {}, label, select);
};

weft.slider = (label, value, max, step, changed) => {
  const range = weft.el("input", {
    type: "range",
    min: 0,
    max,
    step,
    value,
    oninput: () => changed(Number(range.value)),
  });
  return weft.el("label.control", {}, label, range);
};

// A command with a button that copies it; where the clipboard is closed to the page, the text is selected instead.
weft.command = (text) => {
  const shown = weft.el("pre", { tabIndex: 0 }, text);
  const button = weft.el(
    "button",
    {
      type: "button",
      onclick: async () => {
        try {
          await navigator.clipboard.writeText(text);
          button.textContent = "Copied";
        } catch {
          getSelection().selectAllChildren(shown);
          button.textContent = "Selected";
        }
        setTimeout(() => (button.textContent = "Copy"), 1500);
      },
    },
    "Copy",
  );
  return weft.el("div.command", {}, shown, button);
};
