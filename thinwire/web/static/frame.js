// What stands around every page: name, the aggregator's state, the theme.
import { leave } from "./api.js";
import { Confirming } from "./confirm.js";
import { html, link, role, start, user, useState } from "./dom.js";
import { clock, when } from "./format.js";
import { serverNow } from "./live.js";
import { Command, Icon, Refusal } from "./parts.js";

const DARK = matchMedia("(prefers-color-scheme: dark)");

export const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : DARK.matches;
};

export const onThemeChange = (tell) => {
  DARK.addEventListener("change", tell);
  addEventListener("thinwire-theme", tell);
  return () => {
    DARK.removeEventListener("change", tell);
    removeEventListener("thinwire-theme", tell);
  };
};

const Theme = () => {
  const [dark, setDark] = useState(isDark());
  const turn = () => {
    document.documentElement.dataset.theme = dark ? "light" : "dark";
    localStorage.setItem("thinwire-theme", dark ? "light" : "dark");
    dispatchEvent(new Event("thinwire-theme"));
    setDark(!dark);
  };
  const word = dark ? "Light theme" : "Dark theme";
  return html`<button type="button" class="tool square" onClick=${turn} aria-label=${word} title=${word}>
    <${Icon} name=${dark ? "sun" : "moon"} /></button>`;
};

const ZONE = new Intl.DateTimeFormat().resolvedOptions().timeZone;

const LINK_STATE = {
  lost: ["bad", "dashboard not reachable"],
  gone: ["bad", "aggregator gone"],
  running: ["good", "live"],
  unknown: ["good", "live"],
};

export const Frame = ({ news, at, children }) => {
  const [tone, word] = LINK_STATE[news.reached ? news.aggregator : "lost"];
  return html`
    <header class="top">
      <a class="wordmark" href=${link("")} aria-label="Thinwire: all runs">
        <svg viewBox="0 0 40 16" aria-hidden="true"><path d="M1 8h10l3-6 5 12 4-8 2 2h14" /></svg>thinwire
      </a>
      <nav class="places" aria-label="Pages">
        <a href=${link("")} aria-current=${at === "runs" ? "page" : undefined}>Runs</a>
        <a href=${link("devices")} aria-current=${at === "devices" ? "page" : undefined}>Devices${news.pending
          ? html` <b class="badge" title="to be approved">${news.pending}<span class="unseen"> to be approved</span></b>` : ""}</a>
        <a href=${link("alerts")} aria-current=${at === "alerts" ? "page" : undefined}>Alerts${news.unseen
          ? html` <b class="badge" title="not acknowledged">${news.unseen}<span class="unseen"> not acknowledged</span></b>` : ""}</a>
        <a href=${link("users")} aria-current=${at === "users" ? "page" : undefined}>Users</a>
        <a href=${link("audit")} aria-current=${at === "audit" ? "page" : undefined}>Audit</a>
      </nav>
      <span class=${`beat ${tone}`} role="status"><i aria-hidden="true"></i>${word}</span>
      <${Theme} />
      <span class="me" title=${`logged in with the role ${role}`}>${user} <small>${role}</small></span>
      <form method="post" action=${link("logout")} onSubmit=${leave}><button class="tool" aria-label=${`Log out ${user}`}>Log out</button></form>
    </header>
    <main>${children}</main>
    <footer class="faint">Times are in the time zone of this browser, ${ZONE}.</footer>
    <${Confirming} />`;
};

/** Why what is shown is not the newest: nothing changes now, or the last read failed, with this `error`. */
export const Gone = ({ news, matters, error }) => html`
  <${Still} news=${news} matters=${matters} />
  ${error && news.reached && !news.store && html`<${Refusal} error=${error}>What you see was read before that.<//>`}`;

/** The state in which nothing that is shown will change; `matters` says that somebody waits for a change. */
const Still = ({ news, matters }) => {
  if (news.reached && news.store) {
    return html`<div class="notice bad" role="alert"><${Icon} name="alert" />
      <div><strong>The database is not readable.</strong><p>${news.store}</p></div></div>`;
  }
  if (news.reached && news.disk) {
    return html`<div class="notice bad" role="alert"><${Icon} name="alert" />
      <div><strong>The aggregator's disk is full.</strong><p>${news.disk}. Delete runs that nobody needs, or free space.</p></div></div>`;
  }
  if (news.reached && (news.aggregator !== "gone" || !matters)) return null;
  const since = news.lost ? ` What you see is as of ${clock(news.lost)}.` : "";
  return html`
    <div class="notice bad" role="alert">
      <${Icon} name="alert" />
      <div>
        <strong>${news.reached ? `The aggregator is not running${news.down_since ? ` since ${when(news.down_since, serverNow())}` : ""}.` : "This browser gets no news from the dashboard."}</strong>
        <p>${news.reached ? "Nothing is lost: runs go on where they were when it is started again." : "The aggregator is gone, and this page's server with it; or this browser does not reach it; or one person has the dashboard open in more than eight browsers. Runs go on where they were."}${since} This page comes back by itself.</p>
        ${start ? html`<${Command} text=${start} />` : html`<p>An operator starts it again, on its machine.</p>`}
      </div>
    </div>`;
};
