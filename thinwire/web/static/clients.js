// Who takes part, what they do now and the outcomes of their updates.
import { LastOutcome } from "./devices.js";
import { html, link } from "./dom.js";
import { ago, bytes, count, share, wired } from "./format.js";
import { serverNow } from "./live.js";
import { Icon, Section, Table } from "./parts.js";
import { NotKnown } from "./secure.js";

const STATES = {
  working: ["is-working", "play"],
  arrived: ["is-working", "dots"],
  idle: ["is-idle", "check"],
  offline: ["is-failed", "cross"],
  "not-selected": ["is-away", "dash"],
};

const State = ({ client }) => {
  const [tone, icon] = STATES[client.state] || STATES.idle;
  const since = client.state === "offline" && client.since ? `, last seen ${ago(client.since, serverNow())}` : "";
  return html`<span class=${`outcome ${tone}`}><${Icon} name=${icon} /><span>${client.state_text}${since}</span></span>`;
};

export const Clients = ({ run }) => {
  const feeds = run.clients.some((c) => c.residual_ratio !== null);
  const simulated = run.clients.every((c) => c.wire_up === null && c.wire_down === null);
  return html`
    <${Section} id="clients" title="Clients" aside=${taking(run.clients)}
      csv=${link(`api/runs/${run.run_id}/clients.csv`)} json=${link(`api/runs/${run.run_id}`)}>
      <${Table} label="Table of clients" rows=${run.clients} columns=${[
        { title: "Client", cell: (c) => c.device },
        { title: "Now", cell: (c) => html`<${State} client=${c} />` },
        { title: "Last outcome", cell: (c) => html`<${LastOutcome} said=${c.last_outcome} />` },
        { title: "Examples", right: true, cell: (c) => (c.examples ? count(c.examples) : "–") },
        { title: "Assigned", right: true, cell: (c) => c.selected },
        { title: "Aggregated", right: true, cell: (c) => c.aggregated_count + c.late },
        { title: "Late", right: true, cell: (c) => zero(c.late) },
        { title: "Dropped", right: true, cell: (c) => zero(c.dropped) },
        { title: "Failed", right: true, cell: (c) => zero(c.failed) },
        ...(feeds ? [{ title: "Residual ÷ change", right: true, cell: (c) => share(c.residual_ratio) }] : []),
        { title: "Payload up", right: true, cell: (c) => bytes(c.payload_up) },
        ...(simulated ? [] : [{ title: "Wire up", right: true, cell: (c) => wired(c.wire_up, c.payload_up) }]),
        { title: "Payload down", right: true, cell: (c) => bytes(c.payload_down) },
        ...(simulated ? [] : [{ title: "Wire down", right: true, cell: (c) => wired(c.wire_down, c.payload_down) }]),
      ]} />
      <${NotKnown} rows=${run.clients} columns="Examples" />
    <//>`;
};

const taking = (clients) => {
  const selected = clients.filter((c) => c.selected).length;
  return `${selected} in this run${selected < clients.length ? `, ${clients.length - selected} not selected so far` : ""}`;
};

const zero = (n) => (n ? n : html`<span class="faint">0</span>`);
