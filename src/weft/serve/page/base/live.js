// What changes while it is looked at: the server says which run, and the documents that are shown are loaded again.
"use strict";
weft.live = (() => {
  const dot = document.getElementById("live");
  const EVERY = 1000; // milliseconds between two loads, at the least
  const waiting = new Set(); // names of runs; "" is the list
  let [source, timer, last, changed] = [null, null, 0, () => {}];

  const say = (state, why) => {
    dot.dataset.state = state;
    dot.lastChild.textContent = state;
    dot.title = why;
  };
  const flush = async () => {
    timer = null;
    if (document.hidden || !waiting.size) return;
    const names = new Set(waiting);
    waiting.clear();
    await changed(names);
    last = performance.now();
    if (waiting.size) soon();
  };
  const soon = () => (timer ??= setTimeout(flush, Math.max(EVERY - (performance.now() - last), 0)));
  const open = () => {
    if (source || document.hidden) return;
    source = new EventSource("api/stream");
    source.onopen = () => say("live", "changes are shown as they happen");
    source.addEventListener("changed", (event) => {
      const change = JSON.parse(event.data);
      waiting.add(change.runs ? "" : change.run);
      soon();
    });
    source.onerror = () => {
      say("reconnecting", "the server does not answer; it is asked again and again");
      if (source?.readyState === EventSource.CLOSED) {
        close();
        setTimeout(open, 3000);
      }
    };
  };
  const close = () => (source?.close(), (source = null));

  return {
    // `then` gets the names of the runs that changed, and "" where the list did.
    start(then) {
      changed = then;
      if (weft.documents.isStatic) return say("static", "a report: what was known when it was made");
      say("reconnecting", "");
      open();
      document.addEventListener("visibilitychange", () => {
        if (document.hidden) return close(); // a hidden page asks for nothing
        open();
        waiting.add("*");
        soon();
      });
      addEventListener("pagehide", close);
      addEventListener("pageshow", open);
    },
  };
})();
