// Which view is shown, by what stands after the # in the address; it starts the page.
"use strict";
weft.route = (() => {
  const { el } = weft;
  const main = document.getElementById("main");
  const picker = document.getElementById("picker");
  const tabs = document.getElementById("views");
  const NAMES = { curves: "Curves", pipeline: "Pipeline", search: "Search", tune: "Tune", config: "Config" };
  let [list, shown, turn] = [{ runs: [], plans: [] }, null, 0];

  const run = (name, view = "") => `#/run/${encodeURIComponent(name)}${view ? `/${view}` : ""}`;
  const plan = (name) => `#/plan/${encodeURIComponent(name)}`;
  const compare = (names) => `#/compare/${names.map(encodeURIComponent).join(",")}`;
  const decoded = (text) => {
    try {
      return decodeURIComponent(text);
    } catch {
      return text;
    }
  };
  // {view, name, query}: "#/run/conv/search?name=second"
  const parsed = () => {
    const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
    const [kind = "", name = "", view = ""] = path.split("/");
    const query = Object.fromEntries(new URLSearchParams(search));
    if (kind === "compare") return { view: "compare", name, query };
    if (kind === "plan") return { view: "plan", name: decoded(name), query };
    if (kind === "run") return { view: view || first(decoded(name)), name: decoded(name), query, run: true };
    return { view: "runs", name: "", query };
  };
  const views = (name) => {
    const known = list.runs.find((own) => own.name === name)?.views ?? ["curves"];
    return Object.keys(NAMES).filter((view) => view === "config" || known.includes(view));
  };
  const first = (name) =>
    list.runs.find((own) => own.name === name)?.kind === "tune" && views(name).includes("tune")
      ? "tune"
      : views(name)[0];

  const dress = (route) => {
    const group = (label, options) => (options.length ? el("optgroup", { label }, options) : null);
    const option = (value, words, chosen) => el("option", { value, selected: chosen }, words);
    picker.replaceChildren(
      option("#/", "All runs", route.view === "runs"),
      ...[
        route.view === "compare" ? option(location.hash, "Comparison", true) : null,
        group(
          "Runs",
          list.runs.map((own) => option(run(own.name), own.name, route.run && own.name === route.name)),
        ),
        group(
          "Plans",
          (list.plans ?? []).map((own) =>
            option(plan(own.name), own.name, route.view === "plan" && own.name === route.name),
          ),
        ),
      ].filter(Boolean),
    );
    tabs.replaceChildren(
      ...(route.run ? views(route.name) : []).map((view) =>
        el("a", { href: run(route.name, view), "aria-current": view === route.view ? "page" : null }, NAMES[view]),
      ),
    );
    document.title = [
      route.view === "runs" ? "Runs" : route.view === "compare" ? "Comparison" : route.name,
      route.run ? NAMES[route.view] : null,
      "weft",
    ]
      .filter(Boolean)
      .join(" · ");
  };
  picker.onchange = () => {
    const route = parsed();
    const name = decoded(picker.value.replace(/^#\/run\//, ""));
    const stays = picker.value.startsWith("#/run/") && route.run && views(name).includes(route.view);
    location.hash = stays ? run(name, route.view) : picker.value;
  };

  // Each document or null; the first problem is thrown if the first document, without which there is no view, is absent.
  const gathered = async (route) => {
    const found = await Promise.allSettled(weft.views[route.view].addresses(route.name, route.query).map(weft.load));
    if (route.view === "compare") return found.map((own) => own.value ?? null);
    for (const own of found) if (own.status === "rejected") throw own.reason;
    return found.map((own) => own.value);
  };
  const problem = (reason, route) => {
    const missing = reason instanceof weft.documents.Missing;
    main.replaceChildren(
      weft.empty(
        missing ? "Nothing here" : "This cannot be shown",
        el("span", {}, reason.message),
        el("a", { href: "#/" }, "All runs"),
        route.run ? el("a", { href: run(route.name, "config") }, "Configuration of this run") : null,
      ),
    );
  };
  const show = async () => {
    const own = ++turn;
    const route = parsed();
    if (!Object.hasOwn(weft.views, route.view)) return location.replace("#/");
    weft.panel.close();
    dress(route);
    shown = null;
    try {
      const documents = await gathered(route);
      if (own !== turn) return;
      const host = el("div", { style: { display: "contents" } });
      main.replaceChildren(host);
      const view = weft.views[route.view].mount(host, route);
      view.update(documents);
      shown = { route, view, documents };
    } catch (reason) {
      if (own === turn) problem(reason, route);
      if (!(reason instanceof weft.documents.Problem)) console.error(reason); // a mistake of the page itself
    }
    weft.chart.sweep();
    main.dataset.view = route.view;
  };
  // `names` are the runs that changed; "" is the list, "*" all that may have.
  const changed = async (names) => {
    const before = JSON.stringify(list);
    list = await weft.load("/api/runs").catch(() => list);
    const route = parsed();
    if (JSON.stringify(list) !== before && document.activeElement !== picker) dress(route);
    if (!shown) return names.has(route.name) || names.has("*") || names.has("") ? show() : null;
    const gone = route.run && !list.runs.some((own) => own.name === route.name);
    const isNamed = route.view === "plan" ? names.has("") : route.name.split(",").some((name) => names.has(decoded(name)));
    const concerned = names.has("*") || route.view === "runs" || gone || isNamed;
    if (!concerned) return;
    const [own, now] = [turn, shown];
    try {
      const documents = await gathered(route);
      // What has not changed is the same object again, and nothing is drawn for it.
      if (own !== turn || documents.every((found, i) => found === now.documents[i])) return;
      now.documents = documents;
      now.view.update(documents);
    } catch (reason) {
      if (reason instanceof weft.documents.Missing && own === turn) (problem(reason, route), (shown = null));
      if (!(reason instanceof weft.documents.Problem)) console.error(reason);
    }
  };
  const start = async () => {
    try {
      list = await weft.load("/api/runs");
    } catch (reason) {
      main.replaceChildren(weft.el("p.problem", {}, reason.message));
    }
    const only = list.runs.length + list.plans.length === 1 && weft.documents.isStatic;
    if (only && !location.hash)
      history.replaceState(null, "", list.runs.length ? run(list.runs[0].name) : plan(list.plans[0].name));
    addEventListener("hashchange", async () => {
      if (location.hash === "#main") return;
      await show();
      scrollTo(0, 0);
    });
    await show();
    weft.live.start(changed);
  };
  document.getElementById("skip").onclick = (event) => (event.preventDefault(), main.focus());
  return { run, plan, compare, start };
})();
weft.route.start();
