// One run: what it does now, how well it learns, where each round's time and bytes went, and who takes part.
import { Actions } from "./actions.js";
import { get, post } from "./api.js";
import { Bytes } from "./bytes.js";
import { Clients, useClients } from "./clients.js";
import { DeviceTable, TagList, joinCommand } from "./devices.js";
import { ENDED, html, link, may, useEffect, useRef, useState } from "./dom.js";
import { bytes, count, decisive, isSampled, measures, metric, moment, plural, ratio, seconds, wired } from "./format.js";
import { Gone } from "./frame.js";
import { Journal } from "./journal.js";
import { Learning } from "./learning.js";
import { Models } from "./models.js";
import { stoodStill, useAfterPaint, useReading, useTime } from "./live.js";
import { Command, Icon, Made, Refusal, Section, Status, Table } from "./parts.js";
import { Privacy } from "./privacy.js";
import { useQuery } from "./query.js";
import { Rounds } from "./rounds.js";
import { Protection } from "./secure.js";
import { address, merge } from "./view.js";
import { TimeBar, TimeBreakdown } from "./timebreakdown.js";

const CLIENTS_MS = 1000; // between two reads of the clients' states
const COMMANDS = { queued: ["pause", "stop"], waiting: ["pause", "stop"], running: ["pause", "stop"], paused: ["resume", "stop"] }; // status -> what a person may command

export const RunPage = ({ id, news }) => {
  const [chosen, choose] = useQuery("round", null);
  const shown = useClients();
  const clients = shown.query; // which of them, and in which order
  const known = useRef({ view: null, clients: null, at: 0, stale: false });
  const [late, setLate] = useState(0);
  const read = async () => {
    const now = known.current;
    const due = now.clients !== clients || performance.now() - now.at > CLIENTS_MS;
    const look = (old) => get(address(id, old, Math.max(0, Number.parseInt(chosen, 10) || 0), due ? clients : null));
    let found = await look(now.view);
    const other = now.view && (now.view.run.run_id !== found.run.run_id || now.view.run.notes.join() !== found.run.notes.join());
    if (other) found = await get(address(id, null, Math.max(0, Number.parseInt(chosen, 10) || 0), clients)); // "latest" is another run now, or it got more rounds and another plan
    const view = merge(other ? null : now.view, found);
    known.current = { view, clients, at: due ? performance.now() : now.at, stale: !due };
    const early = view.opened && view.run.status !== "waiting" ? {} : { devices: await get("devices"), service: await get("service") };
    return { ...view, ...early };
  };
  const { data, error } = useReading(read, news, [id, chosen, clients, late]);
  useEffect(() => { // the last news of a run may come before the clients' states are due
    if (!known.current.stale) return undefined;
    const timer = setTimeout(() => setLate((n) => n + 1), CLIENTS_MS);
    return () => clearTimeout(timer);
  }, [data]);
  const below = useAfterPaint(Boolean(data)); // thousands of elements, while the curves have a few
  useEffect(() => {
    document.title = data ? `${data.run.run_id} · ${data.run.status} · Thinwire` : "Thinwire";
  }, [data?.run.run_id, data?.run.status]);
  if (!data) return error && news.reached ? html`<div class="head"><${Where} id=${id} /></div><${Refusal} error=${error} />` : html`<${Gone} news=${news} matters /><p class="loading">Reading…</p>`;
  const { run, opened, rounds, devices, service } = data;
  const gone = news.aggregator === "gone" || !news.reached;
  const still = run.source === "sim" && news.reached ? null : stoodStill(news); // a simulation needs no aggregator
  return html`
    <${Gone} news=${news} matters=${!ENDED.includes(run.status) && run.source === "devices"} error=${error} />
    <${Head} run=${run} rounds=${rounds} still=${still} gone=${gone} />
    ${run.status === "waiting" || (!opened && !ENDED.includes(run.status))
      ? html`<${Waiting} run=${run} devices=${devices} service=${service} gone=${gone} />` : null}
    ${opened ? html`
      <div class="grid">
        ${measures(run) || !run.privacy ? html`<${Learning} ...${data} news=${news} />` : html`<${Privacy} ...${data} news=${news} />`}
        <${Bytes} ...${data} news=${news} />
      </div>
      ${measures(run) && run.privacy && html`<${Privacy} ...${data} news=${news} />`}` : null}
    ${below && html`<${Below} data=${data} news=${news} still=${still} shown=${shown} chosen=${chosen} choose=${choose} />`}`;
};

