// One device: its key whole, what it has and how far away it is, its assignments, and who decided about it.
import { get } from "./api.js";
import { Deciding, Naming } from "./deciding.js";
import { Last, Seen, Skew, TagList } from "./devices.js";
import { html, link, may, useEffect, useState } from "./dom.js";
import { Fingerprint, groups } from "./fingerprint.js";
import { bytes, count, moment, plural, seconds, share, speed } from "./format.js";
import { Gone } from "./frame.js";
import { Health } from "./health.js";
import { useReading } from "./live.js";
import { Because, Icon, Outcome, Refusal, Section, Table, reasonOf, restarted } from "./parts.js";
import { NotKnown } from "./secure.js";

const NAMES = { thinwire: "thinwire", python: "Python", torch: "torch", machine: "machine", system: "system" };

export const DevicePage = ({ name, news }) => {
  const { data, error } = useReading(() => get(`devices/${name}`), news, [name, news.heard]);
  const [wish, setWish] = useState(null);
  const [refused, setRefused] = useState(null);
  useEffect(() => {
    document.title = `${name} · Devices · Thinwire`;
  }, [name]);
  if (!data) {
    return error && news.reached ? html`<div class="head"><${Where} name=${name} /></div><${Refusal} error=${error} />`
      : html`<${Gone} news=${news} matters /><p class="loading">Reading…</p>`;
  }
  const gone = news.aggregator === "gone" || !news.reached;
  const decide = (what) => setWish({ what, device: data });
  return html`
    <${Gone} news=${news} matters error=${error} />
    <div class="head"><${Where} name=${data.device} /><${Seen} device=${data} gone=${gone} />
      <${TagList} tags=${data.tags} />
      <span class="commands">
        ${may("operator") && html`<button type="button" class="tool" onClick=${() => decide("rename")}>Rename…</button><button type="button" class="tool" onClick=${() => decide("tags")}>Tags…</button>`}
        ${data.standing === "revoked" && !may("admin") && html`<span class="faint">An admin approves it again.</span>`}
        ${data.standing !== "approved" && may(data.standing === "revoked" ? "admin" : "operator") && html`<button type="button" class="tool go" onClick=${() => decide("approve")}><${Icon} name="check" />${data.standing === "pending" ? "Approve…" : "Approve again…"}</button>`}
        ${data.standing !== "revoked" && may("admin") && html`<button type="button" class="tool" onClick=${() => decide("revoke")}>Revoke…</button>`}
      </span></div>
    <p class="sentence">${data.sentence}${data.disconnected_at && data.standing === "approved" && !gone ? ` Offline since ${moment(data.disconnected_at)}: ${data.disconnect_reason}.` : ""}</p>
    ${refused && html`<${Refusal} error=${refused} />`}
    ${data.next_step && html`<div class="notice said"><${Icon} name="alert" /><div><strong>${data.next_step}</strong></div></div>`}
    ${data.declined && html`<${Declined} said=${data.declined} />`}
    <div class="pair">
      <${Section} id="key" title="Key" aside="SHA-256, as the device prints it">
        <${Fingerprint} digits=${data.fingerprint} />
        <dl class="facts">
          <div><dt>came</dt><dd>${data.came}, ${moment(data.created_at)}</dd></div>
          <div><dt>policy of its own</dt><dd>${data.policy ? html`<code title=${data.policy}>${data.policy.slice(0, 16)}…</code>` : "none reported"}</dd></div>
        </dl>
      <//>
      <${Section} id="link" title="Link and versions">
        <dl class="facts">
          <div><dt>round trip</dt><dd><${Measured} of=${data.link.rtt} word=${seconds} most="at most" otherwise=${data.link.rtt_s === null ? "not measured" : `${seconds(data.link.rtt_s)}, as it said when it came`} /></dd></div>
          <div><dt>upload</dt><dd><${Measured} of=${data.link.up} word=${speed} most="at least" otherwise=${unsaid(data.link.up, "nothing sent yet")} /></dd></div>
          <div><dt>download</dt><dd><${Measured} of=${data.link.down} word=${speed} most="at least" otherwise=${unsaid(data.link.down, "not measured")} /></dd></div>
          <div><dt>clock</dt><dd>${data.link.skew_s === null ? "not measured" : html`<${Skew} link=${data.link} word="" />`}</dd></div>
          ${Object.entries(NAMES).filter(([key]) => data.versions[key]).map(([key, word]) => html`<div><dt>${word}</dt><dd>${data.versions[key]}</dd></div>`)}
        </dl>
      <//>
    </div>
    <${Health} name=${data.device} news=${news} />
    <${Equipment} has=${data.has} />
    <${Installed} tasks=${data.tasks} />
    <${Assignments} device=${data} />
    <${Deeds} device=${data} />
    ${wish && (wish.what === "rename" || wish.what === "tags" ? html`<${Naming} wish=${wish} close=${() => setWish(null)} fail=${setRefused} />` : html`<${Deciding} wish=${wish} close=${() => setWish(null)} />`)}`;
};

const unsaid = (of, never) => (!of ? never : of.least ? "too little was sent to tell" : "too fast to be measured");

