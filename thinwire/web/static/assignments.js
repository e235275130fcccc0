// The assignment of each client of a round, and why, where that was decided for it alone: its codec, its work, its place.
import { html } from "./dom.js";
import { seconds } from "./format.js";
import { Table } from "./parts.js";

const MOST = 200; // rows that a browser draws at once; the CSV of the round has all

export const AssignedFor = ({ round }) => {
  const rows = round.updates.filter((u) => u.codec_reason || u.work_reason || u.selection_reason);
  if (!rows.length) return null;
  const has = (name) => rows.some((u) => u[name]);
  return html`
    <details class="more"><summary>The assignment of each, and why</summary>
      <${Table} label=${`Assignments of the clients of round ${round.round}`} rows=${rows.slice(0, MOST)} stacks keyOf=${(u) => u.assignment_id} columns=${[
    { title: "Client", cell: (u) => u.device },
    ...(has("codec_reason") ? [{ title: "Codec", cell: (u) => html`<${Codec} update=${u} />` }] : []),
    ...(has("work_reason") ? [{ title: "Work", cell: (u) => u.work_reason || "–" }] : []),
    ...(has("selection_reason") ? [{ title: "Assigned", cell: (u) => (u.selection_reason ? since(u, round) : "at the opening") }] : []),
  ]} />
    </details>`;
};

/** Its codec, then why it and no other. */
const Codec = ({ update }) => html`<span><code>${update.codec}</code>${update.codec_reason && `: ${update.codec_reason}`}</span>`;

const since = (update, round) => {
  const place = update.instead_of ? ` instead of ${update.instead_of}` : "";
  return `after ${seconds(Math.max(0, update.assigned_at - (round.turn_at ?? round.opened_at)))}${place}: ${update.selection_reason}`;
};
