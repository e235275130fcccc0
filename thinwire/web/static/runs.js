// All runs as a table that is searched, filtered and sorted, and the devices that make them.
import { get } from "./api.js";
import { home, html, link, may, STATUSES, useEffect, useRef, useState } from "./dom.js";
import { DeviceTable, TagList, isOnline, joinCommand } from "./devices.js";
import { ago, bytes, count, metric, plural, seconds, when } from "./format.js";
import { Gone } from "./frame.js";
import { serverNow, useReading } from "./live.js";
import { Command, Heading, Icon, Made, Pager, Refusal, Section, Status } from "./parts.js";
import { useQuery } from "./query.js";

const PAGE = 50;
const TYPED_MS = 250; // without a letter, until what was typed is searched
export const MAX_COMPARED = 8;

const read = async (query) => {
  const [list, groups, devices, service] = await Promise.all([get(`run-list?${query}`), get("groups"), get("devices"), get("service")]);
  return { list, groups, devices, service };
};

export const RunsPage = ({ news }) => {
  const [q, setQ] = useQuery("q", "");
  const [status, setStatus] = useQuery("status", "");
  const [archived, setArchived] = useQuery("archived", "");
  const [sort, setSort] = useQuery("sort", "number");
  const [up, setUp] = useQuery("up", "");
  const [page, setPage] = useQuery("page", "1");
  const [pick, setPick] = useQuery("pick", "");
  const first = Math.max(0, (Number.parseInt(page, 10) || 1) - 1) * PAGE;
  const chosen = status ? status.split(",").filter((one) => STATUSES.includes(one)) : [];
  const matching = new URLSearchParams({ q, sort, descending: String(!up), archived: String(Boolean(archived)) });
  for (const one of chosen) matching.append("status", one);
  const query = `${matching}&first=${first}&count=${PAGE}`;
  const { data, error } = useReading(() => read(query), news, [query, news.heard]);
  useEffect(() => {
    document.title = "Runs · Thinwire";
  }, []);
  if (!data) return error && news.reached ? html`<${Refusal} error=${error} />` : html`<${Gone} news=${news} matters /><p class="loading">Reading…</p>`;
  const { list, groups, devices, service } = data;
  const all = Object.values(list.statuses).reduce((sum, n) => sum + n, 0);
  const gone = news.aggregator === "gone" || !news.reached;
  const approved = devices.filter((d) => d.standing === "approved");
  const online = gone ? UNKNOWN : `${approved.filter((d) => isOnline(d, gone)).length} of ${plural(approved.length, "device")} online`;
  const narrow = (set) => (value) => {
    set(value);
    setPage("1");
  };
  const order = (key, falling) => {
    const turned = key === sort ? !up : !falling;
    setSort(key);
    setUp(turned ? "1" : "");
    setPage("1");
  };
  const picked = pick ? pick.split(",") : [];
  const toggle = (id) => setPick((picked.includes(id) ? picked.filter((one) => one !== id) : [...picked, id]).join(","));
  return html`
    <${Gone} news=${news} matters error=${error} />
    <div class="head"><h1>Runs</h1>
      <p class="sentence small">${archived ? `${plural(all, "run")} in the archive.` : summary(list.statuses, all, devices, online)}</p>
      ${may("operator") && html`<a class="tool go" href=${link("new")}><${Icon} name="plus" />New run</a>`}</div>
    ${all || archived ? html`
      <${Section} id="runs" title=${archived ? "Archived runs" : "All runs"} aside=${html`<span role="status">${found(list, q, chosen)}</span>`} csv=${link(`api/v1/run-list.csv?${matching}`)} json=${link(`api/v1/run-list?${query}`)}>
        <div class="filter">
          <${Search} value=${q} choose=${narrow(setQ)} />
          <${StatusFilter} counts=${list.statuses} chosen=${chosen} choose=${(next) => narrow(setStatus)(next.join(","))} />
          <label class=${archived ? "chip chosen" : "chip"}><input type="checkbox" checked=${Boolean(archived)} onChange=${() => narrow(setArchived)(archived ? "" : "1")} /> archive</label>
          <${Picked} picked=${picked} clear=${() => setPick("")} />
        </div>
        <${RunTable} runs=${list.runs} sort=${sort} up=${Boolean(up)} order=${order} picked=${picked} toggle=${toggle} />
        ${list.total > PAGE && html`<${Pager} label="Pages of runs" said=${`${count(first + 1)} to ${count(Math.min(first + PAGE, list.total))} of ${count(list.total)}`} words=${["Previous", "Next"]}
          before=${first > 0 && (() => setPage(String(first / PAGE)))} after=${first + PAGE < list.total && (() => setPage(String(first / PAGE + 2)))} />`}
      <//>`
      : html`<${Nothing} service=${service} devices=${devices} />`}
    ${groups.length > 0 && html`<${Section} id="sweeps" title="Simulated groups" json=${link("api/v1/groups")}>
      <ul aria-label="Groups of simulated runs, the latest first">${groups.map((g) => html`<li key=${g.name}>
        <b>${g.name}</b> ${g.task}: ${g.done} of ${plural(g.runs, "run")}, the last ${ago(g.at, serverNow())};${" "}
        <code>thinwire runs compare --group ${g.name}${home}</code></li>`)}</ul>
    <//>`}
    <${Section} id="devices" title="Devices" aside=${devices.length ? html`${online} · <a href=${link("devices")}>all about them</a>` : ""}
      csv=${devices.length ? link("api/v1/devices.csv") : ""} json=${devices.length ? link("api/v1/devices") : ""}>
      ${devices.length ? html`<${DeviceTable} devices=${devices} gone=${gone} />` : html`<p class="faint">No device has come yet.</p>`}
      <details class="more"><summary>Add a device</summary>
        <p>On the device, with the task's code installed there:</p>
        <${Command} text=${joinCommand(service)} /></details>
    <//>`;
};

