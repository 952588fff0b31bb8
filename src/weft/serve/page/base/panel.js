// The panel at the side: one thing at a time, closed by Esc, after which the focus is where it was.
"use strict";
weft.panel = (() => {
  const place = document.getElementById("panel");
  let [before, closed] = [null, null];

  const close = () => {
    if (place.hidden) return;
    place.hidden = true;
    place.replaceChildren();
    closed?.();
    if (before && document.contains(before)) before.focus({ preventScroll: true });
  };
  // `after` is called when it closes.
  const open = (title, content, after = null) => {
    if (place.hidden) before = document.activeElement;
    else closed?.();
    closed = after;
    place.setAttribute("aria-label", title);
    place.replaceChildren(
      weft.el(
        "div.head",
        {},
        weft.el("h2", {}, title),
        weft.el("span.spring"),
        weft.el("button", { type: "button", onclick: close, "aria-label": "close the panel" }, "Close"),
      ),
      weft.el("div.body", {}, ...[content].flat()),
    );
    place.hidden = false;
    place.scrollTop = 0;
    place.focus({ preventScroll: true });
  };
  addEventListener("keydown", (event) => event.key === "Escape" && close());
  return { open, close };
})();
