// A round's clients on one axis of time: what each did when, the deadline, and the moment at which the round closed.
import { Component, DROPS, html, useState } from "./dom.js";
import { count, seconds } from "./format.js";
import { useTime } from "./live.js";
import { MAX_BARS } from "./heat.js";
import { Outcome, reasonOf, restarted } from "./parts.js";

export const STAGES = ["delivery", "redelivery", "download", "queue", "load", "evaluate", "train", "encode", "commit", "work", "unaccounted", "upload"]; // as thinwire/store/round_timing.py names them
const RARE = ["redelivery", "unaccounted", "work"]; // they stand in the legend only where one is drawn
const FAR = 2; // an answer that came later than so many times the round's length runs out of the picture
const ROWS = [40, 20]; // rows at first, on a wide screen and on a narrow one: of more clients, those that the round waited for
const NARROW = matchMedia("(max-width: 640px)");
const STEP = 1.1; // by how much the axis of an open round grows at once
const NEAR = 1.6; // a deadline farther away than so many times the round's length is not drawn to scale

export const Gantt = ({ round, buffered, still }) => {
  const now = useTime(!round.reason, still);
  const open = !round.reason;
  const since = round.turn_at ?? round.opened_at; // null: it was selected ahead, and its time does not run yet
  const length = Math.max(0.05, open ? now - since : round.seconds);
  const deadline = round.deadline_s + round.missed_s; // it moves on with the run's clock, which stood still while nobody was there
  const last = round.updates.reduce((most, u) => u.stretches.reduce((later, s) => Math.max(later, s.end_s), most), length); // of thousands of clients: no call takes so many arguments
  const wide = Math.min(last, length * FAR);
  const content = open ? STEP ** Math.ceil(Math.log(wide) / Math.log(STEP)) : wide; // in steps, so that not every row is drawn at every tick
  const near = !buffered && round.turn_at !== null && deadline <= content * NEAR; // of a buffer each assignment has its own
  const span = Math.max(content, near ? deadline : 0) * 1.03;
  const said = `deadline ${seconds(round.deadline_s)}${round.missed_s ? ` + ${seconds(round.missed_s)} not counted` : ""}`;
  const at = axisOf(span);
  const drawn = new Set([...round.updates, ...round.late_aggregated].flatMap((u) => u.stretches.map((s) => s.stage)));
  const masked = round.phases.length > 0 || round.updates.some((u) => u.not_known); // nothing is known of what a client did between two messages
  const lines = [
    ...round.downtimes.map((a) => ["away", { left: `${at(a.begin_s)}%`, width: `${at(a.end_s) - at(a.begin_s)}%` }]),
    ...(near ? [["line deadline", { left: `${at(deadline)}%` }]] : []),
    ...(open ? [] : [["line closed", { left: `${at(round.seconds)}%` }]]),
  ];
  const [whole, setWhole] = useState(false);
  const rows = [...round.updates, ...round.late_aggregated];
  const most = ROWS[Number(NARROW.matches)];
  const shown = whole || rows.length <= most ? rows : urgent(rows, most);
  const codes = [...new Set(shown.map((u) => u.reason))].filter((code) => DROPS[code]);
  const axis = JSON.stringify([round.round, span, since, open, lines]);
  const draw = (u) => html`<${Row} key=${u.assignment_id} update=${u} axis=${axis} opened=${since} at=${at} span=${span} length=${length} open=${open} lines=${lines} now=${open && unanswered(u)} earlier=${u.round !== round.round} />`;
  return html`
    <div class="gantt">
      <div class="gantt-row axis" aria-hidden="true"><span></span>
        <span class="track">
          ${near ? html`<b class=${`flag deadline${at(deadline) > 60 ? " before" : ""}`} style=${{ left: `${at(deadline)}%` }}>${said}</b>`
            : buffered ? null : html`<b class="flag deadline far">${said} →</b>`}
        </span><span></span></div>
      <ul aria-label=${`Clients of round ${round.round}`}>
        ${shown.map(draw)}
      </ul>
      ${rows.length > most && html`<p class="pager">${rows.length <= MAX_BARS && html`<button type="button" class="tool" aria-expanded=${whole} onClick=${() => setWhole(!whole)}>${whole ? `Only the ${most} that it waited for` : `All ${count(rows.length)} clients`}</button>`}
        ${!whole && html`<span class="faint">${most} are drawn: those without an answer, and then the slowest</span>`}</p>`}
      <div class="gantt-row axis" aria-hidden="true"><span></span>
        <span class="track">${ticks(span).map((t) => html`<b class="tick" style=${{ left: `${at(t)}%` }}>${+t.toFixed(3)}${t ? "" : " s"}</b>`)}</span><span></span></div>
      <ul class="legend" aria-label="Colours">
        ${STAGES.filter((stage) => !RARE.includes(stage) || drawn.has(stage)).filter((stage) => !masked || stage === "delivery" || drawn.has(stage)).map((stage) => html`<li><i class=${`swatch ${stage}`}></i>${stage === "work" ? "delivered, at work" : stage}</li>`)}
        ${!drawn.has("work") && round.updates.some((u) => unanswered(u) && u.pulled_at) && html`<li><i class="swatch work"></i>delivered, at work</li>`}
        ${round.downtimes.length > 0 && html`<li><i class="swatch away"></i>downtime</li>`}
        ${!buffered && html`<li><i class="rule deadline"></i>deadline</li>`}
        <li><i class=${`rule ${open ? "now" : "closed"}`}></i>${!open ? "round closed" : still === null ? "now" : "the aggregator stopped here"}</li>
      </ul>
      ${codes.map((code) => html`<p class="note"><b>${code}</b>: ${DROPS[code]}.</p>`)}
    </div>`;
};

