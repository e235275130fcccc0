// All devices: which wait for approval, which are online, revoked or refused.
import { get } from "./api.js";
import { Deciding } from "./deciding.js";
import { Last, LinkCell, Name, Seen, TagList, Tasks, Versions, address, isOnline, joinCommand, presence, troubled } from "./devices.js";
import { home, html, link, may, startReachable, useEffect, useState } from "./dom.js";
import { Fingerprint } from "./fingerprint.js";
import { count, moment, plural } from "./format.js";
import { Gone } from "./frame.js";
import { Invitations } from "./invitations.js";
import { useReading } from "./live.js";
import { Command, Icon, Refusal, Section, Switch, Table } from "./parts.js";
import { useQuery } from "./query.js";
import { Refusals } from "./refusals.js";

const GAP_MS = 1000; // between two reads of hundreds of rows
const AT_ONCE = matchMedia("(max-width: 760px)").matches ? 20 : 60; // rows (a narrow screen makes a block of each), and
const CARDS = 12; // of those that wait

const read = async () => {
  const [devices, invitations, refusals, service] = await Promise.all(["devices", "invitations", "refusals", "service"].map(get));
  return { devices, invitations, refusals, service };
};

export const FleetPage = ({ news }) => {
  const { data, error } = useReading(read, news, [news.heard], GAP_MS);
  const [wish, setWish] = useState(null);
  useEffect(() => {
    document.title = `${news.pending ? `(${news.pending}) ` : ""}Devices · Thinwire`;
  }, [news.pending]);
  if (!data) return error && news.reached ? html`<${Refusal} error=${error} />` : html`<${Gone} news=${news} matters /><p class="loading">Reading…</p>`;
  const { devices, invitations, refusals, service } = data;
  const gone = news.aggregator === "gone" || !news.reached;
  const pending = devices.filter((d) => d.standing === "pending");
  const known = devices.filter((d) => d.standing === "approved");
  const out = devices.filter((d) => d.standing === "revoked");
  const decide = (what, device) => setWish({ what, device });
  return html`
    <${Gone} news=${news} matters error=${error} />
    <div class="head"><h1>Devices</h1><p class="sentence small">${summary(devices, pending, known, out, gone)}</p></div>
    ${pending.length ? html`<${Pending} devices=${pending} decide=${decide} />` : null}
    ${known.length ? html`<${Known} devices=${known} gone=${gone} service=${service} decide=${decide} />` : null}
    ${!devices.length ? html`<${Nobody} service=${service} />` : null}
    ${devices.length && !known.length ? html`<${NobodyIn} pending=${pending.length} />` : null}
    ${out.length ? html`<${Out} devices=${out} decide=${decide} />` : null}
    <${Invitations} rows=${invitations} service=${service} />
    ${refusals.length ? html`<${Refusals} rows=${refusals} />` : null}
    ${wish && html`<${Deciding} wish=${wish} close=${() => setWish(null)} />`}`;
};

const summary = (devices, pending, known, out, gone) => {
  if (!devices.length) return "None yet.";
  const online = known.filter((d) => isOnline(d, gone)).length;
  const said = !known.length ? ["no device is approved"] : [gone ? `${plural(known.length, "device")} approved; who is online is unknown, aggregator offline` : `${online} of ${plural(known.length, "device")} online`];
  if (pending.length) said.unshift(`${count(pending.length)} ${pending.length === 1 ? "waits" : "wait"} for you`);
  if (out.length) said.push(`${count(out.length)} revoked`);
  const text = said.join("; ");
  return `${text[0].toUpperCase()}${text.slice(1)}.`;
};

