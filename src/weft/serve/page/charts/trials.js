// The table of trials, and the colours of their states.
"use strict";
weft.trials = {
  STATES: { complete: 0, pruned: 1, failed: 6, running: 2 },
  // Its place in the palette; grey for a state that has none.
  place: (state) => weft.trials.STATES[state] ?? 11,
};
weft.trials.table = (get, more = {}) => {
  const { format } = weft;
  const measured = get().trials.some((trial) => format.known(trial.measured) || format.known(trial.estimated));
  return weft.table(
    [
      { name: "trial", number: true, value: (trial) => trial.number },
      { name: "state", value: (trial) => trial.state, show: (trial) => weft.badge(trial.state) },
      ...get().objectives.map((own, i) => ({
        name: own.name,
        number: true,
        value: (trial) => trial.values?.[i] ?? null,
      })),
      ...get().parameters.map((own) => ({
        name: own.name,
        number: !own.options,
        value: (trial) => trial.params?.[own.name] ?? null,
        show: own.options ? (trial, value) => format.value(value ?? undefined) : undefined,
      })),
      { name: "duration", number: true, value: (trial) => trial.seconds, show: (trial) => format.seconds(trial.seconds) },
      { name: "devices", value: (trial) => (trial.devices ?? []).join(", ") },
      ...(measured
        ? [
            {
              name: "estimated",
              number: true,
              value: (trial) => trial.estimated,
              show: (trial, value) => format.bytes(value),
            },
            {
              name: "measured",
              number: true,
              value: (trial) => trial.measured,
              show: (trial, value) => format.bytes(value),
            },
          ]
        : []),
      { name: "fused", number: true, value: (trial) => trial.fused },
      { name: "attempts", number: true, value: (trial) => trial.attempts },
      ...(get().trials.some((trial) => trial.error)
        ? [{ name: "error", wide: true, value: (trial) => trial.error ?? "" }]
        : []),
    ],
    get().trials,
    { label: "trials", ...more },
  );
};
