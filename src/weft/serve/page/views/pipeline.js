// The pipeline of a run: schedule, shares of time, memory.
"use strict";
weft.views.pipeline = {
  addresses: (run) => [weft.documents.ofRun(run, "pipeline"), weft.documents.ofRun(run)],
  mount(host, { name }) {
    const { el, format } = weft;
    const head = el("div");
    const remedy = el("div.remedy", { hidden: true });
    const schedule = el("div", { hidden: true });
    const key = el("div");
    const pair = el("div.pair");
    const place = el("div", { hidden: true });
    host.append(head, remedy, schedule, pair, place);
    let [time, gantt, memory, whole, fine, over, requests] = [null, null, null, null, null, null, 0];

    // Where the server sent buckets, it is asked for the operations in the part of time that is shown.
    const look = () => {
      const [from, to] = time.shown;
      const all = time.whole[1] - time.whole[0];
      if (!gantt.coarse || to - from > 0.9 * all) {
        if (fine) ((fine = null), drawn());
        return;
      }
      if (
        fine &&
        fine.window[0] <= from &&
        fine.window[1] >= to &&
        (fine.real.spans?.length || to - from > 0.5 * (fine.window[1] - fine.window[0]))
      )
        return;
      const own = ++requests;
      setTimeout(async () => {
        if (own !== requests) return;
        const room = (to - from) * 0.1;
        const address = `${weft.documents.ofRun(name, "pipeline")}?from=${Math.max(from - room, time.whole[0])}&to=${Math.min(to + room, time.whole[1])}`;
        const found = await weft.load(address).catch(() => null);
        if (own === requests && found && found.window[1] - found.window[0] < all) ((fine = found), drawn());
      }, 180);
    };
    const drawn = () => {
      gantt.update(whole, fine);
      legend(gantt.by);
      memory?.update((fine ?? whole).memory, whole.offload);
    };
    const legend = (by) => {
      const kinds = new Set(gantt.drawn.map((span) => span[1]));
      const shown = Object.entries(gantt.KINDS).filter(([kind]) => kinds.has(kind));
      const coarse = `The height of a bar is the part of the time that its stage worked. ${
        weft.documents.isStatic ? "weft serve shows the operations." : "Zoom in to see operations."
      }`;
      const subnets = "Each subnet has one colour; backwards and updates are paler.";
      key.replaceChildren(
        by === "kind" && shown.length
          ? weft.key(shown.map(([, [words, colour]]) => [words, `var(--c${colour})`]))
          : el("p.quiet", {}, shown.length ? subnets : coarse),
      );
    };
    const build = (found) => {
      time = weft.timeWindow(found.total);
      gantt = weft.gantt(time, { coloured: legend });
      gantt.chart.element.body.prepend(key);
      time.listen(look);
      schedule.append(gantt.chart.element);
    };
    return {
      update([found, run]) {
        whole = found;
        head.replaceChildren(weft.curves.about(run));
        remedy.hidden = !found.remedy;
        remedy.textContent = found.remedy ?? "";
        const timed = found.traced && found.total && found.total[1] > found.total[0];
        if (timed && !time) build(found);
        schedule.hidden = !timed;
        if (timed) {
          time.grow(found.total);
          gantt.update(found, fine);
          legend(gantt.by);
          gantt.chart.element.about(
            `${format.seconds(found.total[1] - found.total[0])} on ${found.stages.length} stages`,
          );
        }
        pair.querySelector("[data-part=stages]")?.remove();
        if (found.stages?.some((own) => weft.format.known(own.busy))) {
          const made = weft.stages.stages(found.stages);
          made.dataset.part = "stages";
          pair.prepend(made);
        }
        if (found.busy?.time?.length) {
          if (over) over.draw();
          else pair.append((over = weft.stages.overTime(() => whole.busy)).element);
        }
        place.hidden = !found.memory?.length;
        if (found.memory?.length) {
          if (!time) time = weft.timeWindow(found.total);
          if (!memory) place.append((memory = weft.memory(time)).element);
          memory.update((fine ?? found).memory, found.offload);
        }
        if (!timed && !found.remedy && !pair.children.length)
          remedy.replaceWith(weft.empty("Nothing to show of the pipeline yet"));
      },
    };
  },
};