const Pending = ({ devices, decide }) => {
  const [all, setAll] = useState(false);
  const shown = all ? devices : devices.slice(0, CARDS);
  return html`
    <${Section} id="pending" title="To be approved" aside="Each device is told only that it waits for approval.">
      <ul class="cards">
        ${shown.map((d) => html`
          <li key=${d.device}>
            <h3><${Icon} name="wait" /><${Name} device=${d} /> <small>since ${moment(d.created_at)}</small></h3>
            <p>${d.sentence}</p>
            <${Fingerprint} digits=${d.fingerprint} label=${`Fingerprint of the key of ${d.device}`} />
            <div class="buttons">
              ${may("operator") ? html`<button type="button" class="tool go" aria-label=${`Approve ${d.device}`} onClick=${() => decide("approve", d)}><${Icon} name="check" />Approve…</button>` : html`<span class="faint">An operator approves devices.</span>`}
              ${may("admin") && html`<button type="button" class="tool" aria-label=${`Revoke ${d.device}`} onClick=${() => decide("revoke", d)}>Revoke…</button>`}
            </div>
          </li>`)}
      </ul>
      <${More} shown=${shown.length} of=${devices.length} all=${() => setAll(true)} />
    <//>`;
};

const SHOWS = [["all", "All"], ["online", "Online"], ["offline", "Offline"], ["trouble", "Trouble"]];

const Known = ({ devices, gone, service, decide }) => {
  const [words, setWords] = useQuery("q", "");
  const [show, setShow] = useQuery("show", "all");
  const [all, setAll] = useState(false);
  const [tag, setTag] = useQuery("tag", "");
  const wanted = tag ? tag.split(",") : [];
  const selected = devices.filter((d) => matches(d, words) && wanted.every((one) => d.tags.includes(one)));
  const kinds = { all: selected, online: selected.filter((d) => isOnline(d, gone)),
    offline: selected.filter((d) => ["offline", "never"].includes(presence(d, gone))), trouble: selected.filter(troubled) };
  const found = kinds[show] ?? selected;
  const shown = all ? found : found.slice(0, AT_ONCE);
  return html`
    <${Section} id="known" title="Approved" aside=${plural(devices.length, "device")} csv=${link("api/v1/devices.csv")} json=${link("api/v1/devices")}>
      <div class="filter">
        <label class="search"><${Icon} name="find" /><span class="unseen">Search devices</span>
          <input type="search" placeholder="name, tag, version, task, reason" value=${words} onInput=${(e) => setWords(e.target.value)} /></label>
        <${TagFilter} devices=${devices} wanted=${wanted} choose=${(next) => setTag(next.join(","))} />
        <${Switch} label="Which devices" name="show" value=${kinds[show] ? show : "all"} choose=${setShow}
          options=${SHOWS.map(([key, word]) => [key, `${word} ${gone && (key === "online" || key === "offline") ? "" : count(kinds[key].length)}`])} />
      </div>
      <${Table} label="Approved devices" rows=${shown} stacks keyOf=${(d) => d.device}
        empty=${words || tag || show !== "all" ? "none of them is like that" : ""} columns=${[
    { title: "Device", cell: (d) => html`<${Name} device=${d} /><small class="below">${d.how}</small>${d.tags.length > 0 && html`<span class="tags"><${TagList} tags=${d.tags} /></span>`}` },
    { title: "Seen", cell: (d) => html`<${Seen} device=${d} gone=${gone} />` },
    { title: "Tasks", cell: (d) => html`<${Tasks} tasks=${d.tasks} />` },
    { title: "Versions", cell: (d) => html`<${Versions} versions=${d.versions} own=${service.version} has=${d.has} />` },
    { title: "Link", cell: (d) => html`<${LinkCell} link=${d.link} />` },
    { title: "Updates", right: true, cell: (d) => count(d.updates) },
    { title: "Last outcome", cell: (d) => html`<${Last} device=${d} />` },
    ...(may("admin") ? [{ title: html`<span class="unseen">Revoke</span>`, right: true, cell: (d) => html`<button type="button" class="tool" aria-label=${`Revoke ${d.device}`} onClick=${() => decide("revoke", d)}>Revoke…</button>` }] : []),
  ]} />
      <${More} shown=${shown.length} of=${found.length} all=${() => setAll(true)} />
    <//>`;
};

const TAGS = 12; // that most devices have; the others are found by the search

