// How well the model does, over rounds, seconds or bytes, with the clients' spread.
import { Curve } from "./chart.js";
import { Mark, RunChart, valueAt } from "./runchart.js";
import { html, link, useMemo, useState } from "./dom.js";
import { bytes, decisive, measures, metric, seconds } from "./format.js";
import { RoundTable } from "./roundtable.js";
import { Section, Switch } from "./parts.js";
import { useQuery, useTable } from "./query.js";

export const AXES = {
  rounds: { x: (r) => r.round, show: (x) => String(x), word: "rounds" },
  seconds: { x: (r) => r.until_s, show: (x) => (x < 120 ? `${+x.toFixed(1)} s` : `${+(x / 60).toFixed(1)} min`), word: "seconds of training" },
  bytes: { x: (r) => r.until_payload, show: (x) => (x ? bytes(x).replace(/\.0+ /, " ") : "0"), word: "payload bytes, both ways" },
};
const SHOWN = 6; // metrics with a curve of their own beside each other
const SMOOTHING = [["0", "none"], ["0.6", "some"], ["0.9", "much"]]; // share of the mean before, in a moving mean
const COLORS = { accuracy: "--train", loss: "--late" };

export const Learning = ({ run, opened, rounds, points, news }) => {
  const [axis, setAxis] = useQuery("x", "rounds");
  const [table, setTable] = useTable("learning");
  const by = AXES[axis] || AXES.rounds;
  const names = metricNames(run, points);
  const [one, setOne] = useQuery("metric", "");
  const chosen = names.includes(one) ? one : "";
  return html`
    <${Section} id="learning" title="Learning" wide table=${table} setTable=${setTable}
      aside=${html`<span class="controls"><${Switch} label="Horizontal axis" name="axis" value=${axis} choose=${setAxis} options=${[["rounds", "rounds"], ["seconds", "seconds"], ["bytes", "bytes"]]} />
        ${names.length > 0 && html`<label class="pickone">Metric <select onChange=${(event) => setOne(event.target.value)}>
          <option value="" selected=${!chosen}>${names.length > SHOWN ? `the first ${SHOWN}` : "all"}</option>${names.map((name) => html`<option key=${name} value=${name} selected=${name === chosen}>${name}</option>`)}</select></label>`}</span>`}
      csv=${link(`api/v1/runs/${run.run_id}/rounds.csv`)} json=${link(`api/v1/runs/${run.run_id}/rounds`)}>
      ${table ? html`<${Numbers} run=${run} opened=${opened} rounds=${rounds} news=${news} names=${names.slice(0, SHOWN)} />`
        : chosen ? html`<${Large} name=${chosen} run=${run} rounds=${points} by=${by} />`
        : measures(run) && html`<div class="curves">${names.slice(0, SHOWN).map((name) => html`<${OneCurve} key=${name} name=${name} run=${run} rounds=${points} by=${by} />`)}</div>`}
      ${run.not_evaluated && html`<p class="note">${run.not_evaluated[0].toUpperCase()}${run.not_evaluated.slice(1)}.</p>`}
    <//>`;
};

const metricNames = (run, rounds) => {
  const found = new Set([...Object.keys(run.metrics0), ...rounds.flatMap((r) => Object.keys(r.metrics))]);
  const first = ["accuracy", "loss"].filter((name) => found.has(name) || found.size === 0);
  const rest = [...found].filter((name) => !first.includes(name)).sort();
  return [...first, ...rest.filter((name) => !name.startsWith("train/")), ...rest.filter((name) => name.startsWith("train/"))];
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

/** One metric over the whole width: smoothed, on a log scale, and zoomed. */
const Large = ({ name, run, rounds, by }) => {
  const [smooth, setSmooth] = useQuery("smooth", "0");
  const [log, setLog] = useQuery("log", "");
  const [at, setAt] = useState(null);
  const share = Math.min(0.99, Math.max(0, Number(smooth) || 0));
  const series = useMemo(() => {
    const raw = { name, place: 0, points: measured(name, run, rounds, by).filter((p) => p.x !== null) };
    return share ? [{ ...raw, name: `${name}, smoothed`, points: smoothed(raw.points, share) }, { ...raw, faint: true }] : [raw];
  }, [name, rounds, by, share]);
  const last = valueAt(series[0].points, null);
  return html`
    <div class="controls large"><${Switch} label="Smoothing" name="smooth" value=${String(share)} choose=${setSmooth} options=${SMOOTHING.map(([value, word]) => [value, `${word === "none" ? "no" : word} smoothing`])} />
      <label class=${log ? "chip chosen" : "chip"}><input type="checkbox" checked=${Boolean(log)} onChange=${() => setLog(log ? "" : "1")} />log scale</label></div>
    <${RunChart} label=${last === null ? `${name}: nothing measured yet` : `${name} over ${by.word}: ${metric(last)} at last; its numbers are in the table`} series=${series} showX=${by.show} show=${tick} whole=${by === AXES.rounds} log=${Boolean(log)} read=${setAt} />
    <ul class="readings" aria-label=${at === null ? "Latest value" : `Value at ${by.show(at)}`}>${series.map((one) => html`
      <li key=${one.name}><${Mark} place=${one.place} faint=${one.faint} /><span>${one.faint ? "as measured" : one.name}</span> <b>${metric(valueAt(one.points, at))}</b></li>`)}
      <li class="faint">${at === null ? "latest" : `at ${by.show(at)}`}</li></ul>`;
};

/** The moving mean with weights that fall by `share` a point; the first points are not drawn towards 0. */
const smoothed = (points, share) => {
  let [sum, weight] = [0, 0];
  return points.map((p) => {
    if (p.y === null) return p;
    [sum, weight] = [share * sum + (1 - share) * p.y, share * weight + (1 - share)];
    return { ...p, y: sum / weight };
  });
};

const tick = (y) => String(+y.toPrecision(6)); // close marks differ

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

const Numbers = ({ run, opened, rounds, news, names }) => html`
  <${RoundTable} label="Metrics of each round" run=${run} opened=${opened} rounds=${rounds} news=${news} columns=${[
    { title: "Round", cell: (r) => r.round },
    ...names.map((name) => ({ title: name, right: true, cell: (r) => html`${metric(decisive(r)[name])}${cut(name, r.clipped)}` })),
    ...names.map((name) => ({ title: `${name}, clients`, right: true, cell: (r) => (r.spread[name] ? `${metric(r.spread[name][0])} – ${metric(r.spread[name][1])}` : "–") })),
    { title: "After", right: true, cell: (r) => seconds(r.until_s) },
    { title: "Payload by then", right: true, cell: (r) => bytes(r.until_payload) },
    { title: "Wire by then", right: true, cell: (r) => bytes(r.until_wire) },
  ]} />`;