/** A row is drawn again only if its client or the axis changed, or if its bar grows with the time. */
class Row extends Component {
  shouldComponentUpdate(next) {
    return next.now || next.update !== this.props.update || next.axis !== this.props.axis || next.now !== this.props.now;
  }

  render(props) {
    return html`<${GanttRow} ...${props} />`;
  }
}

const GanttRow = ({ update, opened, at, span, length, open, lines, now, earlier }) => {
  const selected = at(Math.max(0, (update.assigned_at ?? opened) - opened));
  const bars = update.stretches.filter((s) => s.end_s > 0 && s.begin_s < span);
  const silent = !update.stretches.length;
  const taken = silent && unanswered(update) && update.pulled_at ? at(Math.max(0, update.pulled_at - opened)) : null;
  const failed = update.failed_at ? Math.min(length, update.failed_at - opened) : length;
  const until = taken ?? at(failed);
  const beyond = update.stretches.some((s) => s.end_s > span);
  return html`
    <li class=${`gantt-row is-${update.outcome}`} title=${tell(update)}>
      <span class="who">${update.device}${earlier ? html`<small> round ${update.round}</small>` : update.instead_of ? html`<small> for ${update.instead_of}</small>` : ""}</span>
      <span class="track" aria-hidden="true">
        ${lines.map(([name, style]) => html`<i class=${name} style=${style}></i>`)}
        ${now ? html`<i class="line now" style=${{ left: `${at(length)}%` }}></i>` : null}
        ${silent ? html`<i class=${`stage silent is-${update.outcome}`} style=${{ left: `${selected}%`, width: `${Math.max(0, until - selected)}%` }}></i>` : null}
        ${taken === null ? null : html`<i class="stage work" style=${{ left: `${taken}%`, width: `${Math.max(0, at(length) - taken)}%` }}></i>`}
        ${bars.map((s) => html`<i class=${`stage ${s.stage}`} style=${{ left: `${at(s.begin_s)}%`, width: `${at(s.end_s) - at(s.begin_s)}%` }}></i>`)}
        ${beyond ? html`<i class="beyond"></i>` : null}
      </span>
      <span class="end"><${Outcome} outcome=${update.outcome}>${detail(update, open)}<//></span>
      <span class="unseen">${tell(update)}</span>
    </li>`;
};

/** The place of a moment on an axis, in percent. */
const axisOf = (span) => (s) => Math.max(0, Math.min(100, (100 * s) / span));

const RANKS = ["aggregated", "accepted", "aggregated-late", "dropped", "failed", "over", "selected"]; // the later, the more a round waited for it

/** The rows that a round waited for most, in the order that they had. */
const urgent = (rows, most) => {
  const end = (u) => u.stretches.at(-1)?.end_s ?? 0;
  const worst = [...rows].sort((a, b) => RANKS.indexOf(b.outcome) - RANKS.indexOf(a.outcome) || end(b) - end(a)).slice(0, most);
  const kept = new Set(worst);
  return rows.filter((u) => kept.has(u));
};

/** Whether nothing has come of an assignment: it is waited for, or the run or the round ended first. */
const unanswered = (update) => update.outcome === "selected" || update.outcome === "over";

const detail = (update, open) => {
  if (update.aggregated_round && update.aggregated_round !== update.round) return `, into round ${update.aggregated_round}`;
  if (update.outcome === "selected") return !open ? ", no answer" : update.pulled_at ? ", at work" : "";
  if (reasonOf(update)) return `: ${reasonOf(update)}`;
  const last = update.stretches.at(-1);
  return last ? html`${restarted(update)} <span class="faint">${seconds(last.end_s)}</span>` : "";
};

const tell = (update) => {
  const did = update.stretches.map((s) => `${s.stage} ${seconds(s.end_s - s.begin_s)}`);
  const selected = [update.codec_reason && `assigned in ${update.codec}: ${update.codec_reason}`, update.work_reason, update.selection_reason && `selected in mid-round: ${update.selection_reason}`];
  if (!did.length && update.pulled_at) did.push(`delivery ${seconds(Math.max(0, update.pulled_at - update.assigned_at))}, no reply yet`);
  const said = `${update.device}, ${update.outcome}${reasonOf(update) ? ` (${DROPS[update.reason] ?? reasonOf(update)})` : ""}${did.length ? `: ${did.join(", ")}` : ""}`;
  return [said, ...selected.filter(Boolean)].join("; ");
};

const ticks = (span) => {
  const rough = span / 6;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  return Array.from({ length: Math.floor(span / step) + 1 }, (_, i) => i * step).filter((t) => t < span * 0.985);
};