/** A median with what nine of ten kept to, and of how many. */
const Measured = ({ of, word, most, otherwise }) => (of?.p50
  ? of.least ? html`at least ${word(of.p50)} <small>too little was sent to tell, the last ${plural(of.samples, "time")}</small>` : html`${word(of.p50)} <small>nine of ten ${most} ${word(of.p90)}, of the last ${count(of.samples)}</small>` : otherwise);

const Where = ({ name }) => html`
  <nav aria-label="Where you are"><a href=${link("devices")}>Devices</a><span aria-hidden="true"> / </span><h1>${name}</h1></nav>`;

const Declined = ({ said }) => html`
  <div class="notice">
    <${Icon} name="alert" />
    <div><strong>Its owner's policy declined round ${said.round} of ${said.run_id}.</strong><p>${said.rule}</p></div>
  </div>`;

const GIB = 2 ** 30;
const word = (value, yes, no) => (value === null ? "not said" : value ? yes : no);
const gib = (value) => (value === null ? null : `${(value / GIB).toFixed(1)} GiB`);

const Equipment = ({ has }) => html`
  <${Section} id="has" title="What it has" aside=${has.sentence ? "as it said when it came" : "nothing reported"}>
    ${has.sentence && html`<dl class="facts">
      <div><dt>cores</dt><dd>${has.cores === null ? "not said" : count(has.cores)}</dd></div>
      <div><dt>memory</dt><dd>${gib(has.memory_bytes) ?? "not said"}${has.free_bytes === null ? "" : html` <small>${gib(has.free_bytes)} free</small>`}</dd></div>
      <div><dt>power</dt><dd>${word(has.mains, "mains", "battery")}</dd></div>
      <div><dt>link</dt><dd>${word(has.metered, "metered: paid by volume", "not metered")}</dd></div>
    </dl>`}
  <//>`;

const Installed = ({ tasks }) => html`
  <${Section} id="tasks" title="Tasks" aside=${tasks.length ? "" : "none reported yet"}>
    ${tasks.map((t) => html`
      <div class="installed">
        <h3>${t.name}${t.version ? ` ${t.version}` : ""}</h3>
        ${t.error && html`<p class="bad-text">${t.error}</p>`}
        ${t.differs.map((said) => html`<p class="warn-text">${said}</p>`)}
        <dl class="facts">
          <div><dt>code</dt><dd><${Digest} digits=${t.source_digest} /></dd></div>
          <div><dt>model</dt><dd><${Digest} digits=${t.layout_digest} /></dd></div>
        </dl>
      </div>`)}
  <//>`;

const Digest = ({ digits }) => (digits ? html`<code class="whole">${groups(digits).join(" ")}</code>` : "not known");

const Assignments = ({ device }) => html`
  <${Section} id="assignments" title="Last assignments" aside=${device.updates ? `${plural(device.updates, "update")} in all, ${bytes(device.payload_up)} sent; its updates stay in: ${device.stays_text}` : ""} json=${link(`api/v1/devices/${device.device}`)}>
    ${device.assignments.length ? html`<${Table} label="Its last assignments" rows=${device.assignments} keyOf=${(a) => a.assignment_id} columns=${[
    { title: "Round", cell: (a) => html`<a href=${link(`runs/${a.run_id}?round=${a.round}`)}>${a.run_id}, ${a.round}</a>` },
    { title: "Outcome", cell: (a) => html`<${Outcome} outcome=${a.outcome}><${Because} reason=${reasonOf(a)} />${restarted(a)}<//>` },
    { title: "Assigned", right: true, cell: (a) => moment(a.assigned_at) },
    { title: "Answered after", right: true, cell: (a) => (a.arrived_at && a.assigned_at ? seconds(a.arrived_at - a.assigned_at) : "–") },
    { title: "Examples", right: true, cell: (a) => (a.examples ? count(a.examples) : "–") },
    { title: "Steps", right: true, cell: (a) => a.steps || "–" },
    ...(device.assignments.some((a) => a.work_reason) ? [{ title: "Why so many", cell: (a) => a.work_reason || "–" }] : []),
    ...(device.assignments.some((a) => a.residual_ratio !== null) ? [{ title: "Residual ÷ update", right: true, cell: (a) => share(a.residual_ratio) }] : []),
    { title: "Payload up", right: true, cell: (a) => bytes(a.payload_up) },
    { title: "Wire up", right: true, cell: (a) => bytes(a.wire_up) },
    { title: "Rate", right: true, cell: (a) => (a.up_bytes_s === null ? "–" : speed(8 * a.up_bytes_s)) },
  ]} /><${NotKnown} rows=${device.assignments} columns="Examples and Steps" />` : html`<p class="faint">It has had no assignment yet.${device.last_outcome ? html` Last: <${Last} device=${device} />` : ""}</p>`}
  <//>`;

const Deeds = ({ device }) => html`
  <${Section} id="deeds" title="Who decided about it" aside="newest first" json=${link(`api/v1/devices/${device.device}`)}>
    <${Table} label="What was done to it" rows=${device.actions} stacks columns=${[
    { title: "When", cell: (a) => moment(a.at) },
    { title: "Who", cell: (a) => a.who },
    { title: "What", cell: (a) => a.sentence },
  ]} />
  <//>`;
