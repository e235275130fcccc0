// Who takes part, what they do now and the outcomes of their updates.
import { LastOutcome } from "./devices.js";
import { html, link } from "./dom.js";
import { ago, bytes, count, share, wired } from "./format.js";
import { serverNow } from "./live.js";
import { Icon, Pager, Section, Table } from "./parts.js";
import { useQuery } from "./query.js";
import { NotKnown } from "./secure.js";

const PAGE = 50; // as the server has it
const RISING = ["device", "state", "last_outcome"]; // what a first click sorts from its beginning
const FALLING = ["examples", "selected", "aggregated", "late", "dropped", "failed", "residual_ratio", "payload_up", "wire_up", "payload_down", "wire_down"];

/** Which page of the clients is shown, and in which order, as the address has it; `query` requests them. */
export const useClients = () => {
  const [by, setBy] = useQuery("clients", "device");
  const [turned, setTurned] = useQuery("turned", "");
  const [page, setPage] = useQuery("page", "1");
  const sort = [...RISING, ...FALLING].includes(by) ? by : "device";
  const descending = FALLING.includes(sort) !== Boolean(turned);
  const order = (key) => {
    setTurned(key === sort && !turned ? "1" : "");
    setBy(key);
    setPage("1");
  };
  const ordered = `sort=${sort}&descending=${descending}`;
  const first = Math.max(0, (Number.parseInt(page, 10) || 1) - 1) * PAGE;
  return { sort, up: !descending, order, ordered, query: `client=${first}&${ordered}`, turn: (place) => setPage(String(place / PAGE + 1)) };
};

const STATES = {
  working: ["is-working", "play"],
  arrived: ["is-working", "dots"],
  idle: ["is-idle", "check"],
  offline: ["is-failed", "cross"],
  "not-selected": ["is-away", "dash"],
};

const State = ({ client }) => {
  const [tone, icon] = STATES[client.state] || STATES.idle;
  const since = client.state === "offline" && client.since && html`<small class="below tight">last seen ${ago(client.since, serverNow())}</small>`;
  return html`<span class=${`outcome ${tone}`}><${Icon} name=${icon} /><span>${client.state_text}${since}</span></span>`;
};

export const Clients = ({ run, page, shown }) => {
  const { clients, first, total } = page;
  const { ordered, query, turn, ...sorted } = shown;
  const feeds = clients.some((c) => c.residual_ratio); // without feedback it is 0
  const simulated = clients.every((c) => c.wire_up === null && c.wire_down === null);
  return html`
    <${Section} id="clients" title="Clients" aside=${taking(page)}
      csv=${link(`api/v1/runs/${run.run_id}/clients.csv?${ordered}`)} json=${link(`api/v1/runs/${run.run_id}/clients?${query}`)}>
      <${Table} label="Table of clients" rows=${clients} stacks="pairs" keyOf=${(c) => c.device} sorted=${sorted} columns=${[
        { key: "device", title: "Client", cell: (c) => (run.source === "devices" ? html`<a href=${link(`devices/${c.device}`)}>${c.device}</a>` : c.device) },
        { key: "state", title: "Now", cell: (c) => html`<${State} client=${c} />` },
        { key: "last_outcome", title: "Last outcome", cell: (c) => html`<${LastOutcome} said=${c.last_outcome} />` },
        { key: "examples", title: "Examples", right: true, cell: (c) => (c.examples ? count(c.examples) : "–") },
        { key: "selected", title: "Assigned", right: true, cell: (c) => c.selected },
        { key: "aggregated", title: "Aggregated", right: true, cell: (c) => c.aggregated_count + c.late },
        { key: "late", title: "Late", right: true, cell: (c) => zero(c.late) },
        { key: "dropped", title: "Dropped", right: true, cell: (c) => zero(c.dropped) },
        { key: "failed", title: "Failed", right: true, cell: (c) => zero(c.failed) },
        ...(feeds ? [{ key: "residual_ratio", title: "Residual ÷ update", right: true, cell: (c) => share(c.residual_ratio) }] : []),
        { key: "payload_up", title: "Payload up", right: true, cell: (c) => bytes(c.payload_up) },
        ...(simulated ? [] : [{ key: "wire_up", title: "Wire up", right: true, cell: (c) => wired(c.wire_up, c.payload_up) }]),
        { key: "payload_down", title: "Payload down", right: true, cell: (c) => bytes(c.payload_down) },
        ...(simulated ? [] : [{ key: "wire_down", title: "Wire down", right: true, cell: (c) => wired(c.wire_down, c.payload_down) }]),
      ]} />
      ${total > PAGE && html`<${Pager} label="Pages of clients" said=${`Clients ${first + 1} to ${first + clients.length} of ${count(total)}`} before=${first > 0 && (() => turn(Math.max(0, first - PAGE)))} after=${first + PAGE < total && (() => turn(first + PAGE))} words=${["Before", "After"]} />`}
      <${NotKnown} rows=${clients} columns="Examples" />
    <//>`;
};

const taking = ({ selected, total }) => `${count(selected)} in this run${selected < total ? `, ${count(total - selected)} not selected so far` : ""}`;

const zero = (n) => (n ? n : html`<span class="faint">0</span>`);
