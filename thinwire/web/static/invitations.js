// Invitations: who may still come with one, and the state of the others. They are made on the command line.
import { post } from "./api.js";
import { home, html, may, useState } from "./dom.js";
import { moment, plural } from "./format.js";
import { serverNow, useNow } from "./live.js";
import { Command, Icon, Section, Table } from "./parts.js";

const SHOWN = 5; // of twenty that were made at once; the others are a click away

const STATES = {
  open: ["is-working", "mail"],
  used: ["is-aggregated", "check"],
  expired: ["is-away", "clock"],
  withdrawn: ["is-away", "back"],
};

const state = (row) => (row.state === "open" && row.expires_at <= serverNow() ? "expired" : row.state);

const State = ({ row }) => {
  const now = state(row);
  const [tone, icon] = STATES[now];
  return html`<span class=${`outcome ${tone}`}><${Icon} name=${icon} /><span>${now === row.state ? row.sentence : "expired unused"}</span></span>`;
};

const COLUMNS = [
  { title: "Invitation", cell: (r) => `No. ${r.id}` },
  { title: "Good for", cell: (r) => (r.name ? html`the name <b>${r.name}</b>` : "any free name") },
  { title: "State", cell: (r) => html`<${State} row=${r} />` },
  { title: "Made", cell: (r) => html`${moment(r.created_at)} <span class="faint">by ${r.who}</span>` },
];

const Open = ({ label, rows }) => html`<${Table} label=${label} rows=${rows} stacks keyOf=${(r) => r.id} columns=${[...COLUMNS,
  { title: "Expires", cell: (r) => moment(r.expires_at) },
  ...(may("operator") ? [{ title: html`<span class="unseen">Withdraw</span>`, right: true, cell: (r) => html`<${Withdraw} id=${r.id} />` }] : [])]} />`;

export const Invitations = ({ rows, service }) => {
  useNow(true); // they expire by themselves
  const open = rows.filter((r) => state(r) === "open");
  const others = rows.filter((r) => state(r) !== "open");
  return html`
    <${Section} id="invitations" title="Invitations" aside=${open.length ? `${open.length} can still be used` : "none can be used"}>
      ${open.length ? html`<${Open} label="Open invitations" rows=${open.slice(0, SHOWN)} />` : null}
      ${open.length > SHOWN ? html`<details class="more"><summary>${plural(open.length - SHOWN, "other")} that can be used</summary>
        <${Open} label="Other open invitations" rows=${open.slice(SHOWN)} /></details>` : null}
      ${others.length ? html`<details class="more"><summary>${plural(others.length, "other")} not usable</summary>
        <${Table} label="Invitations that are not usable" rows=${others} stacks keyOf=${(r) => r.id} columns=${[...COLUMNS,
    { title: "Used", cell: (r) => (r.used_at ? moment(r.used_at) : "–") }]} /></details>` : null}
      <details class="more" open=${!rows.length}><summary>Make one</summary>
        <p>${service.tls || service.aggregator !== "running" ? "On the aggregator's machine, where its secret is shown once and kept nowhere:" : `Once the device API listens where other machines reach it (thinwire aggregator start --listen 0.0.0.0:9090${home}), on the aggregator's machine:`}</p>
        <${Command} text=${`thinwire devices invite${home}`} />
        <p>Twenty at once, each for one name, and each to be approved here:</p>
        <${Command} text=${`thinwire devices invite --names names.txt --out invites.csv --approve-manually${home}`} /></details>
    <//>`;
};

/** A second click confirms. */
const Withdraw = ({ id }) => {
  const [now, setNow] = useState({ step: "idle" });
  const order = async () => {
    setNow({ step: "sent" });
    try {
      await post(`invitations/${id}/withdraw`);
    } catch (error) {
      setNow({ step: "idle", error });
    }
  };
  if (now.step === "idle") {
    return html`${now.error && html`<span class="bad-text" role="alert">${now.error.message} </span>`}
      <button type="button" class="tool" aria-label=${`Withdraw invitation ${id}`} onClick=${() => setNow({ step: "confirm" })}>Withdraw…</button>`;
  }
  return html`<span class="confirm" role="group" aria-label=${`Withdraw invitation ${id}?`}>
    <button type="button" class="tool bad" disabled=${now.step === "sent"} onClick=${order}>Withdraw</button>
    <button type="button" class="tool" onClick=${() => setNow({ step: "idle" })}>Keep</button></span>`;
};
