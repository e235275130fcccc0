// A new run: a plan from a file, from the form or from another run, checked as one types, with what it would cost.
import { get, outcome, post, send } from "./api.js";
import { home, html, link, may, useEffect, useRef, useState } from "./dom.js";
import { bytes, count, plural, ratio, seconds } from "./format.js";
import { Gone } from "./frame.js";
import { Command, Icon, Refusal, Section, Table } from "./parts.js";
import { PlanForm, idOf, isUnfilled, sectionsOf, withValue } from "./planform.js";

const TYPED_MS = 300; // without a change, until the plan is checked
const MAX_FILE = 48 * 1024;
const BLANK = { run: {}, local: {} };

export const NewRunPage = ({ news }) => {
  const [ready, setReady] = useState({ sections: null, tasks: {}, error: null });
  const plan = usePlan();
  const from = useRef(new URLSearchParams(location.search).get("from"));
  useEffect(() => {
    document.title = "New run · Thinwire";
    Promise.all([get("plans/schema"), get("plans/tasks"), from.current ? get(`runs/${encodeURIComponent(from.current)}`) : null]).then(
      ([schema, tasks, run]) => {
        setReady({ sections: sectionsOf(schema), tasks: tasks.tasks, error: null, extended: run?.extended });
        if (run) plan.take(cloned(run), run.run_id);
        else plan.take({ ...BLANK, run: Object.keys(tasks.tasks).length === 1 ? { task: Object.keys(tasks.tasks)[0] } : {} });
      },
      (error) => setReady((old) => ({ ...old, error })),
    );
  }, []);
  if (ready.error) return html`<${Refusal} error=${ready.error} /><p><a href=${link("")}>All runs</a></p>`;
  if (!ready.sections) return html`<p class="loading">Reading…</p>`;
  const problems = (plan.checked?.problems ?? []).map((one) => ({ ...one, unfilled: isUnfilled(ready.sections, plan.values, one.place) }));
  const suggestions = { "run.task": Object.keys(ready.tasks), "run.init": ["device", ...(from.current ? [`run:${plan.origin ?? from.current}`] : [])] };
  const gone = news.aggregator === "gone" || !news.reached;
  return html`
    <${Gone} news=${news} matters />
    <div class="head"><nav aria-label="Where you are"><a href=${link("")}>Runs</a><span aria-hidden="true"> / </span><h1>New run</h1></nav>
      ${plan.origin && html`<p class="sentence small">A clone of <a href=${link(`runs/${plan.origin}`)}>${plan.origin}</a>: change what should differ.${ready.extended && " It has the plan of that run's start: what its extension changed is left out."}</p>`}</div>
    <div class="new-run">
      <div>
        <${Drop} take=${plan.takeText} />
        <${PlanForm} sections=${ready.sections} plan=${plan.values} problems=${problems} choose=${plan.choose} suggestions=${suggestions}
          extras=${{ "run.init": may("operator") && html`<${Upload} done=${(init) => plan.choose(["run", "init"], init)} />` }} />
      </div>
      <div class="beside">
        <${PlanState} plan=${plan} gone=${gone} problems=${problems} />
        <${Cost} checked=${plan.checked} />
        <${Text} plan=${plan} />
      </div>
    </div>`;
};

/** The plan that a run was started with, to begin with the same first model, as `thinwire runs clone` does. */
const cloned = ({ first_plan: plan, run_id, source }) => (source === "devices" && plan.run.init !== "device" ? { ...plan, run: { ...plan.run, init: `run:${run_id}@0` } } : plan);

/** One plan with two views, values and TOML: a change of one is checked by the server, and the answer fills the other. */
function usePlan() {
  const [state, setState] = useState({ values: BLANK, text: "", checked: null, busy: true, origin: null, error: null });
  const work = useRef({ number: 0, timer: 0, values: BLANK });
  const check = (given, fill, wait) => {
    const number = ++work.current.number;
    clearTimeout(work.current.timer);
    setState((old) => ({ ...old, busy: true }));
    work.current.timer = setTimeout(async () => {
      try {
        const checked = await post("plans/check", given);
        if (number === work.current.number) setState((old) => fill({ ...old, checked, busy: false, error: null }, checked));
      } catch (error) {
        if (number === work.current.number) setState((old) => ({ ...old, busy: false, error }));
      }
    }, wait);
  };
  const put = (values) => {
    work.current.values = values;
    setState((old) => ({ ...old, values }));
  };
  const both = (old, checked) => {
    work.current.values = checked.given;
    return { ...old, values: checked.given, text: checked.toml };
  };
  return {
    ...state,
    take: (values, origin = null) => {
      put(values);
      setState((old) => ({ ...old, origin }));
      check({ plan: values }, both, 0);
    },
    choose: (place, value) => {
      const values = withValue(work.current.values, place, value);
      put(values);
      check({ plan: values }, (old, checked) => ({ ...old, text: checked.toml }), TYPED_MS);
    },
    takeText: (text) => {
      setState((old) => ({ ...old, text }));
      check({ text }, (old, checked) => (Object.keys(checked.given).length || checked.ok ? { ...both(old, checked), text: old.text } : old), 0);
    },
    type: (text) => {
      setState((old) => ({ ...old, text }));
      check({ text }, (old, checked) => {
        if (!Object.keys(checked.given).length) return old; // no TOML yet: the form stays
        work.current.values = checked.given;
        return { ...old, values: checked.given };
      }, TYPED_MS);
    },
  };
}