/** Devices that have all the chosen tags; a chosen tag stays to be taken back, also where no device has it. */
const TagFilter = ({ devices, wanted, choose }) => {
  const numbers = new Map(wanted.map((tag) => [tag, 0]));
  for (const tag of devices.flatMap((d) => d.tags)) numbers.set(tag, (numbers.get(tag) ?? 0) + 1);
  if (!numbers.size) return null;
  const most = [...numbers].sort(([a, n], [b, m]) => m - n || (a < b ? -1 : 1));
  const shown = most.filter(([tag], i) => i < TAGS || wanted.includes(tag));
  return html`
    <fieldset class="chips"><legend class="unseen">Filter by tag</legend>
      ${shown.map(([tag, n]) => html`
        <label key=${tag} class=${wanted.includes(tag) ? "chip chosen" : "chip"}>
          <input type="checkbox" checked=${wanted.includes(tag)} onChange=${() => choose(wanted.includes(tag) ? wanted.filter((one) => one !== tag) : [...wanted, tag])} />
          ${tag} <small>${count(n)}</small></label>`)}
    </fieldset>`;
};

/** Every word must stand somewhere in what is shown of the device. */
const matches = (device, words) => {
  if (!words.trim()) return true;
  const said = [device.device, device.how, device.sentence, device.last_outcome, device.disconnect_reason, device.fingerprint, device.has.sentence, ...device.tags,
    ...Object.entries(device.versions).flat(), ...device.tasks.flatMap((t) => [t.name, t.version, t.error, t.source_digest, t.layout_digest, ...t.differs])]
    .join(" ").toLowerCase();
  return words.toLowerCase().split(/\s+/).every((word) => said.includes(word));
};

const More = ({ shown, of, all }) => (shown < of
  ? html`<p class="note"><button type="button" class="tool" onClick=${all}>Show all ${count(of)}</button> <span>${count(of - shown)} more are not shown.</span></p>` : null);

const Out = ({ devices, decide }) => html`
  <${Section} id="out" title="Revoked" aside=${plural(devices.length, "device")} csv=${link("api/v1/devices.csv")} json=${link("api/v1/devices")}>
    <details class="more"><summary>Show ${devices.length === 1 ? "it" : "them"}</summary>
      <${Table} label="Revoked devices" rows=${devices} stacks keyOf=${(d) => d.device} columns=${[
    { title: "Device", cell: (d) => html`<${Name} device=${d} /><small class="below">${d.how}</small>` },
    { title: "Why", cell: (d) => d.sentence },
    { title: "Updates", right: true, cell: (d) => count(d.updates) },
    ...(may("admin") ? [{ title: html`<span class="unseen">Approve</span>`, right: true, cell: (d) => html`<button type="button" class="tool" aria-label=${`Approve again: ${d.device}`} onClick=${() => decide("approve", d)}>Approve again…</button>` }] : []),
  ]} />
    </details>
  <//>`;

const Nobody = ({ service }) => html`
  <section class="nothing" aria-labelledby="nobody-title">
    <h2 id="nobody-title">No device yet</h2>
    ${service.aggregator !== "running" ? html`
      <p>A device elsewhere joins with an invitation, made on the aggregator's machine:</p>
      <${Command} text=${`thinwire devices invite${home}`} />
      <p>A client on the aggregator's machine needs none while its device API listens on loopback:</p>
      <${Command} text=${joinCommand(service)} />` : service.tls ? html`
      <p>The device API at <code>${address(service)}</code> approves no device without an invitation. ${may("operator") ? "Make one below, or" : "Make one"} on the aggregator's machine:</p>
      <${Command} text=${`thinwire devices invite${home}`} />
      <p>It has the line to paste on the device, which then stands on this page.</p>` : html`
      <p>This device API is for this machine only. Start a client beside it, with the task's code:</p>
      <${Command} text=${joinCommand(service)} />
      <p>For devices elsewhere, let the device API listen on an address that they reach, then invite them:</p>
      <${Command} text=${startReachable} />
      <${Command} text=${`thinwire devices invite${home}`} />`}
  </section>`;

const NobodyIn = ({ pending }) => html`
  <p class="note">${pending ? "No device is approved: no run can begin or go on before one of them is approved." : "No device is approved."}</p>`;
