// Secure aggregation: what it protects, the phases of a round with who dropped out in which, and the sum's numbers.
import { DROPS, html } from "./dom.js";
import { bytes, count, seconds } from "./format.js";
import { useTime } from "./live.js";
import { Section, Table } from "./parts.js";

export const Protection = ({ said }) => html`
  <${Section} id="protection" title="Secure aggregation">
    <p class="why">${said.sentence}</p>
    ${said.assumes.length > 0 && html`<h3>Assumptions</h3><ul class="plain">${said.assumes.map((one) => html`<li>${one}</li>`)}</ul>`}
    <p class="closing faint">${said.not_protected}</p>
  <//>`;

/** The phases of a round on its axis of time; the open one grows. */
export const Phases = ({ round, still }) => {
  const now = useTime(!round.reason, still);
  const since = round.turn_at ?? round.opened_at;
  const length = Math.max(0.001, round.reason ? round.seconds : now - since) - round.missed_s;
  const took = (p) => p.seconds ?? Math.max(0, length - p.begin_s);
  const at = (s) => Math.max(0, Math.min(100, (100 * s) / length));
  const total = round.secure_sum;
  return html`
    <div class="phases">
      <h3>Phases</h3>
      <${Table} label=${`Phases of round ${round.round}`} rows=${round.phases} keyOf=${(p) => p.phase} stacks columns=${[
        { title: "Phase", cell: (p) => html`${p.phase}<small class="below">${p.waits_for}</small>` },
        { title: "Time", cell: (p) => html`<span class="phase-track" aria-hidden="true"><i class=${p.is_closed ? "" : "open"} style=${{ left: `${at(p.begin_s)}%`, width: `${at(took(p))}%` }}></i></span>` },
        { title: "Lasted", right: true, cell: (p) => (p.seconds === null ? html`<span>open for ${seconds(took(p))}</span>` : seconds(p.seconds)) },
        { title: "Clients", right: true, cell: (p) => p.received ?? "–" },
        { title: "Bytes", right: true, cell: (p) => bytes(p.received_bytes) },
        { title: "Dropped out", cell: (p) => html`<span>${Object.entries(p.dropped).map(([device, why], i) => html`${i ? ", " : ""}<b>${device}</b>${why && ` (${DROPS[why] ?? why})`}`)}${Object.keys(p.dropped).length ? "" : "–"}</span>` },
      ]} />
      ${total.survivors && html`<p class="closing faint">The sum has the updates of ${count(total.survivors)} clients, with the weight ${count(total.weight)} in all. The mean has the norm ${figure(total.norm)}; the clip was ${figure(total.clip)}, and is ${figure(total.next_clip)} in the next round. Removing the masks took ${seconds(total.unmask_s)}.</p>`}
    </div>`;
};

const figure = (value) => Number(value.toPrecision(3));

/** Why cells of a table about single clients are empty. */
export const NotKnown = ({ rows, columns }) => {
  const said = rows.find((row) => row.not_known)?.not_known;
  return said ? html`<p class="note">A dash under ${columns} means ${said}.</p>` : null;
};
