// Documents: from the page itself where they were written into it (the static report), else from the server.
"use strict";
weft.documents = (() => {
  const inlined = document.getElementById("weft-documents");
  const own = inlined ? JSON.parse(inlined.textContent) : null;
  const cache = new Map(); // address -> {tag, document}; the newest that were loaded
  const MOST = 40;

  class Problem extends Error {} // what is wrong with a document, in one line for a person
  class Missing extends Problem {}

  // Of a part of time, a report may hold one that has it in its middle.
  const near = (base, query) => {
    const params = new URLSearchParams(query);
    const [from, to] = [Number(params.get("from")), Number(params.get("to"))];
    return Object.entries(own).find(([address, { window }]) => {
      if (!address.startsWith(`${base}?from=`)) return false;
      const middle = (from + to) / 2;
      return window[0] <= middle && middle <= window[1] && to - from <= 1.5 * (window[1] - window[0]);
    })?.[1];
  };

  const fromPage = (address) => {
    const [base, query] = address.split("?");
    const found = own[address] ?? (query?.startsWith("from=") ? near(base, query) : undefined) ?? own[base];
    if (found === undefined) throw new Missing("this report does not hold it");
    return found;
  };

  // The document at an address; throws a Problem.
  const load = async (address) => {
    if (own) return fromPage(address);
    const before = cache.get(address);
    let answer;
    try {
      answer = await fetch(address.slice(1), {
        headers: before?.tag ? { "If-None-Match": before.tag } : {},
        cache: "no-store",
      });
    } catch {
      throw new Problem("the server does not answer");
    }
    if (answer.status === 304 && before) return before.document;
    const body = await answer.json().catch(() => ({}));
    if (!answer.ok)
      throw new (answer.status === 404 ? Missing : Problem)(
        body.error || body.detail || `the server answered ${answer.status}`,
      );
    cache.delete(address);
    cache.set(address, { tag: answer.headers.get("ETag"), document: body });
    if (cache.size > MOST) cache.delete(cache.keys().next().value);
    return body;
  };

  const ofRun = (run, view = "") => `/api/runs/${encodeURIComponent(run)}${view ? `/${view}` : ""}`;
  const ofPlan = (plan) => `/api/plans/${encodeURIComponent(plan)}`;
  return { load, ofRun, ofPlan, isStatic: own !== null, Missing, Problem };
})();
weft.load = weft.documents.load;
