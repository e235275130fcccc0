// Users and tokens: who may log in and with which role; everybody's own password and tokens.
import { get, post } from "./api.js";
import { home, html, link, may, role, ROLES, useEffect, user, useState } from "./dom.js";
import { Dialog } from "./dialog.js";
import { Choice, Field, Form, Twice } from "./fields.js";
import { moment } from "./format.js";
import { Gone } from "./frame.js";
import { useReading } from "./live.js";
import { Command, Icon, Refusal, Section, Table } from "./parts.js";
import { Tokens } from "./tokens.js";

const MEANS = {
  viewer: "A viewer reads everything.",
  operator: "An operator reads everything, directs runs and approves devices.",
  admin: "An admin may do everything: also revoke, delete, and decide who may do what.",
};
const MACHINE = "machine"; // the user of a session that began with a code

const read = async () => {
  const [tokens, users] = await Promise.all([get("tokens"), may("admin") ? get("users") : []]);
  return { tokens, users };
};

export const UsersPage = ({ news }) => {
  const { data, error } = useReading(read, news, []);
  useEffect(() => {
    document.title = "Users and tokens · Thinwire";
  }, []);
  if (!data) return error && news.reached ? html`<${Refusal} error=${error} />` : html`<${Gone} news=${news} /><p class="loading">Reading…</p>`;
  return html`
    <${Gone} news=${news} error=${error} />
    <div class="head"><h1>Users and tokens</h1></div>
    <p class="sentence">You are ${user}, with the role ${role}. ${MEANS[role]}</p>
    ${may("admin") && html`<${Users} rows=${data.users} />`}
    <${Tokens} rows=${data.tokens} />
    <${Password} />`;
};

const Users = ({ rows }) => {
  const [wish, setWish] = useState(null); // {what: "role" | "reset", row}
  const add = async (given) => (await post("users", given)).sentence;
  return html`
    <${Section} id="users" title="Users" aside=${ROLES.slice(0, 2).map((one) => MEANS[one]).join(" ")} json=${link("api/v1/users")}>
      <${Table} label="Users" rows=${rows} stacks keyOf=${(r) => r.name} empty="none yet" columns=${[
    { title: "User", cell: (r) => html`<b>${r.name}</b>` },
    { title: "Role", cell: (r) => (r.disabled_at ? html`<span class="outcome is-away"><${Icon} name="cross" /><span>disabled ${moment(r.disabled_at)}</span></span>` : r.role) },
    { title: "Added", cell: (r) => html`${moment(r.created_at)} <span class="faint">by ${r.who}</span>` },
    { title: "Last login", cell: (r) => (r.login_at ? moment(r.login_at) : "never") },
    { title: html`<span class="unseen">Change</span>`, right: true, cell: (r) => (r.name === user ? html`<div class="deeds"><span class="faint">another admin changes you</span><${LogOut} name=${r.name} /></div>` : html`<div class="deeds">
        <button type="button" class="tool" aria-label=${`Role of ${r.name}`} onClick=${() => setWish({ what: "role", row: r })}>Role…</button>
        <button type="button" class="tool" aria-label=${`Reset the password of ${r.name}`} onClick=${() => setWish({ what: "reset", row: r })}>Password…</button>
        ${r.disabled_at
    ? html`<${Twice} label=${`Enable ${r.name}`} word="Enable" act=${() => post(`users/${r.name}/enable`, {})} />`
    : html`<${LogOut} name=${r.name} /><${Twice} label=${`Disable ${r.name}`} word="Disable" bad act=${() => post(`users/${r.name}/disable`, {})} />`}</div>`) },
  ]} />
      <p class="note">A session that begins with a one-time code is that of the user ${MACHINE}, an admin. <${LogOut} name=${MACHINE} /></p>
      <details class="more" open=${!rows.length}><summary>Add a user</summary>
        <${Form} label="Add a user" button="Add" send=${add}>
          <${Field} label="Name" name="name" maxlength="32" pattern="[a-z0-9][a-z0-9._\\-]*" hint="of a to z, 0 to 9, dot, _ and -" autocomplete="off" />
          <${Choice} label="Role" name="role" options=${ROLES} value="viewer" />
          <${Field} label="First password" name="password" type="password" minlength="12" maxlength="256" hint="at least 12 characters; the user can change it here" autocomplete="new-password" />
        <//>
      </details>
    <//>
    ${wish && html`<${Change} wish=${wish} close=${() => setWish(null)} />`}`;
};

/** Ends all sessions of a user, also one's own. */
const LogOut = ({ name }) => html`<${Twice} label=${`Log out ${name} everywhere`} word="Log out" done="logged out" act=${() => post(`users/${name}/logout`, {})} />`;

/** Another role, or another password, for a user. */
const Change = ({ wish, close }) => {
  const { what, row } = wish;
  const send = async (given) => (await post(`users/${row.name}/${what}`, given)).sentence;
  return html`
    <${Dialog} id="change" title=${what === "role" ? `The role of ${row.name}` : `A new password for ${row.name}`} close=${close}>
      <p>Sessions of ${row.name} end at once.</p>
      <${Form} label=${`Change ${row.name}`} button="Change it" send=${send}>
        ${what === "role" ? html`<${Choice} label="Role" name="role" options=${ROLES} value=${row.role} />`
    : html`<${Field} label="New password" name="password" type="password" minlength="12" maxlength="256" autocomplete="new-password" first />`}
      <//>
      <div class="buttons"><button type="button" class="tool" onClick=${close}>Close</button></div>
    <//>`;
};

const Password = () => html`
  <${Section} id="own" title="Your password">
    ${user === MACHINE ? html`<p>This session began with a one-time code, so it has no password. To log in with one, add a user above, or on the aggregator's machine:</p>
      <${Command} text=${`thinwire aggregator users add NAME --role admin${home}`} />` : html`
      <${Form} label="Change your password" button="Change it" send=${async (given) => (await post("session/password", given)).sentence}>
        <input type="text" name="user" value=${user} autocomplete="username" readonly hidden disabled />
        <${Field} label="Present password" name="old" type="password" maxlength="256" autocomplete="current-password" />
        <${Field} label="New password" name="new" type="password" minlength="12" maxlength="256" hint="at least 12 characters; your other sessions end" autocomplete="new-password" />
      <//>`}
  <//>`;
