// How well the model does, over rounds, seconds or bytes, with the clients' spread.
import { Curve } from "./chart.js";
import { html, link, useMemo, useState } from "./dom.js";
import { bytes, decisive, measures, metric, seconds } from "./format.js";
import { Lines } from "./lines.js";
import { Section, Switch } from "./parts.js";
import { useQuery, useTable } from "./query.js";

export const AXES = {
  rounds: { x: (r) => r.round, show: (x) => String(x), word: "rounds" },
  seconds: { x: (r) => r.until_s, show: (x) => (x < 120 ? `${+x.toFixed(1)} s` : `${+(x / 60).toFixed(1)} min`), word: "seconds of training" },
  bytes: { x: (r) => r.until_payload, show: (x) => (x ? bytes(x).replace(/\.0+ /, " ") : "0"), word: "payload bytes, both ways" },
};
const COLORS = { accuracy: "--train", loss: "--late" };

export const Learning = ({ run, opened, lines, points, news }) => {
  const [axis, setAxis] = useQuery("x", "rounds");
  const [table, setTable] = useTable("learning");
  const by = AXES[axis] || AXES.rounds;
  const names = metricNames(run, points);
  return html`
    <${Section} id="learning" title="Learning" wide table=${table} setTable=${setTable}
      aside=${html`<${Switch} label="Horizontal axis" name="axis" value=${axis} choose=${setAxis} options=${[["rounds", "rounds"], ["seconds", "seconds"], ["bytes", "bytes"]]} />`}
      csv=${link(`api/v1/runs/${run.run_id}/rounds.csv`)} json=${link(`api/v1/runs/${run.run_id}/rounds`)}>
      ${table ? html`<${Numbers} run=${run} opened=${opened} lines=${lines} news=${news} names=${names} />`
        : measures(run) && html`<div class="curves">${names.map((name) => html`<${OneCurve} key=${name} name=${name} run=${run} rounds=${points} by=${by} />`)}</div>`}
      ${run.not_evaluated && html`<p class="note">${run.not_evaluated[0].toUpperCase()}${run.not_evaluated.slice(1)}.</p>`}
    <//>`;
};

const metricNames = (run, rounds) => {
  const found = new Set([...Object.keys(run.metrics0), ...rounds.flatMap((r) => Object.keys(r.metrics))]);
  const first = ["accuracy", "loss"].filter((name) => found.has(name) || found.size === 0);
  return [...first, ...[...found].filter((name) => !first.includes(name)).sort()].slice(0, 6);
};

const OneCurve = ({ name, run, rounds, by }) => {
  const [at, setAt] = useState(null);
  const points = useMemo(() => measured(name, run, rounds, by), [name, rounds, by]);
  const last = points.findLast((p) => p.y !== null);
  const shown = at ?? last;
  const label = last ? `${name} over ${by.word}: ${metric(last.y)} after round ${last.round}` : `${name}: nothing measured yet`;
  return html`
    <figure>
      <figcaption><b>${name}</b>
        ${shown ? html`<span><span class="value">${metric(shown.y)}</span> <span class="faint">${shown.low === null ? "" : `clients ${metric(shown.low)} to ${metric(shown.high)}, `}${shown.round ? `round ${shown.round}` : "before the first round"}${shown.clipped || ""}</span></span>`
          : html`<span class="faint">nothing measured yet</span>`}
      </figcaption>
      <${Curve} label=${label} points=${points} color=${COLORS[name] || "--upload"} show=${tick} showX=${by.show} read=${setAt} whole=${by === AXES.rounds} />
    </figure>`;
};

const tick = (y) => String(+y.toFixed(3));

const measured = (name, run, rounds, by) => {
  const before = run.metrics0[name] === undefined ? [] : [point(0, 0, run.metrics0[name], run.spread0[name])];
  const after = rounds
    .filter((r) => r.metrics[name] !== undefined && r.metrics[name] !== null)
    .map((r) => [r, cut(name, r.clipped)])
    .map(([r, who]) => point(by.x(r), r.round, decisive(r)[name], who ? null : r.spread[name], who));
  return [...before, ...after];
};

const point = (x, round, y, spread, clipped) => ({ x, round, y, low: spread?.[0] ?? null, high: spread?.[1] ?? null, clipped });

/** Whose values of a metric were clipped: the spread of all clients would then be of these. */
const cut = (name, clipped) => {
  const who = Object.entries(clipped?.clients ?? {}).filter(([, names]) => names.includes(name)).map(([device]) => device);
  return who.length ? `, clipped: ${who.join(", ")}` : "";
};

const Numbers = ({ run, opened, lines, news, names }) => html`
  <${Lines} label="Metrics of each round" run=${run} opened=${opened} lines=${lines} news=${news} columns=${[
    { title: "Round", cell: (r) => r.round },
    ...names.map((name) => ({ title: name, right: true, cell: (r) => html`${metric(decisive(r)[name])}${cut(name, r.clipped)}` })),
    ...names.map((name) => ({ title: `${name}, clients`, right: true, cell: (r) => (r.spread[name] ? `${metric(r.spread[name][0])} – ${metric(r.spread[name][1])}` : "–") })),
    { title: "After", right: true, cell: (r) => seconds(r.until_s) },
    { title: "Payload by then", right: true, cell: (r) => bytes(r.until_payload) },
    { title: "Wire by then", right: true, cell: (r) => bytes(r.until_wire) },
  ]} />`;
