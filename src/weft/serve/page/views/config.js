// The configuration of a run, and where it came from.
"use strict";
weft.views.config = {
  addresses: (run) => [weft.documents.ofRun(run)],
  mount(host) {
    const { el, format } = weft;
    const head = el("div");
    const place = el("div.pair");
    host.append(head, place);
    // The program is `weft` also where it was started as a module.
    const program = (path) => String(path).split("/").pop().replace(/^__main__\.py$/, "weft");
    const flat = (value, path = "") => {
      if (value === null || typeof value !== "object" || Array.isArray(value)) return [[path, value]];
      return Object.entries(value).flatMap(([key, own]) => flat(own, path ? `${path}.${key}` : key));
    };
    const table = (label, pairs) =>
      weft.table(
        [
          { name: "key", value: ([key]) => key, show: ([key]) => el("code", {}, key) },
          { name: "value", wide: true, value: ([, value]) => format.value(value) },
        ],
        pairs,
        { label },
      );
    let shown = null;
    return {
      update([run]) {
        head.replaceChildren(weft.curves.about(run));
        if (shown === run.revision) return;
        shown = run.revision;
        const { config: _, command, ...manifest } = run.manifest ?? {};
        place.replaceChildren(
          weft.figure("Configuration", { body: table("configuration", Object.entries(run.config ?? {})) }),
          weft.figure("Origin", {
            body: [
              Array.isArray(command)
                ? weft.command(command.map((word, i) => (i ? quoted(word) : program(word))).join(" "))
                : null,
              table("manifest", flat(manifest)),
            ].filter(Boolean),
          }),
        );
      },
    };
    function quoted(word) {
      return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${String(word).replaceAll("'", "'\\''")}'`;
    }
  },
};