const Below = ({ data, news, still, shown, chosen, choose }) => {
  const { run, opened, clients } = data;
  return html`
    ${opened ? html`
      ${run.why && html`
        <${Section} id="time" title="Where the time went" aside=${run.protection ? "by phase" : "along the slowest of each round"}>
          <p class="why">${run.why}</p>
          <${TimeBar} stages=${run.stages} />
          <${TimeBreakdown} of=${run} />
        <//>`}
      <${Rounds} ...${data} news=${news} still=${still} chosen=${chosen} choose=${choose} />
      ${run.protection && html`<${Protection} said=${run.protection} />`}` : null}
    ${run.estimate && ENDED.includes(run.status) && html`<${Estimated} run=${run} rounds=${data.rounds} />`}
    ${clients?.total ? html`<${Clients} run=${run} page=${clients} shown=${shown} />` : null}
    <${Models} run=${run} />
    <${Plan} run=${run} />
    <${Journal} id=${run.run_id} />`;
};

const Where = ({ id }) => html`
  <nav aria-label="Where you are"><a href=${link("")}>Runs</a><span aria-hidden="true"> / </span><h1>${id}</h1></nav>`;

const Head = ({ run, rounds, still, gone }) => {
  const open = rounds.find((r) => r.reason === "") ?? null; // the first: where assignments are sent ahead, others wait behind it
  const going = run.status === "running" || run.status === "waiting";
  const now = useTime(going, still);
  const took = run.started_at ? (run.finished_at ?? now) - run.started_at : null;
  return html`
    <div class="head">
      <${Where} id=${run.run_id} />
      <span aria-live="polite"><${Status} status=${run.status} /></span>
      ${run.name && html`<b>${run.name}</b>`}<${TagList} tags=${[...run.tags, ...(run.archived_at ? ["archived"] : [])]} />
      ${may("operator") && html`<a class="tool clone" href=${link(`new?from=${run.run_id}`)} title="A new run with this plan, to be changed"><${Icon} name="copy" />Clone</a>`}
      ${may("operator") && COMMANDS[run.status]?.filter((verb) => verb === "stop" || run.source === "devices").map((verb) => html`<${RunCommand} key=${verb} id=${run.run_id} verb=${verb} gone=${gone && run.source === "devices"} />`)}
      ${may("operator") && html`<${Actions} run=${run} gone=${gone} />`}
    </div>
    <p class="sentence">${run.sentence}</p>
    ${run.warning && html`<div class="notice bad" role="alert"><${Icon} name="alert" /><div><strong>${run.warning}</strong></div></div>`}
    ${run.notes.map((said) => html`<div class="notice said"><${Icon} name="alert" /><div>${said}</div></div>`)}
    <${Progress} run=${run} open=${open} now=${now} />
    ${rounds.length || ENDED.includes(run.status) ? html`<dl class="figures">
      ${measures(run) && figure("accuracy" in run.metrics || !("loss" in run.metrics) ? "accuracy" : "loss", run)}
      ${"accuracy" in run.metrics && figure("loss", run)}
      <div><dt>rounds</dt><dd><${Made} run=${run} /></dd></div>
      <div><dt>${run.finished_at ? (run.extended ? "first start to last end" : "start to end") : "since its start"}</dt><dd>${took === null ? "–" : seconds(took)}</dd></div>
      ${isSampled(run) ? null : html`
      <div><dt>sent up, payload</dt><dd>${times(run.dense_up, run.payload_up)}</dd></div>
      <div><dt>sent up, wire</dt><dd>${run.wire_up !== null && run.wire_up < run.payload_up ? wired(run.wire_up, run.payload_up) : times(run.dense_up, run.wire_up)}</dd></div>
      <div><dt>aggregated</dt><dd>${count(run.aggregated_count + run.late)}<small> update${run.aggregated_count + run.late === 1 ? "" : "s"}</small></dd></div>
      <div class=${run.late + run.dropped + run.failed ? "" : "quiet"}><dt>late · dropped · failed</dt><dd>${run.late} · ${run.dropped} · ${run.failed}</dd></div>`}
    </dl>` : null}`;
};

