// Up to eight runs side by side: their curves on shared axes, a row each, and what differs in their plans.
import { get } from "./api.js";
import { home, html, link, useEffect, useMemo, useState } from "./dom.js";
import { bytes, metric, ratio, seconds } from "./format.js";
import { Gone } from "./frame.js";
import { AXES } from "./learning.js";
import { useReading } from "./live.js";
import { Command, Icon, Made, Refusal, Section, Status, Switch, Table } from "./parts.js";
import { useQuery, useTable } from "./query.js";
import { Mark, RunChart, valueAt } from "./runchart.js";

const X = { rounds: "round", seconds: "seconds", bytes: "bytes" }; // of a point, by the axis

export const ComparePage = ({ news }) => {
  const [runs, setRuns] = useQuery("runs", "");
  const [name, setName] = useQuery("metric", "");
  const ids = [...new Set(runs.split(",").filter(Boolean))];
  const address = `compare?runs=${ids.join(",")}${name ? `&metric=${encodeURIComponent(name)}` : ""}`;
  const { data, error } = useReading(() => (ids.length ? get(address) : null), news, [address]);
  useEffect(() => {
    document.title = "Compare · Thinwire";
  }, []);
  const head = html`
    <${Gone} news=${news} error=${data ? error : null} />
    <div class="head"><nav aria-label="Where you are"><a href=${link("")}>Runs</a><span aria-hidden="true"> / </span><h1>Compare</h1></nav></div>`;
  if (!ids.length) return html`${head}<section class="nothing" aria-labelledby="none-title"><h2 id="none-title">Nothing to compare</h2><p>Pick two to eight runs in <a href=${link("")}>the table of runs</a>.</p></section>`;
  if (!data) return html`${head}${error && news.reached ? html`<${Refusal} error=${error} />` : html`<p class="loading">Reading…</p>`}`;
  const rows = [...data.rows, ...data.apart];
  const shown = data.curves.map((one) => one.run_id);
  const placeOf = (id) => shown.indexOf(id);
  const drop = (id) => setRuns(shown.filter((one) => one !== id).join(","));
  return html`
    ${head}
    <ul class="compared" aria-label="Compared runs">${shown.map((id) => html`
      <li key=${id}><${Mark} place=${placeOf(id)} /><a href=${link(`runs/${id}`)}>${id}</a><${Status} status=${rows.find((row) => row.run === id)?.status} />
        ${shown.length > 1 && html`<button type="button" class="tool square" onClick=${() => drop(id)} aria-label=${`Leave ${id} out`} title=${`Leave ${id} out`}><${Icon} name="cross" /></button>`}</li>`)}</ul>
    <${Curves} data=${data} setName=${setName} placeOf=${placeOf} json=${link(`api/v1/${address}`)} />
    <${Section} id="figures" title="Figures" csv=${link(`api/v1/compare.csv?runs=${ids.join(",")}`)} json=${link(`api/v1/${address}`)}>
      ${data.rows.length > 0 && html`<${Figures} label="Figures of the runs" rows=${data.rows} name=${data.metric} placeOf=${placeOf} />`}
      ${data.apart.length > 0 && html`
        <h3 class="apart">Stopped or failed</h3>
        <p class="faint">What they sent and took is of a part of their plan.</p>
        <${Figures} label="Figures of the stopped and failed runs" rows=${data.apart} name=${data.metric} placeOf=${placeOf} />`}
      <details class="more"><summary>The same on the command line</summary><${Command} text=${`thinwire runs compare ${shown.join(" ")}${home}`} /></details>
    <//>
    <${Section} id="differs" title="What differs in their plans" json=${link(`api/v1/${address}`)}>
      ${Object.keys(data.differs).length ? html`<${Differs} differs=${data.differs} shown=${shown} placeOf=${placeOf} />` : html`<p class="faint">Nothing: their plans are equal.</p>`}
    <//>`;
};