const UNKNOWN = "who is online is unknown, aggregator offline";

const summary = (statuses, all, devices, online) => {
  const now = (statuses.running ?? 0) + (statuses.waiting ?? 0);
  if (!all) return "Nothing yet.";
  const said = [now ? `${plural(now, "run")} going` : "No run is going", `${plural(all, "run")} in all`];
  return `${said.join(", ")}${devices.length ? `; ${online}` : ""}.`;
};

const found = (list, q, chosen) => {
  if (!list.total) return "no run matches";
  return `${plural(list.total, "run")}${q || chosen.length ? " found" : ""}`;
};

const Search = ({ value, choose }) => {
  const [typed, setTyped] = useState(value);
  const timer = useRef(0);
  useEffect(() => () => clearTimeout(timer.current), []);
  const type = (text) => {
    setTyped(text);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => choose(text.trim()), TYPED_MS);
  };
  return html`
    <label class="search"><${Icon} name="find" /><span class="unseen">Search runs by id, name, tag, task or status</span>
      <input type="search" placeholder="id, name, tag, task or status" maxlength="100" value=${typed} onInput=${(event) => type(event.target.value)} /></label>`;
};

const StatusFilter = ({ counts, chosen, choose }) => html`
  <fieldset class="chips"><legend class="unseen">Filter by status</legend>
    ${STATUSES.filter((one) => counts[one] || chosen.includes(one)).map((one) => html`
      <label key=${one} class=${chosen.includes(one) ? "chip chosen" : "chip"}>
        <input type="checkbox" checked=${chosen.includes(one)} onChange=${() => choose(chosen.includes(one) ? chosen.filter((other) => other !== one) : [...chosen, one])} />
        ${one} <small>${count(counts[one] ?? 0)}</small></label>`)}
  </fieldset>`;

/** Takes its place also while nothing is picked, so that the table does not move. */
const Picked = ({ picked, clear }) => html`
  <div class="picked" role="group" aria-label="Comparison">
    ${picked.length > 1 ? html`<a class="tool go" href=${link(`compare?runs=${picked.join(",")}`)}>Compare ${picked.length} runs</a>`
      : html`<button type="button" class="tool" disabled>${picked.length ? "Pick one more" : "Compare"}</button>`}
    <button type="button" class="tool" disabled=${!picked.length} onClick=${clear}>Clear</button>
  </div>`;

