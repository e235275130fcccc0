// The devices of this aggregator, and the line that adds one.
import { html } from "./dom.js";
import { ago, bytes, clock, count } from "./format.js";
import { serverNow } from "./live.js";
import { Icon, Outcome, Table } from "./parts.js";

export const joinCommand = (service, task = "NAME") =>
  `thinwire client start --aggregator ${address(service)} --task ${task}=MODULE`;

const address = (service) => {
  if (!service?.listen) return "URL";
  return /^https?:/.test(service.listen) ? service.listen : `http://${service.listen}`;
};

const PRESENCE = {
  online: ["is-folded", "check", "online"],
  away: ["is-away", "dash", "away"],
  pending: ["is-late", "wait", "to be approved"],
  revoked: ["is-failed", "cross", "revoked"],
  unknown: ["is-away", "dots", "not known"],
};

/** Whether a device is there; while the aggregator is gone nobody knows. */
export const presence = (device, gone) => {
  if (device.state !== "approved") return device.state;
  if (gone) return "unknown";
  return device.online ? "online" : "away";
};

const Presence = ({ device, gone }) => {
  const [tone, icon, word] = PRESENCE[presence(device, gone)];
  return html`<span class=${`outcome ${tone}`}><${Icon} name=${icon} /><span>${word}</span></span>`;
};

const tasks = (device, task) => {
  const shown = device.tasks.filter((t) => !task || t.name === task);
  if (!shown.length) return html`<span class="faint">${task ? `has no task ${task}` : "none"}</span>`;
  return shown.map((t, i) => html`${i ? ", " : ""}<span class=${t.error ? "bad-text" : ""}>${t.name}${t.version ? ` ${t.version}` : ""}${t.error ? `: ${t.error}` : ""}</span>`);
};

/** "failed: left" as icon, word and reason. */
export const LastOutcome = ({ said }) => {
  const [outcome, ...reason] = said.split(": ");
  if (!outcome) return html`<span class="faint">–</span>`;
  return html`<${Outcome} outcome=${outcome}>${reason.length ? `: ${reason.join(": ")}` : ""}<//>`;
};

export const DeviceTable = ({ devices, task, gone }) => html`
  <${Table} label="Table of devices" rows=${devices} empty="no device has come yet" columns=${[
    { title: "Device", cell: (d) => d.device },
    { title: "State", cell: (d) => html`<${Presence} device=${d} gone=${gone} />` },
    { title: "Tasks", cell: (d) => tasks(d, task) },
    { title: "Updates", right: true, cell: (d) => count(d.updates) },
    { title: "Sent", right: true, cell: (d) => bytes(d.payload_up) },
    { title: "Last outcome", cell: (d) => html`<${LastOutcome} said=${d.last_outcome} />` },
    { title: "Seen", right: true, cell: (d) => (d.online && !gone ? `since ${clock(d.seen_at)}` : ago(d.seen_at, serverNow())) },
  ]} />`;
