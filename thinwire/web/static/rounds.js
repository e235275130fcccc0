// The rounds as a strip to choose from, and the chosen one as a Gantt chart of its clients.
import { AssignedFor } from "./assignments.js";
import { html, link, useEffect, useRef } from "./dom.js";
import { bytes, seconds, share } from "./format.js";
import { Gantt, STAGES } from "./gantt.js";
import { HeatMap, MAX_BARS } from "./heat.js";
import { useRounds } from "./roundtable.js";
import { Because, Icon, Outcome, Section, Table, reasonOf, restarted } from "./parts.js";
import { useTable } from "./query.js";
import { NotKnown, Phases } from "./secure.js";
import { TimeBreakdown } from "./timebreakdown.js";

const SHOWN = 60; // rounds in the strip at once
const MOST_ROWS = 200; // of a table, which a browser draws at once
const NAMED = 8; // clients that are named with the reason why they are not selected

export const Rounds = ({ run, opened, rounds, round, worst, news, still, chosen, choose }) => {
  const [table, setTable] = useTable("gantt");
  const last = opened;
  const newest = (rounds.find((r) => !r.reason) ?? rounds.at(-1)).round; // the round that takes replies; rounds after it may have assignments already
  const number = Math.min(last, Math.max(1, Number.parseInt(chosen, 10) || newest));
  const first = Math.max(1, Math.min(last - SHOWN + 1, number - SHOWN / 2));
  const strip = useRounds(run, rounds, first, Math.min(last, first + SHOWN - 1), news);
  const drawn = useRef([]); // while the rounds around another one are read, those that were there stay, and the focus with them
  drawn.current = strip.rows ?? drawn.current;
  const pick = (n) => {
    const found = n === null ? newest : Math.min(last, Math.max(1, n));
    choose(found === newest ? null : String(found));
  };
  const shown = round?.round === number ? round : null;
  return html`
    <${Section} id="rounds" title=${`Round ${number}`} table=${table} setTable=${setTable} wide
      aside=${html`<${Steps} number=${number} last=${last} following=${chosen === null} pick=${pick} />`}
      csv=${link(`api/v1/runs/${run.run_id}/updates.csv?round=${number}`)} json=${link(`api/v1/runs/${run.run_id}/rounds/${number}`)}>
      <${Strip} rounds=${drawn.current} last=${last} number=${number} pick=${pick} />
      ${shown ? html`<${Chosen} run=${run} round=${shown} strip=${strip.rows ?? []} still=${still} table=${table} pick=${pick} />` : html`<p class="loading">Reading…</p>`}
      ${worst?.length > 1 && html`<${Worst} rounds=${worst} number=${number} pick=${pick} />`}
    <//>`;
};

/** The chosen round: sentences, its phases if it is secure, and its clients as a table or as bars, of many a heat map. */
const Chosen = ({ run, round, strip, still, table, pick }) => {
  const buffered = run.plan.cohort?.mode === "buffered";
  const many = round.updates.length + round.late_aggregated.length > MAX_BARS;
  return html`
    <${Said} run=${run} round=${round} buffered=${buffered} />
    ${round.phases.length > 0 && html`<${Phases} round=${round} still=${still} />`}
    ${table && html`<${Assignments} round=${round} />`}
    ${!table && many && html`<${HeatMap} run=${run} rounds=${strip} number=${round.round} pick=${pick} />`}
    ${!table && html`<${Gantt} round=${round} buffered=${buffered} still=${still} />`}
    <${AssignedFor} round=${round} />`;
};

/** The rounds that took longest, each with the device that it waited for, as links that open them above. */
const Worst = ({ rounds, number, pick }) => {
  const open = (event, n) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    pick(n);
    document.getElementById("rounds").scrollIntoView({ block: "start" });
  };
  return html`
    <h3 id="worst-title">Slowest rounds</h3>
    <ol class="worst" aria-labelledby="worst-title">
      ${rounds.map((r) => html`<li key=${r.round}>
        <a href=${`?round=${r.round}`} aria-current=${r.round === number ? "true" : "false"} onClick=${(event) => open(event, r.round)}>Round ${r.round}</a>${" "}
        <b>${seconds(r.seconds)}</b>${waited(r)}</li>`)}
    </ol>`;
};

const waited = ({ slowest, waited_for, waited_count }) => {
  const more = waited_count - waited_for.length;
  const names = waited_count ? `${waited_for.join(", ")}${more ? ` and ${more} more` : ""}` : slowest;
  return names && html`<span class="faint">, waited for ${names}</span>`;
};

const Steps = ({ number, last, following, pick }) => html`
  <span class="steps" role="group" aria-label="Choose a round">
    <button type="button" class="tool square" disabled=${number <= 1} onClick=${() => pick(number - 1)} aria-label="Round before"><${Icon} name="left" /></button>
    <button type="button" class="tool square" disabled=${number >= last} onClick=${() => pick(number + 1)} aria-label="Round after"><${Icon} name="right" /></button>
    <button type="button" class="tool" aria-pressed=${following} onClick=${() => pick(null)}>Newest</button>
  </span>`;

const MARKS = { "too-few": "cross", aborted: "cross", deadline: "clock", stopped: "stop", "": "dots" };

