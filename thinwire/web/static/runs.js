// All runs, newest first, and the devices that make them.
import { get } from "./api.js";
import { home, html, link, useEffect } from "./dom.js";
import { DeviceTable, joinCommand, presence } from "./devices.js";
import { ago, bytes, decisive, metric, plural, ratio } from "./format.js";
import { Gone } from "./frame.js";
import { serverNow, useReading } from "./live.js";
import { Command, Refusal, Section, Status } from "./parts.js";

const read = async () => {
  const [runs, groups, devices, service] = await Promise.all([get("runs"), get("groups"), get("devices"), get("service")]);
  return { runs, groups, devices, service };
};

export const RunsPage = ({ news }) => {
  const { data, error } = useReading(read, news, [news.heard]);
  useEffect(() => {
    document.title = "Runs · Thinwire";
  }, []);
  if (!data) return error && news.reached ? html`<${Refusal} error=${error} />` : html`<${Gone} news=${news} matters /><p class="loading">Reading…</p>`;
  const { runs, groups, devices, service } = data;
  const gone = news.aggregator === "gone" || !news.reached;
  const online = gone ? UNKNOWN : `${devices.filter((d) => presence(d, gone) === "online").length} of ${plural(devices.length, "device")} online`;
  return html`
    <${Gone} news=${news} matters />
    <div class="head"><h1>Runs</h1>
      <p class="sentence small">${summary(runs, devices, online)}</p></div>
    ${runs.length ? html`<ol class="runs" aria-label="Runs, newest first">${runs.map((run) => html`<${RunLine} key=${run.run_id} run=${run} />`)}</ol>`
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

const going = (run) => run.status === "running" || run.status === "waiting";

const summary = (runs, devices, online) => {
  const now = runs.filter(going).length;
  if (!runs.length) return "Nothing yet.";
  const said = [now ? `${plural(now, "run")} going` : "No run is going", `${plural(runs.length, "run")} in all`];
  return `${said.join(", ")}${devices.length ? `; ${online}` : ""}.`;
};

const RunLine = ({ run }) => {
  const [name, value] = headline(decisive(run));
  return html`
    <li class="run">
      <a href=${link(`runs/${run.run_id}`)}>${run.run_id}</a>
      <${Status} status=${run.status} />
      <span class="said">${run.sentence}</span>
      ${going(run) && html`<span class="meter" aria-hidden="true"><i style=${{ width: `${share(run)}%` }}></i></span>`}
      <dl>
        <div><dt>${name}</dt><dd>${value}</dd></div>
        <div><dt>sent up</dt><dd>${bytes(run.payload_up)}</dd></div>
        <div><dt>smaller by</dt><dd>${ratio(run.dense_up, run.payload_up)}</dd></div>
        <div><dt>${run.source === "sim" ? "simulated" : "made"}</dt><dd>${ago(run.created_at, serverNow())}</dd></div>
      </dl>
    </li>`;
};

const share = (run) => Math.min(100, (100 * run.version) / Math.max(1, run.rounds_total));

const headline = (metrics) => {
  const name = ["accuracy", "loss", ...Object.keys(metrics)].find((n) => n in metrics);
  return name ? [name, metric(metrics[name])] : ["accuracy", "–"];
};

const Nothing = ({ service, devices }) => html`
  <section class="nothing" aria-labelledby="nothing-title">
    <h2 id="nothing-title">Nothing yet</h2>
    <p>A run begins with a plan. From the folder that holds yours:</p>
    <${Command} text=${`thinwire run plan.toml${home}`} />
    ${!devices.length && html`<p>It waits until devices are there. Each is started with:</p>
      <${Command} text=${joinCommand(service)} />`}
    <p class="faint">No plan at hand? <code>thinwire init DIR</code> writes one with a task beside it, and <code>thinwire demo</code> shows a whole run.</p>
  </section>`;
