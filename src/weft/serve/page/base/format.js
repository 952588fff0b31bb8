// Figures as a person reads them; what is not known is a dash.
"use strict";
weft.format = (() => {
  const DASH = "–";
  const known = (value) => typeof value === "number" && Number.isFinite(value);

  // 1234567 -> 1.235M, 0.000123 -> 1.23e-4
  const number = (value, digits = 4) => {
    if (typeof value === "string" || typeof value === "boolean") return String(value);
    if (!known(value)) return DASH;
    const size = Math.abs(value);
    if (value === 0 || (Number.isInteger(value) && size < 1e5)) return String(value);
    if (size >= 1e15 || size < 1e-3) return value.toExponential(Math.max(digits - 2, 0)).replace(/\.?0*e/, "e");
    for (const [unit, factor] of [
      ["T", 1e12],
      ["G", 1e9],
      ["M", 1e6],
      ["k", 1e3],
    ])
      if (size >= factor * (unit === "k" ? 100 : 1)) return short(value / factor, digits) + unit;
    return short(value, digits);
  };
  const short = (value, digits) => String(Number(value.toPrecision(digits)));

  const bytes = (value) => {
    if (!known(value)) return DASH;
    for (const [unit, factor] of [
      ["TiB", 2 ** 40],
      ["GiB", 2 ** 30],
      ["MiB", 2 ** 20],
      ["KiB", 2 ** 10],
    ])
      if (Math.abs(value) >= factor) return `${short(value / factor, 3)} ${unit}`;
    return `${Math.round(value)} B`;
  };

  // A short time: 1.5 µs, 12.3 ms, 4.2 s; 180 s and more as hours, minutes, seconds.
  const seconds = (value) => {
    if (!known(value)) return DASH;
    const size = Math.abs(value);
    if (size === 0) return "0 s";
    if (size < 1e-3) return `${short(value * 1e6, 3)} µs`;
    if (size < 1) return `${short(value * 1e3, 3)} ms`;
    return size < 180 ? `${short(value, 3)} s` : duration(value);
  };

  const duration = (value) => {
    if (!known(value)) return DASH;
    const whole = Math.max(Math.round(value), 0);
    const [days, hours, minutes, rest] = [
      Math.floor(whole / 86400),
      Math.floor(whole / 3600) % 24,
      Math.floor(whole / 60) % 60,
      whole % 60,
    ];
    if (days) return `${days} d ${hours} h`;
    if (hours) return `${hours} h ${minutes} min`;
    return minutes ? `${minutes} min${rest ? ` ${rest} s` : ""}` : `${rest} s`;
  };

  const percent = (value, digits = 0) => (known(value) ? `${(100 * value).toFixed(digits)} %` : DASH);

  // Today only the time is told, and the year only of other years.
  const date = (iso) => {
    const [when, now] = [new Date(iso), new Date()];
    if (!iso || Number.isNaN(when.getTime())) return DASH;
    const time = { hour: "2-digit", minute: "2-digit" };
    if (when.toDateString() === now.toDateString()) return when.toLocaleTimeString([], time);
    const year = when.getFullYear() === now.getFullYear() ? undefined : "numeric";
    return when.toLocaleString([], { year, month: "short", day: "numeric", ...time });
  };

  // A value of a configuration: text as it is, the rest as JSON.
  const value = (own) => (own === undefined ? "" : typeof own === "string" ? own : JSON.stringify(own));

  return { DASH, number, bytes, seconds, duration, percent, date, value, known };
})();
