// What is said of a device in every table, and the lines that add one.
import { home, html, link } from "./dom.js";
import { ago, bytes, count, plural, seconds, speed, when } from "./format.js";
import { Short } from "./fingerprint.js";
import { serverNow, useNow } from "./live.js";
import { Because, Icon, Outcome, Table } from "./parts.js";

const SKEWED_S = 60; // from here on a person should set the device's clock

/** What starts a client; without TLS it is on this machine, where others may have its host name and another home. */
export const joinCommand = (service, task = "NAME") => (service?.tls
  ? `thinwire client join ${address(service)} - && thinwire client start --task ${task}=MODULE`
  : `thinwire client start --aggregator ${address(service)} --task ${task}=MODULE --name client-1${home}`);

export const address = (service) => {
  if (service?.urls?.length) return service.urls[0];
  if (!service?.listen) return "URL";
  return /^https?:/.test(service.listen) ? service.listen : `http://${service.listen}`;
};

const PRESENCE = {
  online: ["is-aggregated", "check", "online"],
  suspect: ["is-late", "wait", "suspect: it has missed a call"],
  offline: ["is-away", "away", "offline"],
  never: ["is-away", "dash", "not seen yet"],
  pending: ["is-late", "wait", "to be approved"],
  revoked: ["is-failed", "cross", "revoked"],
  unknown: ["is-away", "dots", "unknown, aggregator offline"],
};

/** Whether a device is there; while the aggregator is gone nobody knows. */
export const presence = (device, gone) => {
  if (device.standing !== "approved") return device.standing;
  if (gone) return "unknown";
  if (device.online) return device.suspect_at && serverNow() > device.suspect_at ? "suspect" : "online";
  return device.seen_at ? "offline" : "never";
};

/** Whether it counts as online: one that has missed a call is not offline yet. */
export const isOnline = (device, gone) => ["online", "suspect"].includes(presence(device, gone));

/** How long ago a device was last seen, counted on. */
const Heard = ({ device }) => {
  const now = useNow(true);
  return `last seen ${ago(device.last_seen_at, now)}`;
};

/** As icon and words: "online since 12:04:10, last seen 4 s ago", "offline since 11:58:02". */
export const Seen = ({ device, gone }) => {
  const is = presence(device, gone);
  const [tone, icon, word] = PRESENCE[is];
  const now = serverNow();
  const since = is === "online" ? device.seen_at : is === "offline" ? device.disconnected_at : null;
  const came = device.seen_at && (is === "offline" || is === "unknown") ? `, came ${when(device.seen_at, now)}` : "";
  const said = since ? ` since ${when(since, now)}` : came;
  return html`<span class=${`outcome ${tone}`} title=${is === "offline" ? device.disconnect_reason : ""}><${Icon} name=${icon} /><span>${word}${said}${device.online && !gone && device.last_seen_at ? html`, <${Heard} device=${device} />` : ""}</span></span>`;
};

/** In one or two words. */
const Presence = ({ device, gone }) => {
  const [tone, icon, word] = PRESENCE[presence(device, gone)];
  return html`<span class=${`outcome ${tone}`} title=${word}><${Icon} name=${icon} /><span>${word.split(/[:,]/)[0]}</span></span>`;
};

const FAILED = /^(failed|dropped)/;

/** What makes a person look: an error, other code than the run's, an answer that failed in a run that goes on. */
export const troubled = (device) => device.standing === "approved"
  && (device.tasks.some((t) => t.error || t.differs.length) || (FAILED.test(device.last_outcome) && !device.last_is_over));

export const Tasks = ({ tasks, whole }) => {
  if (!tasks.length) return html`<span class="faint">none reported yet</span>`;
  return tasks.map((t) => html`
    <div class="task">
      <b>${t.name}</b>${t.version ? ` ${t.version}` : ""}
      ${whole ? null : html`<div class="faint digests">${t.source_digest && html`code <${Short} digits=${t.source_digest} />`}${t.layout_digest && html` model <${Short} digits=${t.layout_digest} />`}</div>`}
      ${t.error && html`<div class="bad-text">${t.error}</div>`}
      ${t.differs.map((said) => html`<div class="warn-text">${said}</div>`)}
    </div>`);
};

