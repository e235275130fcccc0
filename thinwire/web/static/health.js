// The health of a device over time: how long it was online, how far away it is, and how fast it works.
import { get } from "./api.js";
import { Curve } from "./chart.js";
import { html, link, useMemo, useState } from "./dom.js";
import { count, moment, seconds, speed } from "./format.js";
import { useReading } from "./live.js";
import { Pager, Refusal, Section, Switch, Table } from "./parts.js";
import { useQuery, useTable } from "./query.js";

const GAP_MS = 10000; // between two reads of thousands of assignments
const HEIGHT = 130;
const DAY_S = 86400;
const STEPS = [3, 6, 12, 24, 48].map((hours) => hours * 3600); // of time, between two marks
const SPANS = { day: ["24 hours", DAY_S], week: ["7 days", 7 * DAY_S] };
const HOUR = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const DATE = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const UNITS = { rate: [["Gb/s", 1e9], ["Mb/s", 1e6], ["kb/s", 1e3], ["b/s", 1]], time: [["s", 1], ["ms", 1e-3]], share: [["%", 0.01]], number: [["", 1]] };

/** {key, title, kind, color, word: a value as it is said}: a figure is one chart and one column. */
const FIGURES = [
  { key: "online", title: "Online", kind: "share", color: "--upload", word: (y) => `${Number((100 * y).toPrecision(3))} %` },
  { key: "outside_s", title: "Outside the device", kind: "time", color: "--download", word: seconds },
  { key: "up_bits_s", title: "Upload", kind: "rate", color: "--upload", word: speed },
  { key: "down_bits_s", title: "Download", kind: "rate", color: "--download", word: speed },
  { key: "step_s", title: "Seconds a step", kind: "time", color: "--train", word: seconds },
  { key: "failures", title: "Failed or dropped", kind: "number", color: "--failed", word: count },
];

export const Health = ({ name, news }) => {
  const [given, setSpan] = useQuery("span", "day");
  const [until, setUntil] = useQuery("until", "");
  const [table, setTable] = useTable("health");
  const span = SPANS[given] ? given : "day";
  const query = `span=${span}${Number(until) > 0 ? `&until=${Number(until)}` : ""}`;
  const { data, error } = useReading(() => get(`devices/${name}/health?${query}`), until ? {} : news, [name, query], GAP_MS);
  const rows = data?.rows ?? [];
  const unknown = (figure) => rows.every((r) => r[figure.key] === null);
  const move = (by) => {
    const to = rows.at(-1).end_at + by * SPANS[span][1];
    setUntil(to > Date.now() / 1000 ? "" : String(Math.round(to)));
  };
  return html`
    <${Section} id="health" title="Health" table=${table} setTable=${setTable}
      aside=${html`<${Switch} label="Over how long" name="span" value=${span} choose=${setSpan} options=${Object.entries(SPANS).map(([key, [word]]) => [key, word])} />`}
      csv=${link(`api/v1/devices/${name}/health.csv?${query}`)} json=${link(`api/v1/devices/${name}/health?${query}`)}>
      ${error && !data ? html`<${Refusal} error=${error} />` : !data ? html`<p class="loading">Reading…</p>` : html`
        ${table ? html`<${Numbers} rows=${rows} />` : html`<div class="curves small">${FIGURES.toSorted((a, b) => unknown(a) - unknown(b)).map((figure) => html`<${Chart} key=${figure.key} figure=${figure} rows=${rows} span=${span} />`)}</div>`}
        ${data.not_known && html`<p class="note">A figure that is missing is ${data.not_known.replaceAll("; ", ", or ")}.</p>`}
        ${data.read_since && html`<p class="note">Before ${moment(data.read_since)} it had more assignments than are read here.</p>`}
        <${Pager} label="Earlier and later" said=${`${moment(rows[0].begin_at)} to ${moment(rows.at(-1).end_at)}`} before=${() => move(-1)} after=${until && (() => move(1))} words=${["Earlier", "Later"]} />`}
    <//>`;
};

const Chart = ({ figure, rows, span }) => {
  const [at, setAt] = useState(null);
  const [unit, size] = useMemo(() => unitOf(figure, rows), [figure, rows]);
  const points = useMemo(() => rows.map((r) => ({ x: r.begin_at, y: r[figure.key] === null ? null : r[figure.key] / size, row: r })), [rows, size]);
  const known = rows.filter((r) => r[figure.key] !== null);
  const last = known.at(-1);
  const shown = at?.row && at.row[figure.key] !== null ? at.row : last;
  return html`
    <figure>
      <figcaption><b>${figure.title}</b>
        ${last ? html`<span><span class="value">${figure.word(shown[figure.key])}</span> <span class="faint">${when(shown, span)}</span></span>` : html`<span class="faint">not known yet</span>`}</figcaption>
      ${last && html`<${Curve} label=${`${figure.title} over ${SPANS[span][0]}: ${figure.word(last[figure.key])} from ${when(last, span)}; its numbers are in the table`} points=${points} color=${figure.color}
        show=${(y) => `${+y.toPrecision(3)}${unit && ` ${unit}`}`} showX=${span === "day" ? hour : date} read=${setAt} height=${HEIGHT} fromZero steps=${STEPS} />`}
    </figure>`;
};

const hour = (x) => HOUR.format(x * 1000);
const date = (x) => DATE.format(x * 1000);
const when = (row, span) => (span === "day" ? `${hour(row.begin_at)} to ${hour(row.end_at)}` : `${date(row.begin_at)}, ${hour(row.begin_at)} to ${hour(row.end_at)}`);

/** The unit in which the largest value has at least one digit before its point. */
const unitOf = ({ key, kind }, rows) => {
  const most = Math.max(0, ...rows.map((r) => r[key] ?? 0));
  return UNITS[kind].find(([, size]) => most >= size) ?? UNITS[kind].at(-1);
};

const Numbers = ({ rows }) => html`
  <${Table} label="Health of the device" rows=${rows.toReversed()} keyOf=${(r) => r.begin_at} columns=${[
    { title: "From", cell: (r) => moment(r.begin_at) },
    ...FIGURES.slice(0, -1).map((figure) => ({ title: figure.title, right: true, cell: (r) => (r[figure.key] === null ? "–" : figure.word(r[figure.key])) })),
    { title: "Assignments", right: true, cell: (r) => count(r.assignments) },
    { title: "Failed or dropped", right: true, cell: (r) => count(r.failures) },
  ]} />`;
