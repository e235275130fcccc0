// Invitations: who may still come with one, the state of the others, and new ones.
import { post } from "./api.js";
import { home, html, link, may, startReachable, useEffect, useMemo, useState } from "./dom.js";
import { Field, Form, Twice } from "./fields.js";
import { count, moment, plural } from "./format.js";
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
  const [made, setMade] = useState(null); // their secrets are nowhere else
  useNow(true); // they expire by themselves
  const open = rows.filter((r) => state(r) === "open");
  const others = rows.filter((r) => state(r) !== "open");
  return html`
    <${Section} id="invitations" title="Invitations" aside=${open.length ? `${open.length} can still be used` : "none can be used"} json=${link("api/v1/invitations")}>
      ${open.length ? html`<${Open} label="Open invitations" rows=${open.slice(0, SHOWN)} />` : null}
      ${open.length > SHOWN ? html`<details class="more"><summary>${plural(open.length - SHOWN, "other")} that can be used</summary>
        <${Open} label="Other open invitations" rows=${open.slice(SHOWN)} /></details>` : null}
      ${others.length ? html`<details class="more"><summary>${plural(others.length, "other")} not usable</summary>
        <${Table} label="Invitations that are not usable" rows=${others} stacks keyOf=${(r) => r.id} columns=${[...COLUMNS,
    { title: "Used", cell: (r) => (r.used_at ? moment(r.used_at) : "–") }]} /></details>` : null}
      ${made && html`<${Made} rows=${made} done=${() => setMade(null)} />`}
      <details class="more" open=${!rows.length}><summary>Make ${may("operator") ? "invitations" : "one"}</summary>
        ${may("operator") && html`<${Here} service=${service} /><${Make} made=${setMade} />`}
        ${may("operator") ? html`<p class="faint">From the command line, for the names of a file:</p>` : html`<p>${service.tls || service.aggregator !== "running" ? "On the aggregator's machine, where its secret is shown once and kept nowhere:" : `Once the device API listens where other machines reach it (${startReachable}), on the aggregator's machine:`}</p>
        <${Command} text=${`thinwire devices invite${home}`} />
        <p>Twenty at once, each for one name, and each to be approved here:</p>`}
        <${Command} text=${`thinwire devices invite --names names.txt --out invites.csv --approve-manually${home}`} /></details>
    <//>`;
};

const LOOPBACK = /^(https?:\/\/)?(127\.|localhost[:/]|\[::1\])/;

/** What is said before an invitation is made that no device elsewhere could use. */
const Here = ({ service }) => {
  if (service.aggregator !== "running" || !(service.urls.length ? service.urls : [service.listen]).every((url) => LOOPBACK.test(url))) return null;
  return html`<p class="note">The device API listens on <code>${service.listen}</code>, for this machine only: no device elsewhere can use an invitation${service.tls ? "" : ", and one on this machine needs none"}. For devices elsewhere, first let it listen where they reach it:</p>
    <${Command} text=${startReachable} />`;
};

const LASTS = [["3600", "1 hour"], ["86400", "24 hours"], ["604800", "7 days"], ["2592000", "30 days"]];

const Make = ({ made }) => {
  const make = async ({ names, number, expires, manually }) => {
    const wanted = names.split(/\s+/).filter(Boolean);
    const found = await post("invitations", { names: wanted, count: wanted.length ? 1 : Number(number), expires_s: Number(expires), approve_manually: Boolean(manually) });
    made(found);
    return `${plural(found.length, "invitation")} made: ${found.length === 1 ? "it is" : "they are"} shown above, once.`;
  };
  return html`
    <${Form} label="Make invitations" button="Make" send=${make}>
      <label class="field"><span>Names</span><textarea name="names" rows="3" spellcheck=${false} aria-describedby="names-hint"></textarea>
        <small id="names-hint" class="faint">one a line, each gets an invitation; empty: any free name</small></label>
      <${Field} label="How many for any name" name="number" type="number" min="1" max="1000" value="1" />
      <label class="field"><span>Good for</span><select name="expires">${LASTS.map(([value, word]) => html`<option value=${value} defaultSelected=${value === "86400"}>${word}</option>`)}</select></label>
      <label class="checkbox"><input type="checkbox" name="manually" /> each waits here to be approved</label>
    <//>`;
};

const LISTED = 10; // of many that were made at once; the file has all

/** What is shown once: what to paste on each device. */
const Made = ({ rows, done }) => {
  const file = useMemo(() => URL.createObjectURL(new Blob([table(rows)], { type: "text/csv" })), [rows]);
  useEffect(() => () => URL.revokeObjectURL(file), [file]);
  return html`
    <div class="notice made" role="status"><${Icon} name="alert" /><div>
      <strong>Hand ${rows.length === 1 ? "this" : `these ${count(rows.length)}`} out now: the secret${rows.length === 1 ? " is" : "s are"} shown once, and kept nowhere.</strong>
      <p>On the device, type the command; it reads the invitation, which you paste.</p>
      ${rows[0].urls.length > 1 && html`<p class="faint">The device API is also at ${rows[0].urls.slice(1).join(", ")}.</p>`}
      <ol class="handed">${rows.slice(0, LISTED).map((row) => html`<li key=${row.id}>No. ${row.id}, for ${row.name ? html`the name <b>${row.name}</b>` : "any free name"}
        <${Command} text=${row.command} label=${`command for invitation ${row.id}`} /><${Command} text=${row.invitation} label=${`secret of invitation ${row.id}`} /></li>`)}</ol>
      ${rows.length > LISTED && html`<p>${count(rows.length - LISTED)} more are in the file.</p>`}
      <div class="buttons"><a class="tool" download="invitations.csv" href=${file}><${Icon} name="down" />${count(rows.length)} as CSV</a>
        <button type="button" class="tool" onClick=${done}>I have ${rows.length === 1 ? "it" : "them"}</button></div></div></div>`;
};

const COLUMNS_OF_FILE = ["id", "name", "url", "invitation", "command", "expires_at"]; // as thinwire devices invite --out has them

const cellsOf = (row) => [row.id, row.name, row.url, row.invitation, row.command, new Date(1000 * row.expires_at).toISOString().replace(/\.\d+/, "")];

const table = (rows) => [COLUMNS_OF_FILE, ...rows.map(cellsOf)].map((cells) => `${cells.join(",")}\n`).join("");

const Withdraw = ({ id }) => html`<${Twice} label=${`Withdraw invitation ${id}`} word="Withdraw" bad act=${() => post(`invitations/${id}/withdraw`)} />`;