const tripOf = (link) => link.rtt?.p50 ?? link.rtt_s;
const rate = (link) => (link.up?.p50 ? `${link.up.least ? "at least " : ""}${speed(link.up.p50)} up` : null);

export const Skew = ({ link, word = "clock " }) => {
  if (link.skew_s === null) return null;
  const off = Math.abs(link.skew_s);
  const said = off < 1 ? `${word}right to 1 s` : `${word}${seconds(off)} ${link.skew_s > 0 ? "behind" : "ahead"}`;
  return html`<span class=${off < SKEWED_S ? "faint" : "warn-text"}>${said}</span>`;
};

export const LinkCell = ({ link }) => {
  const said = [tripOf(link) === null ? null : seconds(tripOf(link)), rate(link)].filter(Boolean).join(" · ");
  if (!said && link.skew_s === null) return html`<span class="faint">–</span>`;
  return html`<div class="tight" title=${link.up?.samples ? `round trip; the median of the last ${plural(link.up.samples, "upload")}` : "round trip"}>${said || "–"}</div><${Skew} link=${link} />`;
};

export const Versions = ({ versions, own, has }) => {
  if (!versions.thinwire) return html`<span class="faint">–</span>`;
  const rest = [versions.python && `Python ${versions.python}`, versions.torch && `torch ${versions.torch}`].filter(Boolean);
  const other = own && versions.thinwire !== own;
  return html`<div class=${other ? "warn-text" : ""} title=${other ? `the aggregator's is ${own}` : ""}>thinwire ${versions.thinwire}${versions.machine ? html` <span class="faint">on ${versions.machine}</span>` : ""}</div><div class="faint tight">${rest.join(" · ")}</div>${has?.sentence && html`<div class="faint">${has.sentence}</div>`}`;
};

/** "failed: left" as icon, word and reason; `over`: the run that is over, in which nothing is left to do about it. */
export const LastOutcome = ({ said, over }) => {
  const [outcome, ...reason] = said.split(": ");
  if (!outcome) return html`<span class="faint">–</span>`;
  const past = over && FAILED.test(outcome);
  return html`<span class=${past ? "past" : ""}><${Outcome} outcome=${outcome}><${Because} reason=${reason.join(": ")} />${past && `; ${over} is over`}<//></span>`;
};

export const Last = ({ device }) => html`<${LastOutcome} said=${device.last_outcome} over=${device.last_is_over && device.last_run} />`;

export const TagList = ({ tags }) => tags.map((tag) => html` <small class="tag" key=${tag}>${tag}</small>`);

export const Name = ({ device }) => html`<a href=${link(`devices/${device.device}`)}>${device.device}</a>`;

const brief = (device, task) => {
  const shown = device.tasks.filter((t) => !task || t.name === task);
  if (!shown.length) return html`<span class="faint">${task ? `has no task ${task}` : "none"}</span>`;
  return shown.map((t, i) => html`${i ? ", " : ""}<span class=${t.error ? "bad-text" : "tight"}>${t.name}${t.version ? ` ${t.version}` : ""}${t.error ? `: ${t.error}` : ""}</span>`);
};

const BESIDE = 60; // rows beside runs; the devices' own page has all

/** The devices in short, beside runs. */
export const DeviceTable = ({ devices, task, gone }) => {
  const now = useNow(!gone);
  return html`
  ${devices.length > BESIDE && html`<p class="note">The first ${BESIDE} of ${count(devices.length)}: <a href=${link("devices")}>all devices</a>.</p>`}
  <${Table} label="Table of devices" rows=${devices.slice(0, BESIDE)} stacks="pairs" empty="no device has come yet" columns=${[
    { title: "Device", cell: (d) => html`<${Name} device=${d} />` },
    { title: "State", cell: (d) => html`<${Presence} device=${d} gone=${gone} />` },
    { title: "Tasks", cell: (d) => brief(d, task) },
    { title: "Updates", right: true, cell: (d) => count(d.updates) },
    { title: "Sent", right: true, cell: (d) => bytes(d.payload_up) },
    { title: "Last outcome", cell: (d) => html`<${Last} device=${d} />` },
    { title: "Seen", right: true, cell: (d) => (d.online && !gone ? ago(d.last_seen_at, now) : ago(d.disconnected_at ?? d.last_seen_at, serverNow())) },
  ]} />`;
};