/** A column a round, as high as it was long; arrow keys move along it. */
const Strip = ({ rounds, last, number, pick }) => {
  const box = useRef(null);
  const longest = Math.max(...rounds.map((r) => r.seconds ?? 0), 0.001);
  const moved = useRef(false);
  useEffect(() => {
    const current = box.current?.querySelector('[aria-pressed="true"]');
    if (!current) return;
    if (moved.current) current.focus();
    else box.current.scrollLeft = current.offsetLeft - box.current.clientWidth / 2;
    moved.current = false;
  }, [number, rounds.length, rounds[0]?.round]);
  const key = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -last, End: last }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = Math.min(last, Math.max(1, number + step));
    if (next === number) return; // else the next round that opens would take the focus
    moved.current = true;
    pick(next);
  };
  return html`
    <div class="strip" ref=${box} role="group" aria-label="Rounds, as high as they were long" onKeyDown=${key}>
      ${rounds.map((r) => html`
        <button type="button" key=${r.round} tabindex=${r.round === number ? 0 : -1} aria-pressed=${r.round === number}
          class=${`is-${r.reason || "open"}`} title=${describe(r)} aria-label=${describe(r)} onClick=${() => pick(r.round)}>
          <span class="column"><i style=${{ height: `${r.seconds === null ? 100 : Math.max(6, (100 * r.seconds) / longest)}%` }}></i></span>
          <span class="mark">${mark(r)}</span>
          <span class="n">${r.round}</span>
        </button>`)}
    </div>`;
};

const mark = (r) => {
  const name = MARKS[r.reason] ?? (r.failed ? "cross" : r.late ? "clock" : r.dropped ? "back" : null);
  return name && html`<${Icon} name=${name} />`;
};

const describe = (r) => (r.reason ? `Round ${r.round}, ${seconds(r.seconds)}: ${r.closing}` : `Round ${r.round}, open`);

const Said = ({ run, round, buffered }) => {
  const notSelected = Object.entries(round.not_selected).map(([name, why]) => html`<b>${name}</b> (${why})`);
  if (notSelected.length > NAMED) notSelected.splice(NAMED - 1, notSelected.length, `${notSelected.length - NAMED + 1} more`);
  if (round.not_sampled) notSelected.push(`${round.not_sampled} not sampled`);
  const deadline = `${buffered ? "Deadline of each assignment" : "Deadline"} ${round.deadline_reason || seconds(round.deadline_s)}`;
  const least = buffered ? `At least ${round.min_updates} of its updates must be right` : `At least ${round.min_updates} of ${round.selected.length} must answer`;
  const drawn = round.sampling && ` ${round.sampling[0].toUpperCase()}${round.sampling.slice(1)}.`;
  return html`
    <p class="why">${round.why}</p>
    ${round.reason && html`<${TimeBreakdown} of=${round} along=${round.phases.length ? "" : round.slowest} waited=${round.waited_for} />`}
    <p class="closing faint">${round.reason && html`Closed because ${round.closing}. `}<${Codecs} round=${round} plan=${run.plan} /> ${deadline}. ${least}.${drawn}${notSelected.length ? html` Not selected: ${notSelected.map((said, i) => html`${i ? "; " : ""}${said}`)}.` : ""}</p>`;
};

/** The codec of a round; of a ladder the number of clients with each codec, and of a secure round the lattice. */
const Codecs = ({ round, plan }) => (plan.secure?.enabled
  ? `Lattice ${plan.privacy?.mode === "distributed" ? "with noise" : `of ${plan.secure.bits} bits`}, support ${plan.secure.support}.` : round.codecs.length
  ? html`Codecs ${round.codecs.map(([codec, count], i) => html`${i ? ", " : ""}<code>${codec}</code> (${count})`)}.`
  : html`Codec <code>${round.codec}</code>.`);

const Assignments = ({ round }) => html`
  <${Table} label=${`Assignments of round ${round.round}`} rows=${[...round.updates, ...round.late_aggregated].slice(0, MOST_ROWS)} columns=${[
    { title: "Client", cell: (u) => (u.round === round.round ? u.device : `${u.device} (round ${u.round})`) },
    { title: "Outcome", cell: (u) => html`<${Outcome} outcome=${u.outcome}><${Because} reason=${reasonOf(u)} />${restarted(u)}<//>` },
    ...STAGES.filter((stage) => stage !== "redelivery" && stage !== (round.updates.some((u) => u.not_known) ? "unaccounted" : "work")).map((stage) => ({ title: stage, right: true, cell: (u) => took(u, stage) })),
    { title: "Examples", right: true, cell: (u) => u.examples || "–" },
    { title: "Steps", right: true, cell: (u) => u.steps || "–" },
    { title: "Norm", right: true, cell: (u) => (u.norm === null ? "–" : u.norm.toPrecision(3)) },
    { title: "Residual ÷ update", right: true, cell: (u) => share(u.residual_ratio) },
    { title: "Payload up", right: true, cell: (u) => bytes(u.payload_up) },
    { title: "Requests", right: true, cell: (u) => u.requests || "–" },
  ]} />
  ${round.updates.length + round.late_aggregated.length > MOST_ROWS && html`<p class="note">The first ${MOST_ROWS}; the CSV has all ${round.updates.length + round.late_aggregated.length}.</p>`}
  <${NotKnown} rows=${round.updates} columns="download to commit, Examples, Steps, Norm and Residual" />`;

const took = (update, stage) => {
  const found = update.stretches.filter((s) => s.stage === stage);
  return found.length ? seconds(found.reduce((sum, s) => sum + s.end_s - s.begin_s, 0)) : "–";
};
