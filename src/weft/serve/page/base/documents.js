// Documents: from the page itself where they were written into it (the static report), else from the server.
"use strict";
weft.documents = (() => {
  const inlined = document.getElementById("weft-documents");
  const own = inlined ? JSON.parse(inlined.textContent) : null;
  const cache = new Map(); // address -> {tag, document}; the newest that were loaded
  const MOST = 40;

  class Problem extends Error {} // what is wrong with a document, in one line for a person
  class Missing extends Problem {}

  const fromPage = (address) => {
    const found = own[address] ?? own[address.split("?")[0]];
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
