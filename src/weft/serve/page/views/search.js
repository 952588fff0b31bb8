// A search: its front, what the best have in common, and how a gradient method made up its mind.
"use strict";
weft.views.search = {
  addresses: (run, query) => [
    weft.documents.ofRun(run, "search") + (query.name ? `?name=${encodeURIComponent(query.name)}` : ""),
    weft.documents.ofRun(run),
  ],
  mount(host, { name }) {
    const { el, format } = weft;
    const [head, facts, front, probabilities, choices] = [el("div"), el("div.head"), el("div"), el("div"), el("div")];
    front.style.setProperty("display", "grid");
    front.style.setProperty("gap", "14px");
    front.style.setProperty("grid-template-columns", "minmax(0, 1fr)");
    const problem = el("p.problem", { hidden: true });
    host.append(head, problem, facts, front, probabilities, choices);
    let [now, drawn, over, objectives] = [null, null, null, ""];

    const shares = () => {
      const cards = now.choices.map((choice) =>
        el(
          "div",
          {},
          el("h3", {}, choice.name),
          weft.bars(
            choice.options.map((words, i) => ({
              label: format.value(words),
              twin: true,
              note: `${format.percent(choice.best[i])} · ${format.percent(choice.all[i])}`,
              parts: [
                {
                  name: "in the best",
                  value: choice.best[i] ?? 0,
                  words: format.percent(choice.best[i], 1),
                  colour: "var(--c0)",
                },
                {
                  name: "in all",
                  value: choice.all[i] ?? 0,
                  words: format.percent(choice.all[i], 1),
                  colour: "var(--faint)",
                },
              ],
            })),
            { full: 1 },
          ),
        ),
      );
      return weft.figure("How often each choice is in the best", {
        about: "share among the best tenth, and among all that was scored",
        body: [
          weft.key([
            ["in the best", "var(--c0)"],
            ["in all", "var(--faint)"],
          ]),
          el("div.small.choices", {}, cards),
        ],
      });
    };
    return {
      update([found, run]) {
        now = found;
        head.replaceChildren(weft.curves.about(run));
        problem.hidden = !found.problem;
        problem.textContent = found.problem ?? "";
        const several =
          found.searches?.length > 1
            ? weft.choose(
                "Search",
                found.searches.map((own) => [own, own]),
                found.name,
                (own) => (location.hash = `${weft.route.run(name, "search")}?name=${encodeURIComponent(own)}`),
              )
            : null;
        facts.replaceChildren(
          ...[
            several,
            weft.facts([
              ["search", found.name],
              ["objectives", found.objectives.map((own) => `${own.maximize ? "max" : "min"} ${own.name}`).join(", ")],
              [
                "scored",
                (found.count ?? found.scored.length) ? format.number(found.count ?? found.scored.length) : null,
              ],
              ["on the front", found.front.length || null],
            ]),
          ].filter(Boolean),
        );
        if (found.front.length || found.scored.length) {
          const state = JSON.stringify([found.name, found.objectives]);
          if (!drawn || state !== objectives) {
            drawn = weft.front(() => now);
            front.replaceChildren(
              drawn.chart.element,
              weft.figure("Members of the front", { about: "Press one to see its architecture.", body: drawn.table }),
            );
            objectives = state;
          }
          drawn.update();
        } else if (!found.probabilities)
          front.replaceChildren(weft.empty("Nothing was scored yet", el("code", {}, `weft search runs/${name}`)));
        if (found.probabilities) {
          if (!over) probabilities.append((over = weft.probabilities(() => now.probabilities)).element);
          over.update();
        }
        choices.replaceChildren(found.choices?.length ? shares() : "");
      },
    };
  },
};
