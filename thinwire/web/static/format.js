// Numbers as people read them.
const UNITS = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  for (const [unit, size] of UNITS) if (count >= size) return `${figures(count / size)} ${unit}`;
  return `${Math.round(count)} B`;
}

/** Bytes on the wire: fewer than the payload can only be a part of them. */
export const wired = (wire, payload) => (wire !== null && wire < payload ? `${bytes(wire)} counted` : bytes(wire));

export function seconds(count) {
  if (count === null || count === undefined) return "–";
  if (count < 0.9995) return `${count < 0.00995 ? Number((count * 1000).toPrecision(2)) : Math.round(count * 1000)} ms`;
  if (count < 9.95) return `${count.toFixed(1)} s`;
  if (count < 99.5) return `${Math.round(count)} s`;
  const whole = Math.round(count);
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes} min${whole % 60 ? ` ${whole % 60} s` : ""}`;
  return `${Math.floor(minutes / 60)} h${minutes % 60 ? ` ${minutes % 60} min` : ""}`;
}

const figures = (value) => (value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : value.toFixed(0));

/** How many times smaller `sent` is than `dense`. */
export function ratio(dense, sent) {
  if (!dense || !sent) return "–";
  return `${figures(dense / sent)}×`;
}

/** One quantity beside another, 0.63 of it. */
export const share = (value) => (value === null || value === undefined ? "–" : figures(value));

/** What a run's or round's model is worth: where clients' values were clipped, without what they would have moved it by. */
export const decisive = (row) => ({ ...row.metrics, ...row.clipped?.means });
/** With Poisson sampling nothing is shown that would tell how many clients were sampled: their bytes, and how many updates were late or dropped. */
export const isSampled = (run) => Boolean(run.plan.privacy?.sampling_rate);

/** Whether a run's versions get metrics, by its plan. */
export const measures = (run) => run.plan.run.evaluate !== "off" || Object.keys(run.metrics).length > 0;
export const metric = (value) => (value === null || value === undefined ? "–" : Number(value).toFixed(4));

export const count = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en-US"));

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const YEAR = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });

export const clock = (at) => (at ? CLOCK.format(at * 1000) : "–");

/** The day and the time, with the year where it is another one. */
export const moment = (at) => (at ? (new Date(at * 1000).getFullYear() === new Date().getFullYear() ? DAY : YEAR).format(at * 1000) : "–");

/** The time of day, with its day where that is not today. */
export const when = (at, now) => (at && now - at < 43200 ? CLOCK.format(at * 1000) : moment(at));

/** A bandwidth, given in bits a second. */
export const speed = (bits) => {
  const [unit, size] = [["Gb/s", 1e9], ["Mb/s", 1e6], ["kb/s", 1e3]].find(([, size]) => bits >= size) ?? ["b/s", 1];
  return `${bits / size < 1000 ? Number((bits / size).toPrecision(3)) : Math.round(bits / size)} ${unit}`;
};

export function ago(at, now) {
  if (!at) return "–";
  const gone = now - at;
  if (gone < 5) return "just now";
  if (gone < 3600) return `${gone < 99.5 ? seconds(gone) : `${Math.round(gone / 60)} min`} ago`;
  return gone < 86400 ? `${Math.floor(gone / 3600)} h ago` : moment(at);
}

export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
