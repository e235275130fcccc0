// Who takes part, what they do now and the outcomes of their updates.
import { LastOutcome } from "./devices.js";
import { html, link } from "./dom.js";
import { ago, bytes, count, share, wired } from "./format.js";
import { serverNow } from "./live.js";
import { Pager } from "./lines.js";
import { Icon, Section, Table } from "./parts.js";
import { NotKnown } from "./secure.js";

const PAGE = 50; // as the server has it

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

export const Clients = ({ run, page, turn }) => {
  const { clients, first, total } = page;
  const feeds = clients.some((c) => c.residual_ratio !== null);
  const simulated = clients.every((c) => c.wire_up === null && c.wire_down === null);
  return html`
    <${Section} id="clients" title="Clients" aside=${taking(page)}
      csv=${link(`api/v1/runs/${run.run_id}/clients.csv`)} json=${link(`api/v1/runs/${run.run_id}`)}>
      <${Table} label="Table of clients" rows=${clients} keyOf=${(c) => c.device} columns=${[
        { title: "Client", cell: (c) => (run.source === "devices" ? html`<a href=${link(`devices/${c.device}`)}>${c.device}</a>` : c.device) },
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
      ${total > PAGE && html`<${Pager} label="Pages of clients" said=${`Clients ${first + 1} to ${first + clients.length} of ${count(total)}`} before=${first > 0 && (() => turn(Math.max(0, first - PAGE)))} after=${first + PAGE < total && (() => turn(first + PAGE))} words=${["Before", "After"]} />`}
      <${NotKnown} rows=${clients} columns="Examples" />
    <//>`;
};

const taking = ({ selected, total }) => `${count(selected)} in this run${selected < total ? `, ${count(total - selected)} not selected so far` : ""}`;

const zero = (n) => (n ? n : html`<span class="faint">0</span>`);
