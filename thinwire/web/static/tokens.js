// Tokens: programs use the API with them. A secret is shown once.
import { post } from "./api.js";
import { html, link, may, role, ROLES, user, useState } from "./dom.js";
import { Choice, Field, Form, Twice } from "./fields.js";
import { ago, moment } from "./format.js";
import { serverNow, useNow } from "./live.js";
import { Command, Icon, Section, Table } from "./parts.js";

const State = ({ row }) => (row.expires_at <= serverNow()
  ? html`<span class="outcome is-away"><${Icon} name="clock" /><span>expired ${moment(row.expires_at)}</span></span>`
  : html`<span class="outcome is-working"><${Icon} name="check" /><span>until ${moment(row.expires_at)}</span></span>`);

export const Tokens = ({ rows }) => {
  const [made, setMade] = useState(null);
  useNow(true); // they expire by themselves
  const all = may("admin");
  const make = async ({ name, role: wanted, run_id, days }) => {
    const found = await post("tokens", { name, role: run_id ? "viewer" : wanted, run_id, days: Number(days) });
    setMade(found);
    return `Token ${found.token.id} is made.`;
  };
  return html`
    <${Section} id="tokens" title=${all ? "Tokens" : "Your tokens"} aside="a program sends one as Authorization: Bearer" json=${link("api/v1/tokens")}>
      ${made && html`<div class="notice made" role="status"><${Icon} name="alert" /><div>
        <strong>Copy the secret of ${made.token.name} now: it is shown once.</strong>
        <${Command} text=${made.secret} label="secret of the new token" />
        <div class="buttons"><button type="button" class="tool" onClick=${() => setMade(null)}>I have it</button></div></div></div>`}
      <${Table} label="Tokens" rows=${rows} stacks keyOf=${(r) => r.id} empty="none" columns=${[
    { title: "Token", cell: (r) => html`<b>${r.name}</b> <small class="below">No. ${r.id}</small>` },
    ...(all ? [{ title: "User", cell: (r) => r.user }] : []),
    { title: "May", cell: (r) => (r.run_id ? `read ${r.run_id} only` : `act as ${r.role}`) },
    { title: "Valid", cell: (r) => html`<${State} row=${r} />` },
    { title: "Last used", cell: (r) => (r.used_at ? ago(r.used_at, serverNow()) : "never") },
    { title: html`<span class="unseen">Revoke</span>`, right: true, cell: (r) => html`<${Twice} label=${`Revoke token ${r.id}`} word="Revoke" bad act=${() => post(`tokens/${r.id}/revoke`)} />` },
  ]} />
      <details class="more"><summary>Make a token</summary>
        <${Form} label="Make a token" button="Make it" send=${make}>
          <${Field} label="What it is for" name="name" maxlength="63" placeholder="nightly-report" />
          <${Choice} label="Role" name="role" options=${ROLES.slice(0, ROLES.indexOf(role) + 1)} value="viewer" />
          <${Field} label="Only to read this run" name="run_id" required=${false} maxlength="80" hint="empty: all runs" />
          <${Field} label="Valid for days" name="days" type="number" min="1" max="366" value="30" />
        <//>
        <p class="faint">It acts for ${user}, with at most the role that ${user} has at that moment.</p>
      </details>
    <//>`;
};