/** The file is read here in the browser. */
const Drop = ({ take }) => {
  const [over, setOver] = useState(false);
  const [said, setSaid] = useState("");
  const read = async (file) => {
    if (!file) return;
    if (file.size > MAX_FILE) {
      setSaid(`${file.name} has ${bytes(file.size)}: a plan has at most ${bytes(MAX_FILE)}`);
      return;
    }
    take(await file.text());
    setSaid(`${file.name} was read`);
  };
  return html`
    <div class=${over ? "drop over" : "drop"} onDragOver=${(event) => { event.preventDefault(); setOver(true); }} onDragLeave=${() => setOver(false)}
      onDrop=${(event) => { event.preventDefault(); setOver(false); read(event.dataTransfer.files[0]); }}>
      <label class="tool file"><${Icon} name="down" />Choose a plan file
        <input type="file" accept=".toml,text/plain,application/toml" onChange=${(event) => { read(event.target.files[0]); event.target.value = ""; }} /></label>
      <span class="faint" role="status">${said || "or drop it here, or fill in the form; it is read in this browser"}</span>
    </div>`;
};

/** A model of one's own, streamed to the aggregator's machine; only its header is read there. */
const Upload = ({ done }) => {
  const [said, setSaid] = useState({ tone: "faint", text: "" });
  const take = async (file) => {
    if (!file) return;
    setSaid({ tone: "faint", text: `${file.name}, ${bytes(file.size)}: 0 %` });
    try {
      const found = await send(file, (share) => setSaid({ tone: "faint", text: `${file.name}, ${bytes(file.size)}: ${Math.floor(100 * share)} %` }));
      setSaid({ tone: "good-text", text: `${file.name} is uploaded: ${plural(found.tensors, "tensor")}, ${plural(found.elements, "value")}` });
      done(found.init);
    } catch (error) {
      setSaid({ tone: "bad-text", text: `${error.message}${error.why ? `: ${error.why}` : ""}. Try: ${error.hint || "once more"}` });
    }
  };
  return html`
    <p class="own-model"><label class="tool file"><${Icon} name="down" />Upload a model
      <input type="file" accept=".safetensors" onChange=${(event) => { take(event.target.files[0]); event.target.value = ""; }} /></label>
      <span class=${said.tone} role="status">${said.text || ".safetensors, checked against the task when the run starts"}</span></p>`;
};

const PlanState = ({ plan, gone, problems }) => {
  const [sent, setSent] = useState({ state: "idle", error: null });
  const wrong = problems.filter((one) => !one.unfilled);
  const ready = may("operator") && plan.checked?.ok && !plan.busy && !gone && !["sent", "waits"].includes(sent.state);
  useEffect(() => setSent({ state: "idle", error: null }), [plan.values]); // another plan
  const start = async () => {
    setSent({ state: "sent", error: null });
    try {
      const { command } = await post("runs", { plan: plan.values });
      const made = await outcome(command);
      if (made) location.assign(link(`runs/${made.run_id}`));
      else setSent({ state: "waits", error: null });
    } catch (error) {
      setSent({ state: "idle", error });
    }
  };
  return html`
    <section class="block plan-state" aria-labelledby="check-title">
      <header><h2 id="check-title">Check</h2>
        <div class="tools"><button type="button" class="tool primary" disabled=${!ready} onClick=${start}><${Icon} name="play" />${sent.state === "sent" ? "Starting…" : "Start the run"}</button></div></header>
      <div class="said" role="status" aria-live="polite">
        ${plan.error ? html`<p class="bad-text">${plan.error.message}</p>`
          : !plan.checked ? html`<p class="faint">Checking…</p>`
            : plan.checked.ok ? html`<p class="good-text"><${Icon} name="check" />This plan can run${gone ? ", once an aggregator is running" : ""}.</p>`
              : wrong.length ? html`<p class="bad-text"><${Icon} name="alert" />${plural(wrong.length, "problem")}: this plan cannot run.</p>`
                : html`<p>The plan still needs:</p>`}
      </div>
      ${problems.length > 0 && html`<ul class="wrongs" aria-label="Problems of the plan">${problems.map((one) => html`
        <li key=${one.what}>${one.place.length > 1 ? html`<a href=${`#${idOf(one.place.slice(0, 2))}`} onClick=${(event) => reach(event, one.place)}>${one.unfilled ? one.what.replace(/ is missing$/, "") : one.what}</a>` : html`<b>${one.what}</b>${one.why ? `: ${one.why}` : ""}`}</li>`)}</ul>`}
      ${!may("operator") && html`<p class="faint">An operator can start it.</p>`}
      ${plan.checked?.ok && html`<p class="faint">First model: ${plan.checked.first_model}.</p>`}
      ${plan.checked?.notes.map((one) => html`<p class="warn-text note-line"><${Icon} name="alert" />${one}</p>`)}
      ${sent.error && html`<${Refusal} error=${sent.error} />`}
      ${sent.state === "waits" && html`<p class="warn-text">The aggregator has not answered yet. The command stays: <a href=${link("")}>all runs</a> shows the run when it is made.</p>`}
    </section>`;
};

