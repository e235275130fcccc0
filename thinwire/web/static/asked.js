// What each client of a round was asked for, and why, where that was decided for it alone: its codec, its work, its place.
import { html } from "./dom.js";
import { seconds } from "./format.js";
import { Table } from "./parts.js";

export const AskedFor = ({ round }) => {
  const rows = round.updates.filter((u) => u.codec_reason || u.work_reason || u.asked_why);
  if (!rows.length) return null;
  const has = (name) => rows.some((u) => u[name]);
  return html`
    <details class="more"><summary>What each was asked for, and why</summary>
      <${Table} label=${`What each client of round ${round.round} was asked for`} rows=${rows} stacks keyOf=${(u) => u.ask_id} columns=${[
    { title: "Client", cell: (u) => u.device },
    ...(has("codec_reason") ? [{ title: "Codec", cell: (u) => html`<${Codec} update=${u} />` }] : []),
    ...(has("work_reason") ? [{ title: "Work", cell: (u) => u.work_reason || "–" }] : []),
    ...(has("asked_why") ? [{ title: "Asked", cell: (u) => (u.asked_why ? since(u, round) : "at the opening") }] : []),
  ]} />
    </details>`;
};

/** Its codec, then why it and no other: the reason begins with the codec. */
const Codec = ({ update }) => {
  const begins = `${update.codec}: `;
  if (!update.codec_reason.startsWith(begins)) return html`<span><code>${update.codec}</code>${update.codec_reason && `: ${update.codec_reason}`}</span>`;
  return html`<span><code>${update.codec}</code>: ${update.codec_reason.slice(begins.length)}</span>`;
};

const since = (update, round) => {
  const place = update.instead_of ? ` instead of ${update.instead_of}` : "";
  return `after ${seconds(Math.max(0, update.asked_at - (round.turn_at ?? round.opened_at)))}${place}: ${update.asked_why}`;
};
