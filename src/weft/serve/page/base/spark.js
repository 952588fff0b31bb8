// A small loss curve of a run, loaded when it comes into sight.
"use strict";
weft.spark = (run, cache) => {
  const had = cache.get(run.name);
  const place = had?.place ?? document.createElementNS("http://www.w3.org/2000/svg", "svg");
  if (had?.revision === run.revision) return place;
  cache.set(run.name, { revision: run.revision, place });
  place.setAttribute("class", "spark");
  if (!run.views?.includes("curves")) return place;
  place.setAttribute("viewBox", "0 0 130 26");
  place.setAttribute("aria-hidden", "true");
  const watcher = new IntersectionObserver(async (entries) => {
    if (!entries.some((own) => own.isIntersecting)) return;
    watcher.disconnect();
    const curves = await weft.load(weft.documents.ofRun(run.name, "curves")).catch(() => null);
    const line = curves?.series.find((own) => own.name === "loss" && own.of === "train") ?? curves?.series[0];
    if (!line) return;
    const points = line.x.map((x, i) => [x, line.y[i]]).filter(([, y]) => weft.format.known(y));
    const [low, high] = [Math.min(...points.map(([, y]) => y)), Math.max(...points.map(([, y]) => y))];
    const [first, last] = [
      points[0]?.[0] ?? 0,
      Math.max(run.kind === "tune" ? 0 : (run.steps ?? 0), points.at(-1)?.[0] ?? 1),
    ];
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute(
      "d",
      points
        .map(
          ([x, y], i) =>
            `${i ? "L" : "M"}${(1 + (128 * (x - first)) / (last - first || 1)).toFixed(1)} ${(24 - (22 * (y - low)) / (high - low || 1)).toFixed(1)}`,
        )
        .join(""),
    );
    place.replaceChildren(path);
  });
  watcher.observe(place);
  return place;
};
