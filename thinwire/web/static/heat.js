// Rounds by clients as a heat map, where a round has more clients than bars can show.
import { get } from "./api.js";
import { html, useEffect, useRef, useState } from "./dom.js";
import { count, plural } from "./format.js";
import { isDark, onThemeChange } from "./frame.js";
import { useReading } from "./live.js";
import { OUTCOMES, Refusal, Switch } from "./parts.js";
import { useQuery } from "./query.js";

export const MAX_BARS = 200; // clients of a round that bars can show
const HEIGHT = 420;
const COLORS = { over: "--rule", aggregated: "--upload", accepted: "--download", "aggregated-late": "--late", selected: "--idle", dropped: "--encode", failed: "--failed" };
const PALEST = 0.12; // of the colour of a reply that took no time
const PLAIN = 0.4; // of that of an aggregated update, so that the others are seen

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** `rounds` are those of the strip above; the map is read again when one of them closes. */
export const HeatMap = ({ run, rounds, number, pick }) => {
  const [by, setBy] = useQuery("heat", "outcome");
  const [from, to, closed] = [rounds[0]?.round ?? 1, rounds.at(-1)?.round ?? 1, rounds.findLast((r) => r.reason)?.round];
  const { data, error } = useReading(() => get(`runs/${run.run_id}/heat?from=${from}&to=${to}`), {}, [run.run_id, from, to, closed]);
  const [at, setAt] = useState(null);
  if (!data?.rows.length) return error ? html`<${Refusal} error=${error} />` : data ? null : html`<p class="loading">Reading…</p>`;
  const each = Math.max(...data.rows.map((row) => row.clients));
  const here = at && data.rows[at.y] && at.x < data.rounds.length; // a map that was read again may have fewer
  const cell = here ? { ...at, row: data.rows[at.y], round: data.rounds[at.x] } : null;
  return html`
    <figure class="heat">
      <figcaption><b>Rounds ${count(data.rounds[0])} to ${count(data.rounds.at(-1))} by ${plural(data.clients, "client")}</b>
        <span class="faint">${each > 1 ? `a row has ${count(each)} clients, and a cell the colour of the worst` : "a row is a client"}, by name</span>
        <${Switch} label="Colour of the heat map" name="heat" value=${by === "time" ? "time" : "outcome"} choose=${setBy} options=${[["outcome", "outcome"], ["time", "time"]]} /></figcaption>
      <${Picture} data=${data} by=${by} number=${number} pick=${pick} point=${setAt} />
      <p class="reading faint" aria-hidden="true">${cell ? `Round ${cell.round}, ${cell.row.label}: ${tell(data, cell)}` : "Point at a cell to read it; a click chooses its round"}</p>
      <${Legend} data=${data} by=${by} />
    </figure>`;
};

const outcomeOf = (data, row, x) => data.outcomes[row.outcomes[x]] ?? null;

const tell = (data, { row, x }) => {
  const outcome = outcomeOf(data, row, x);
  if (!outcome) return "not selected";
  const word = `${row.clients > 1 ? "at worst " : ""}${OUTCOMES[outcome][1]}`;
  return row.shares[x] === null ? word : `${word}, replied after ${Math.round(100 * row.shares[x])} % of the round`;
};

const Picture = ({ data, by, number, pick, point }) => {
  const canvas = useRef(null);
  const [dark, setDark] = useState(isDark());
  const [width, setWidth] = useState(0);
  useEffect(() => onThemeChange(() => setDark(isDark())), []);
  useEffect(() => {
    const sized = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    sized.observe(canvas.current.parentElement);
    return () => sized.disconnect();
  }, []);
  useEffect(() => width && draw(canvas.current, width, data, by, number), [width, dark, data, by, number]);
  const place = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const part = (value, size, cells) => Math.min(cells - 1, Math.max(0, Math.floor((value / size) * cells)));
    return { x: part(event.clientX - box.left, box.width, data.rounds.length), y: part(event.clientY - box.top, box.height, data.rows.length) };
  };
  return html`
    <div class="heat-map"><canvas ref=${canvas} role="img" aria-label=${summary(data)} onMouseMove=${(event) => point(place(event))} onMouseLeave=${() => point(null)}
      onClick=${(event) => pick(data.rounds[place(event).x])}></canvas></div>
    <p class="heat-axis faint" aria-hidden="true"><span>round ${data.rounds[0]}</span><span>${data.rounds.at(-1)}</span></p>`;
};

function draw(canvas, width, data, by, number) {
  const scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = HEIGHT * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const colors = Object.fromEntries(Object.entries(COLORS).map(([outcome, name]) => [outcome, style(name)]));
  const [time, late] = [style("--train"), style("--late")];
  const [columns, rows] = [data.rounds.length, data.rows.length];
  const edge = (at, cells, size) => Math.round((at * size) / cells); // whole pixels, so that cells leave no seams
  data.rows.forEach((row, y) => {
    for (let x = 0; x < columns; x += 1) {
      const outcome = outcomeOf(data, row, x);
      const part = row.shares[x];
      if (!outcome || (by === "time" && part === null)) continue;
      pen.globalAlpha = by === "time" ? (part <= 1 ? PALEST + (1 - PALEST) * part : 1) : outcome === "aggregated" ? PLAIN : 1;
      pen.fillStyle = by !== "time" ? colors[outcome] : part <= 1 ? time : late;
      const [left, top] = [edge(x, columns, width), edge(y, rows, HEIGHT)];
      pen.fillRect(left, top, edge(x + 1, columns, width) - left - (width > columns * 4 ? 1 : 0), edge(y + 1, rows, HEIGHT) - top);
    }
  });
  pen.globalAlpha = 1;
  const chosen = data.rounds.indexOf(number);
  if (chosen < 0) return;
  pen.strokeStyle = style("--ink");
  pen.lineWidth = 2;
  const left = edge(chosen, columns, width);
  pen.strokeRect(left, 1, edge(chosen + 1, columns, width) - left - 1, HEIGHT - 2);
}

/** How many cells have each outcome, best first. */
const counts = (data) => data.outcomes.map((outcome, i) => [outcome, data.rows.reduce((sum, row) => sum + row.outcomes.split(String(i)).length - 1, 0)]).filter(([, n]) => n);

const summary = (data) => `Heat map of rounds ${data.rounds[0]} to ${data.rounds.at(-1)} by ${plural(data.clients, "client")}: ${counts(data).map(([outcome, n]) => `${OUTCOMES[outcome][1]} ${count(n)}`).join(", ")}. The numbers of a round are in its table.`;

const Legend = ({ data, by }) => html`
  <ul class="legend" aria-label="Colours of the heat map">
    ${by === "time" ? html`<li><i class="swatch ramp"></i>0 to 100 % of the round until the reply</li><li><i class="swatch" style=${{ background: "var(--late)" }}></i>after the round</li><li><i class="swatch hollow"></i>no reply, or not selected</li>`
    : html`${counts(data).map(([outcome, n]) => html`<li key=${outcome}><i class="swatch" style=${{ background: `var(${COLORS[outcome]})`, opacity: outcome === "aggregated" ? PLAIN : 1 }}></i>${OUTCOMES[outcome][1]} ${plural(n, "cell")}</li>`)}<li><i class="swatch hollow"></i>not selected</li>`}
  </ul>`;
