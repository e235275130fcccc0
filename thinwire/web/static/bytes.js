// What was sent, beside what the same exchange takes in plain float32.
import { html, link } from "./dom.js";
import { bytes, isSampled, ratio, wired } from "./format.js";
import { RoundTable } from "./roundtable.js";
import { Section } from "./parts.js";
import { useTable } from "./query.js";

export const Bytes = ({ run, opened, rounds, news }) => {
  const [table, setTable] = useTable("bytes");
  if (isSampled(run)) return html`
    <${Section} id="bytes" title="Bytes">
      <p class="note">Not shown: with <code>[privacy] sampling_rate</code> the bytes would tell how many clients were sampled.</p>
    <//>`;
  return html`
    <${Section} id="bytes" title="Bytes" aside="against dense float32" table=${table} setTable=${setTable}
      csv=${link(`api/v1/runs/${run.run_id}/rounds.csv`)} json=${link(`api/v1/runs/${run.run_id}`)}>
      ${table ? html`<${Numbers} run=${run} opened=${opened} rounds=${rounds} news=${news} />` : html`
        <${Way} title="Up, from the devices" dense=${run.dense_up} payload=${run.payload_up} wire=${run.wire_up} />
        <${Way} title="Down, to the devices" dense=${run.dense_down} payload=${run.payload_down} wire=${run.wire_down} />
        <p class="note">Payload: the ${run.protection ? "masked updates, with keys, shares and signatures" : "frames"}. ${run.source === "sim" ? "A simulation has no wire." : "Wire: read from and written to the devices' sockets, HTTP included, counted for each assignment with its update."} The evaluation of the last model counts here, and in no round.</p>`}
    <//>`;
};

const Way = ({ title, dense, payload, wire }) => {
  const most = Math.max(dense, payload, wire ?? 0, 1);
  return html`
    <div class="way">
      <h3>${title}</h3>
      <${Bar} name="dense" value=${dense} most=${most} tone="dense" />
      <${Bar} name="payload" value=${payload} most=${most} tone="payload" times=${ratio(dense, payload)} />
      ${wire === null ? null : html`<${Bar} name="wire" value=${wire} most=${most} tone="wire" said=${wired(wire, payload)} times=${wire < payload ? "" : ratio(dense, wire)} />`}
    </div>`;
};

const Bar = ({ name, value, most, tone, times, said }) => html`
  <div class="bar">
    <span>${name}</span>
    <span class="track"><i class=${tone} style=${{ width: `${value ? Math.max(0.6, (100 * value) / most) : 0}%` }}></i></span>
    <span class="value">${said ?? bytes(value)}</span>
    <span class="times">${times ? html`<b>${times}</b>` : ""}</span>
  </div>`;

const Numbers = ({ run, opened, rounds, news }) => html`
  <${RoundTable} label="Bytes of each round" run=${run} opened=${opened} rounds=${rounds} news=${news} columns=${[
    { title: "Round", cell: (r) => r.round },
    { title: "Payload up", right: true, cell: (r) => bytes(r.payload_up) },
    { title: "Wire up", right: true, cell: (r) => wired(r.wire_up, r.payload_up) },
    { title: "Payload down", right: true, cell: (r) => bytes(r.payload_down) },
    { title: "Wire down", right: true, cell: (r) => wired(r.wire_down, r.payload_down) },
  ]} />`;
