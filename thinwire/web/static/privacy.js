// Differential privacy: what a run has spent, as a curve over rounds up to its bound, and what that means and assumes.
import { Curve } from "./chart.js";
import { html, link, useMemo, useState } from "./dom.js";
import { RoundTable } from "./roundtable.js";
import { Icon, Section } from "./parts.js";
import { useTable } from "./query.js";

export const Privacy = ({ run, opened, rounds, spent, news }) => {
  const [table, setTable] = useTable("privacy");
  const [at, setAt] = useState(null);
  const { privacy } = run;
  const { spending } = privacy;
  const all = privacy.bound_name === "budget"; // a budget is for all runs of a population, a target for this run
  const points = useMemo(
    () => [...(all ? [] : [{ x: 0, y: 0, train: privacy.bound }]), ...spent.map((r) => ({ x: r.round, y: all ? r.epsilon : r.epsilon_run, train: privacy.bound }))],
    [spent, all, privacy.bound],
  );
  const shown = at ?? points.at(-1);
  const whose = all ? `in all runs of ${spending.population}` : "in this run";
  return html`
    <${Section} id="privacy" title="Privacy" wide table=${table} setTable=${setTable}
      aside=${`differential privacy, mode ${spending.mode}`} csv=${link(`api/v1/runs/${run.run_id}/rounds.csv`)} json=${link(`api/v1/runs/${run.run_id}`)}>
      <p class="why">${privacy.sentence[0].toUpperCase()}${privacy.sentence.slice(1)}.</p>
      ${[privacy.stopped, privacy.unreleased, privacy.unknown].filter(Boolean).map((said) => html`<div class="notice said"><${Icon} name="alert" /><div>${said}</div></div>`)}
      <dl class="figures">
        <div><dt>epsilon, this run</dt><dd>${up(spending.epsilon_run)}</dd></div>
        <div><dt>epsilon, all runs</dt><dd>${up(spending.epsilon)}</dd></div>
        ${privacy.bound !== null && html`<div><dt>${privacy.bound_name}</dt><dd>${up(privacy.bound)}</dd></div>`}
        <div><dt>delta</dt><dd>${spending.delta}</dd></div>
        <div><dt>rounds of one client</dt><dd>${spending.participations}</dd></div>
        <div><dt>reserved · released</dt><dd>${spending.reserved} · ${spending.released}</dd></div>
      </dl>
      ${table ? html`<${Numbers} run=${run} opened=${opened} rounds=${rounds} news=${news} />` : points.some((p) => p.x) && html`
        <div class="curves"><figure>
          <figcaption><b>epsilon ${whose}</b>
            <span><span class="value">${up(shown.y)}</span> <span class="faint">round ${shown.x}${privacy.bound === null ? "" : `, dashed: ${privacy.bound_name} ${up(privacy.bound)}`}</span></span></figcaption>
          <${Curve} label=${`epsilon ${whose} over rounds: ${up(points.at(-1).y)} after round ${points.at(-1).x}${privacy.bound === null ? "" : `; the ${privacy.bound_name} is ${up(privacy.bound)}`}`}
            points=${points} color="--encode" show=${tick} showX=${String} read=${setAt} whole />
        </figure></div>`}
      <p>${privacy.meaning}</p>
      ${run.not_evaluated && html`<p class="note">${run.not_evaluated[0].toUpperCase()}${run.not_evaluated.slice(1)}.</p>`}
      <h3>Assumptions</h3><ul class="plain">${privacy.assumes.map((one) => html`<li>${one}</li>`)}</ul>
    <//>`;
};

const tick = (y) => String(+y.toPrecision(6));

/** An epsilon with three digits, never below its value. */
const up = (value) => {
  if (value === null) return "no bound";
  if (!value) return "0";
  const unit = 10 ** (Math.floor(Math.log10(value)) - 2);
  return String(+(Math.ceil(value / unit - 1e-9) * unit).toPrecision(3));
};

const Numbers = ({ run, opened, rounds, news }) => html`
  <${RoundTable} label="Epsilon after each round" run=${run} opened=${opened} rounds=${rounds} news=${news} only=${(r) => r.epsilon_run !== null} columns=${[
    { title: "Round", cell: (r) => r.round },
    { title: "Model", cell: (r) => (!r.reason ? "open" : r.version > r.base_version ? "released" : "none, and spent") },
    { title: "Epsilon, this run", right: true, cell: (r) => up(r.epsilon_run) },
    { title: "Epsilon, all runs", right: true, cell: (r) => up(r.epsilon) },
  ]} />`;