const times = (dense, sent) => {
  if (!sent || !dense) return "–";
  return sent < dense ? html`${ratio(dense, sent)}<small> less</small>` : html`${ratio(sent, dense)}<small> dense</small>`;
};

const figure = (name, run) => html`
  <div title=${run.plan.run.metric === name && run.best_value !== null ? `best so far: ${metric(run.best_value)}` : ""}>
    <dt>${name}</dt><dd>${metric(decisive(run)[name])}</dd></div>`;

const Progress = ({ run, open, now }) => {
  const share = Math.min(100, (100 * run.version) / Math.max(1, run.rounds_total));
  const answered = open ? `${open.aggregated_count + open.arrived + open.dropped} of ${open.selected} answered, ${open.failed ? `${open.failed} failed, ` : ""}` : "";
  const since = open ? `open for ${seconds(Math.max(0, now - open.opened_at))}` : "";
  const buffered = run.plan.cohort?.mode === "buffered";
  const left = run.status === "running" && run.seconds && run.rounds_closed ? (Math.max(0, run.rounds_total - run.version) * run.seconds) / run.rounds_closed : 0;
  const said = !open ? "" : buffered ? `round ${open.round}: ${since}` : `round ${open.round}: ${answered}${since}, deadline ${seconds(open.deadline_s)}`;
  return html`
    <div class="progress">
      <div class="meter" role="progressbar" aria-label="Rounds made" aria-valuenow=${run.version} aria-valuemin="0" aria-valuemax=${run.rounds_total}>
        <i style=${{ width: `${share}%` }}></i></div>
      <span class="faint">${[said, left && `about ${seconds(left)} left`].filter(Boolean).join("; ")}</span>
    </div>`;
};

/** Without an aggregator nobody carries a command out. */
const NOBODY = "The aggregator is not running";

/** A second click confirms a stop, because it is final. */
const RunCommand = ({ id, verb, gone }) => {
  const [{ state, error }, setNow] = useState({ state: "idle", error: null });
  const setState = (next) => setNow({ state: next, error: null });
  const keep = useRef(null);
  useEffect(() => state === "confirm" && keep.current?.focus(), [state]);
  const name = verb[0].toUpperCase() + verb.slice(1);
  const command = async () => {
    setState("sent");
    await post(`runs/${id}/${verb}`).then(() => setState("left"), (refused) => setNow({ state: "idle", error: refused }));
  };
  if (state === "left") return html`<span class="faint" role="status">command to ${verb} sent</span>`;
  if (state === "confirm" || (state === "sent" && verb === "stop")) {
    return html`<span class="confirm" role="group" aria-label="Stop this run?">Stop this run?
      <button type="button" class="tool bad" disabled=${state === "sent"} onClick=${command}>Stop</button>
      <button type="button" class="tool" ref=${keep} onClick=${() => setState("idle")}>Keep</button></span>`;
  }
  return html`${error && html`<${Refusal} error=${error} />`}<button type="button" class="tool" disabled=${gone || state === "sent"} title=${gone ? NOBODY : ""} onClick=${verb === "stop" ? () => setState("confirm") : command}><${Icon} name=${verb === "resume" ? "play" : verb} />${name}</button>`;
};