const Curves = ({ data, setName, placeOf, json }) => {
  const [axis, setAxis] = useQuery("x", "rounds");
  const [log, setLog] = useQuery("log", "");
  const [table, setTable] = useTable("curves");
  const [at, setAt] = useState(null);
  const by = AXES[axis] || AXES.rounds;
  const key = X[axis] || X.rounds;
  const series = useMemo(() => data.curves.map((run) => ({
    name: run.run_id, place: placeOf(run.run_id), points: run.points.map((p) => ({ x: p[key], y: p.metrics[data.metric] ?? null })).filter((p) => p.x !== null),
  })), [data, key]);
  const names = data.metrics.length ? data.metrics : [data.metric];
  return html`
    <${Section} id="curves" title="Curves" table=${table} setTable=${setTable} json=${json}
      aside=${html`<span class="controls"><label class="pickone">Metric <select value=${data.metric} onChange=${(event) => setName(event.target.value)}>${names.map((one) => html`<option key=${one} value=${one} selected=${one === data.metric}>${one}</option>`)}</select></label>
        <${Switch} label="Horizontal axis" name="axis" value=${axis} choose=${setAxis} options=${[["rounds", "rounds"], ["seconds", "seconds"], ["bytes", "bytes"]]} />
        <label class=${log ? "chip chosen" : "chip"}><input type="checkbox" checked=${Boolean(log)} onChange=${() => setLog(log ? "" : "1")} />log scale</label></span>`}>
      ${table ? html`<${Numbers} data=${data} series=${series} by=${by} />` : html`
        <${RunChart} label=${`${data.metric} of ${series.length} runs over ${by.word}; its numbers are in the table`} series=${series} showX=${by.show} show=${tick} whole=${by === AXES.rounds} log=${Boolean(log)} read=${setAt} />
        <ul class="readings" aria-label=${at === null ? `Latest ${data.metric}` : `${data.metric} at ${by.show(at)}`}>${series.map((one) => html`
          <li key=${one.name}><${Mark} place=${one.place} /><span>${one.name}</span> <b>${metric(valueAt(one.points, at))}</b></li>`)}
          <li class="faint">${at === null ? "latest" : `at ${by.show(at)}${by === AXES.rounds ? "" : ` of ${by.word}`}`}</li></ul>`}
    <//>`;
};

const tick = (y) => String(+y.toPrecision(6));

const Numbers = ({ data, series, by }) => {
  const rounds = [...new Set(data.curves.flatMap((run) => run.points.map((p) => p.round)))].sort((a, b) => a - b);
  const of = new Map(data.curves.map((run) => [run.run_id, new Map(run.points.map((p) => [p.round, p]))]));
  return html`<${Table} label=${`${data.metric} of each run by round`} rows=${rounds} keyOf=${(r) => r} empty="nothing measured yet" columns=${[
    { title: "Round", cell: (r) => r },
    ...series.map((one) => ({ title: one.name, right: true, cell: (r) => {
      const found = of.get(one.name).get(r);
      return found ? html`${metric(found.metrics[data.metric])}${by === AXES.rounds ? "" : html`<small class="below">${by === AXES.bytes ? bytes(found.bytes) : seconds(found.seconds)}</small>`}` : "–";
    } })),
  ]} />`;
};

const Figures = ({ label, rows, name, placeOf }) => html`
  <${Table} label=${label} rows=${rows} stacks keyOf=${(r) => r.run} columns=${[
    { title: "Run", cell: (r) => html`<${Mark} place=${placeOf(r.run)} /> <a href=${link(`runs/${r.run}`)}>${r.run}</a>` },
    { title: "Status", cell: (r) => html`<${Status} status=${r.status} />` },
    { title: name, right: true, cell: (r) => metric(r.value) },
    { title: "Best", right: true, cell: (r) => (r.best_value === null ? "–" : html`<span>${metric(r.best_value)}<small class="below">${r.best_metric}</small></span>`) },
    { title: "Rounds", right: true, cell: (r) => html`<${Made} run=${r} />` },
    { title: "Time in rounds", right: true, cell: (r) => seconds(r.seconds) },
    { title: "Payload up", right: true, cell: (r) => bytes(r.payload_up) },
    { title: "Less than dense", right: true, cell: (r) => ratio(r.dense_up, r.payload_up) },
    { title: "Payload down", right: true, cell: (r) => bytes(r.payload_down) },
    { title: "Wire, both ways", right: true, cell: (r) => (r.wire_up === null || r.wire_down === null ? "–" : bytes(r.wire_up + r.wire_down)) },
  ]} />`;

const Differs = ({ differs, shown, placeOf }) => html`
  <${Table} label="Keys in which the plans differ" rows=${Object.entries(differs)} keyOf=${([key]) => key} columns=${[
    { title: "Key", cell: ([key]) => html`<code>${key}</code>` },
    ...shown.map((id) => ({ title: html`<${Mark} place=${placeOf(id)} /> ${id}`, cell: ([, values]) => html`<code>${brief(values[id])}</code>` })),
  ]} />`;

const brief = (value) => (value.length > 40 && /^[0-9a-f]+$/.test(value) ? `${value.slice(0, 16)}…` : value || "–");