/** {key, title, right, falling: what a first click sorts from the largest, cell(run)}: one line of these is a column. */
const COLUMNS = [
  { key: "status", title: "Status", cell: (r) => html`<${Status} status=${r.status} />` },
  { key: "task", title: "Task", cell: (r) => html`<span>${r.task}${r.source === "sim" ? html`<small class="below">simulated</small>` : ""}</span>` },
  { key: "rounds", title: "Rounds", right: true, falling: true, cell: (r) => html`<${Made} run=${r} />` },
  { key: "best", title: "Best", right: true, falling: true, cell: (r) => (r.best === null ? "–" : html`<span>${metric(r.best)}<small class="below">${r.metric}</small></span>`) },
  { key: "payload_up", title: "Payload up", right: true, falling: true, cell: (r) => bytes(r.payload_up) },
  { key: "seconds", title: "Start to end", right: true, falling: true, cell: (r) => (r.seconds === null && r.started_at && !r.finished_at ? seconds(Math.max(0, serverNow() - r.started_at)) : seconds(r.seconds)) },
  { key: "started", title: "Started", right: true, falling: true, cell: (r) => when(r.started_at, serverNow()) },
  { key: "disk", title: "Disk", right: true, falling: true, cell: (r) => bytes(r.disk_bytes) },
];

const RunTable = ({ runs, sort, up, order, picked, toggle }) => html`
  <div class="scroll tall" tabindex="0" role="region" aria-label="Table of runs">
    <table class="stack runs-table" role="table">
      <thead role="rowgroup"><tr role="row">
        <th scope="col" role="columnheader"><span class="unseen">Compare</span></th>
        <${Heading} column=${{ key: "run_id", title: "Run" }} ...${{ sort, up, order }} />
        ${COLUMNS.map((column) => html`<${Heading} key=${column.key} column=${column} sort=${sort} up=${up} order=${order} />`)}
      </tr></thead>
      <tbody role="rowgroup">${runs.map((run) => html`
        <tr role="row" key=${run.run_id} class=${picked.includes(run.run_id) ? "run picked-row" : "run"}>
          <td role="cell" class="pick"><label><input type="checkbox" checked=${picked.includes(run.run_id)} disabled=${picked.length >= MAX_COMPARED && !picked.includes(run.run_id)}
            onChange=${() => toggle(run.run_id)} /><span class="unseen">Compare ${run.run_id}</span></label></td>
          <th scope="row" role="rowheader"><a href=${link(`runs/${run.run_id}`)}>${run.run_id}</a>${run.name && html` <b>${run.name}</b>`}
            <${TagList} tags=${run.tags} />
            <span class="said" title=${run.sentence}>${run.sentence}</span>
            ${(run.status === "running" || run.status === "waiting") && html`<span class="meter" aria-hidden="true"><i style=${{ width: `${share(run)}%` }}></i></span>`}</th>
          ${COLUMNS.map((column) => html`<td role="cell" key=${column.key} data-label=${column.title} class=${column.right ? "right" : ""}>${column.cell(run)}</td>`)}
        </tr>`)}
        ${!runs.length && html`<tr role="row"><td role="cell" class="none" colspan=${COLUMNS.length + 2}>no run matches</td></tr>`}
      </tbody>
    </table>
  </div>`;

const share = (run) => Math.min(100, (100 * run.version) / Math.max(1, run.rounds_total));

const Nothing = ({ service, devices }) => html`
  <section class="nothing" aria-labelledby="nothing-title">
    <h2 id="nothing-title">Nothing yet</h2>
    <p>A run begins with a plan: <a href=${link("new")}>make one here</a>, or type, from the folder that holds yours:</p>
    <${Command} text=${`thinwire run plan.toml${home}`} />
    ${!devices.length && html`<p>It waits until devices are there. Each is started with:</p>
      <${Command} text=${joinCommand(service)} />`}
    <p class="faint">No plan at hand? <code>thinwire init DIR</code> writes one with a task beside it, and <code>thinwire demo</code> shows a whole run.</p>
  </section>`;