const USED = /^waiting for devices that .* uses?:/; // by other runs

const Waiting = ({ run, devices, service, gone }) => html`
  <section class="nothing" aria-labelledby="waiting-title">
    <h2 id="waiting-title">${run.status === "waiting" ? "Waiting for devices" : "Not begun yet"}</h2>
    ${run.status === "waiting" && (USED.test(run.status_text) ? html`<p>The next round opens as soon as enough of them are free. <code>[run] priority</code> says how the devices' time is shared.</p>`
    : html`<p>The next round opens as soon as they are here. On a device, with the code of <code>${run.task}</code> installed:</p>
      <${Command} text=${joinCommand(service, run.task)} />`)}
    ${devices?.length ? html`<${DeviceTable} devices=${devices} task=${run.task} gone=${gone} />` : null}
  </section>`;

/** What was estimated when the run was started, beside what it was. Bytes are those of the newest rounds: the sums of the run have evaluations too. */
const Estimated = ({ run, rounds }) => {
  const sum = (...names) => names.reduce((all, name) => rounds.reduce((some, round) => some + round[name], all), 0);
  const replies = sum("aggregated_count", "late", "dropped");
  const mean = (total, count) => (count ? total / count : null);
  const rows = [
    ["up, a client and round", run.estimate.up_bytes, mean(sum("payload_up"), replies), bytes],
    ["down, a client and round", run.estimate.down_bytes, mean(sum("payload_down"), replies + sum("failed")), bytes],
    ["a round", run.estimate.round_s, mean(run.seconds, run.rounds_closed), seconds],
    ["all rounds", run.estimate.run_s, run.seconds, seconds],
  ];
  return html`
    <${Section} id="estimate" title="Estimated and actual" aside="as it was known when the run was started" json=${link(`api/v1/runs/${run.run_id}`)}>
      <${Table} label="Estimated and actual cost" rows=${rows} keyOf=${([name]) => name} columns=${[
        { title: "Payload and time", cell: ([name]) => name },
        { title: "Estimated", right: true, cell: ([, before, , show]) => (before === null || before === undefined ? html`<span class="faint">was not known</span>` : show(before)) },
        { title: "Actual", right: true, cell: ([, , after, show]) => html`<b>${after === null ? "–" : show(after)}</b>` },
      ]} />
    <//>`;
};

const Plan = ({ run }) => html`
  <${Section} id="plan" title="Plan" aside=${html`task <b>${run.task}</b>${run.task_version ? ` ${run.task_version}` : ""}, ${plural(run.size, "parameter")} (${bytes(run.size * 4)} dense), made ${moment(run.created_at)}`}>
    <details class="more"><summary>All keys, and the digests that bind them</summary>
      <p class="faint">The store keeps the resolved plan. <i>plan</i>: the value is not the default, whether the file, <code>--set</code> or a clone set it. <i>default</i>: it equals the default. <i>derived</i>: the plan left it out, and other keys decide it.</p>
      <div class="keys">
        ${Object.entries(run.plan).map(([section, keys]) => [section, given(keys)]).filter(([, keys]) => keys.length).map(([section, keys]) => html`
          <div><h3>[${section}]</h3>
            <dl>${keys.map(([key, value]) => html`<div class=${run.origins[section]?.[key] === "default" ? "" : "set"}><dt>${key}</dt><dd>${typeof value === "object" ? JSON.stringify(value) : String(value)}<small>${run.origins[section]?.[key]}</small></dd></div>`)}</dl>
          </div>`)}
        <div><h3>digests</h3><dl>
          <div><dt>layout</dt><dd class="hex">${run.layout_digest}</dd></div>
          <div><dt>model ${run.version}</dt><dd class="hex">${run.model_digest || "–"}</dd></div></dl></div>
      </div>
    </details>
  <//>`;

/** The keys of a section that have a value. */
const given = (keys) => (keys && typeof keys === "object" ? Object.entries(keys).filter(([, value]) => value !== null) : []);