const reach = (event, place) => {
  const field = document.getElementById(idOf(place.slice(0, 2)));
  if (!field) return;
  event.preventDefault();
  field.scrollIntoView({ block: "center" });
  field.focus({ preventScroll: true });
};

const UNKNOWN = html`<span class="faint">not known yet</span>`;
const figure = (value, show) => (value === null || value === undefined ? UNKNOWN : show(value));

/** Keeps its height while it has nothing to say, so that nothing below it moves. */
const Cost = ({ checked }) => {
  const [last, setLast] = useState(null);
  useEffect(() => {
    if (checked?.cost) setLast(checked.cost);
  }, [checked]);
  const cost = checked?.cost ?? last;
  const stale = !checked?.cost;
  const total = cost?.up_bytes === null || !cost?.clients ? null : (cost.up_bytes + cost.down_bytes) * cost.clients * cost.rounds;
  return html`
    <${Section} id="cost" title="Cost" aside=${cost ? `${cost.clients ? `${plural(cost.clients, "client")} a round, ` : ""}${plural(cost.rounds, "round")}` : ""}>
      <dl class=${stale ? "facts cost stale" : "facts cost"}>
        <div><dt>up</dt><dd>${figure(cost?.up_bytes, (b) => html`<b>${bytes(b)}</b> a client and round${cost.dense_bytes > b ? html` <span class="faint">(${ratio(cost.dense_bytes, b)} less than dense)</span>` : ""}${cost.up_least < b ? html`<br /><span class="faint">${bytes(cost.up_least)} on the slowest links</span>` : ""}`)}</dd></div>
        <div><dt>down</dt><dd>${figure(cost?.down_bytes, (b) => html`<b>${bytes(b)}</b> a client and round`)}</dd></div>
        <div><dt>in all</dt><dd>${figure(total, (b) => html`<b>${bytes(b)}</b> of all clients and rounds`)}</dd></div>
        <div><dt>a round</dt><dd>${figure(cost?.round_s, (s) => html`<b>${seconds(s)}</b>${cost.slowest ? html` <span class="faint">with ${cost.slowest}, the slowest of ${count(cost.measured)} measured</span>` : ""}`)}</dd></div>
        <div><dt>the run</dt><dd>${figure(cost?.run_s, (s) => html`<b>${seconds(s)}</b>`)}</dd></div>
        <div><dt>model</dt><dd>${figure(cost?.parameters, (n) => html`${plural(n, "parameter")} <span class="faint">${cost.layout_from}</span>`)}</dd></div>
      </dl>
      <p class="note">${stale && cost ? "Of the last plan without a problem." : cost?.unknown ? `${cost.unknown[0].toUpperCase()}${cost.unknown.slice(1)}.` : cost ? "Bytes are estimates of payload; seconds follow from the measured links." : "Shown once the plan has no problem."}</p>
      ${cost?.devices.length > 0 && html`<details class="more"><summary>${plural(cost.devices.length, "device")} with this task</summary>
        <${Table} label="Seconds of each device in a round" rows=${cost.devices} keyOf=${(d) => d.device} columns=${[
          { title: "Device", cell: (d) => html`${d.device}<small class="below">${d.online ? "online" : "offline"}</small>` },
          { title: "Down", right: true, cell: (d) => figure(d.down_s, seconds) },
          { title: "Train", right: true, cell: (d) => figure(d.train_s, seconds) },
          { title: "Up", right: true, cell: (d) => figure(d.up_s, seconds) },
          { title: "Round", right: true, cell: (d) => figure(d.round_s, (s) => html`<b>${seconds(s)}</b>`) },
        ]} /></details>`}
    <//>`;
};

const Text = ({ plan }) => html`
  <${Section} id="toml" title="The same plan as TOML" aside="what is left out has its default">
    <textarea class="toml" id="toml-text" aria-label="Plan as TOML" spellcheck=${false} rows="14" value=${plan.text} onInput=${(event) => plan.type(event.target.value)}></textarea>
    <details class="more"><summary>Run it from the command line</summary><${Command} text=${`thinwire run plan.toml${home}`} /></details>
  <//>`;
