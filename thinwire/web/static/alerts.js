// What an operator should know of: open alerts, who has seen them, and those that are over.
import { get, post } from "./api.js";
import { home, html, link, may, useState } from "./dom.js";
import { ago, moment } from "./format.js";
import { Gone } from "./frame.js";
import { serverNow, useReading } from "./live.js";
import { Icon, Refusal, Section, Table } from "./parts.js";

const read = () => get("alerts");

export const AlertsPage = ({ news }) => {
  const { data, error } = useReading(read, news, [news.alerts, news.unseen, news.alert_changes]);
  document.title = "Alerts · Thinwire";
  if (!data) return error && news.reached ? html`<${Refusal} error=${error} />` : html`<${Gone} news=${news} matters /><p class="loading">Reading…</p>`;
  const open = data.filter((one) => one.closed_at === null);
  const over = data.filter((one) => one.closed_at !== null);
  return html`
    <${Gone} news=${news} matters error=${error} />
    <div class="head"><h1>Alerts</h1><p class="sentence small">${summary(open)}</p></div>
    <${Section} id="open-alerts" title="Open" csv=${link("api/v1/alerts.csv")} json=${link("api/v1/alerts")}>
      <${Table} label="Open alerts" rows=${open} stacks keyOf=${(one) => one.id} columns=${columns(OPEN, open)} empty="nothing is wrong" />
    <//>
    <${Section} id="closed-alerts" title="Over" json=${link("api/v1/alerts")}>
      <${Table} label="Alerts that are over" rows=${over} stacks keyOf=${(one) => one.id} columns=${columns(OVER, over)} empty="none yet" />
      <p class="note">Messages go to the targets in <code>aggregator.toml</code>; they are shown by <code>thinwire aggregator config${home}</code>.</p>
    <//>`;
};

const summary = (open) => {
  if (!open.length) return "Nothing is wrong.";
  const unseen = open.filter((one) => one.acknowledged_at === null).length;
  return `${open.length} open, ${unseen ? `${unseen} not acknowledged` : "all acknowledged"}.`;
};

const About = ({ one }) => html`<span class="outcome is-failed"><${Icon} name="alert" /><span>${one.sentence}</span></span>`;

const Subject = ({ one }) => html`<span class="tight">${one.subject ? html`<a href=${link(`runs/${one.subject}`)}>${one.subject}</a>` : "aggregator"}</span>`;

const Time = ({ at }) => html`<span class="tight">${moment(at)}</span>`;

/** A hint may hold commands: its lines break at spaces only, and not within an option. */
const Hint = ({ text }) => html`<span>${text.split(" ").map((word, i) => html`${i ? " " : ""}<span class="word">${word}</span>`)}</span>`;

const isSent = (one) => !one.failures && (one.closed_at === null ? one.opening_sent_at : one.closing_sent_at) !== null;

const MESSAGE = {
  title: "Message",
  cell: (one) => (isSent(one) ? "–" : one.failures ? html`<span class="bad-text">not sent: ${one.failure}</span>` : "being sent"),
};

/** With the messages where one of them is not sent. */
const columns = (always, rows) => (rows.every(isSent) ? always : always.toSpliced(-1, 0, MESSAGE));

const Seen = ({ one }) => {
  const [now, setNow] = useState({ step: "idle" });
  if (one.acknowledged_at !== null) return html`<span class="faint">${one.acknowledged_by}, ${ago(one.acknowledged_at, serverNow())}</span>`;
  if (!may("operator")) return html`<span class="faint">an operator acknowledges it</span>`;
  const acknowledge = async () => {
    setNow({ step: "sent" });
    try {
      await post(`alerts/${one.id}/acknowledge`);
    } catch (error) {
      setNow({ step: "idle", error });
    }
  };
  return html`${now.error && html`<span class="bad-text" role="alert">${now.error.message} </span>`}
    <button type="button" class="tool" disabled=${now.step === "sent"} aria-label=${`Acknowledge: ${one.sentence}`} onClick=${acknowledge}>Acknowledge</button>`;
};

const OPEN = [
  { title: "Alert", cell: (one) => html`<${About} one=${one} />` },
  { title: "About", cell: (one) => html`<${Subject} one=${one} />` },
  { title: "Since", cell: (one) => html`<${Time} at=${one.opened_at} />` },
  { title: "Try", cell: (one) => (one.hint ? html`<${Hint} text=${one.hint} />` : "–") },
  { title: "Acknowledged", right: true, cell: (one) => html`<${Seen} one=${one} />` },
];

const OVER = [
  { title: "Alert", cell: (one) => one.sentence },
  { title: "About", cell: (one) => html`<${Subject} one=${one} />` },
  { title: "From", cell: (one) => html`<${Time} at=${one.opened_at} />` },
  { title: "Until", cell: (one) => html`<${Time} at=${one.closed_at} />` },
  { title: "Acknowledged", cell: (one) => (one.acknowledged_at === null ? "nobody" : one.acknowledged_by) },
];
