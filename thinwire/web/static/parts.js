// Small pieces that every page uses.
import { DROPS, html, useEffect, useRef, useState } from "./dom.js";
import { count } from "./format.js";

const PATHS = {
  check: "M3.5 8.5l3 3 6-7",
  clock: "M8 4.5V8l2.5 1.5M8 2a6 6 0 100 12A6 6 0 008 2z",
  cross: "M4 4l8 8M12 4l-8 8",
  back: "M6.5 4L3 7.5 6.5 11M3 7.5h6a3.5 3.5 0 013.5 3.5v1",
  dots: "M3.5 8h.01M8 8h.01M12.5 8h.01",
  play: "M5.5 3.5v9l7-4.5z",
  pause: "M5.5 4v8M10.5 4v8",
  stop: "M4.5 4.5h7v7h-7z",
  wait: "M5 2.5h6M5 13.5h6M5.5 2.5c0 3.5 5 3.5 5 5.5s-5 2-5 5.5M10.5 2.5c0 3.5-5 3.5-5 5.5s5 2 5 5.5",
  alert: "M8 2.5l6 11H2zM8 6.5v3M8 11.5v.01",
  dash: "M4 8h8",
  sun: "M8 5a3 3 0 100 6 3 3 0 000-6M8 1v1.5M8 13.5V15M1 8h1.5M13.5 8H15M3 3l1 1M12 12l1 1M13 3l-1 1M4 12l-1 1",
  moon: "M13 9.5A5.5 5.5 0 016.5 3a5.5 5.5 0 106.5 6.5z",
  left: "M10 3L5 8l5 5",
  right: "M6 3l5 5-5 5",
  down: "M8 2.5v8M4.5 7.5L8 11l3.5-3.5M3 13.5h10",
  table: "M2.5 3.5h11v9h-11zM2.5 6.5h11M2.5 9.5h11M6.5 6.5v6",
  chart: "M2.5 13.5h11M4.5 11V7M8 11V3.5M11.5 11V8.5",
  away: "M2 8a6 6 0 0110.2-4.3M14 8a6 6 0 01-10.2 4.3M3 13L13 3",
  mail: "M2 4h12v8H2zM2 4.5l6 4.5 6-4.5",
  plus: "M8 3.5v9M3.5 8h9",
  find: "M7 2.5a4.5 4.5 0 100 9 4.5 4.5 0 000-9M10.3 10.3l3.2 3.2",
  copy: "M5.5 5.5h7v8h-7zM3.5 10.5v-8h7",
};

export const Icon = ({ name }) => html`
  <svg class="icon" viewBox="0 0 16 16" aria-hidden="true" focusable="false"><path d=${PATHS[name]} /></svg>`;

const STATUS = {
  preparing: "dots",
  queued: "dots",
  waiting: "wait",
  running: "play",
  paused: "pause",
  done: "check",
  failed: "cross",
  stopped: "stop",
};

export const Status = ({ status }) => html`
  <span class=${`status is-${status}`}><${Icon} name=${STATUS[status] || "dots"} />${status}</span>`;

/** How many rounds made a step, of those of the plan; a round that closed without one is beside. */
export const Made = ({ run }) => {
  const lost = run.rounds_closed - run.version;
  return html`<span>${count(run.version)}<small> / ${count(run.rounds_total)}</small>${lost > 0 ? html`<small class="below">${count(lost)} without a step</small>` : ""}</span>`;
};

export const OUTCOMES = {
  selected: ["dots", "selected"],
  accepted: ["dots", "arrived"],
  aggregated: ["check", "aggregated"],
  "aggregated-late": ["clock", "aggregated late"],
  dropped: ["back", "dropped"],
  failed: ["cross", "failed"],
  over: ["dash", "ended first"],
  none: ["dash", "not selected"],
};

/** An outcome as icon, word and colour: never by colour alone. */
export const Outcome = ({ outcome, children }) => {
  const [icon, word] = OUTCOMES[outcome] || ["dash", outcome];
  return html`<span class=${`outcome is-${outcome}`}><${Icon} name=${icon} /><span>${word}${children}</span></span>`;
};

/** Why an update was dropped or an assignment failed, or why an aggregated one counts for less or was chosen. */
export const reasonOf = (update) => update.reason || update.weight_reason;

/** A reason behind an outcome: the code of a drop as its sentence, with the code as its title. */
export const Because = ({ reason }) => reason && html`<span class="because" title=${DROPS[reason] ? reason : ""}>: ${DROPS[reason] ?? reason}</span>`;

/** Of an answer with which a device began the run again: what it had found of its state. */
export const restarted = (update) =>
  (update.state_lost ? `, restarted (state ${update.state_lost})` : "") + (update.clipped?.length ? `, clipped (${update.clipped.join(", ")})` : "");

/** One of a few, as a row of radio buttons. */
export const Switch = ({ label, name, options, value, choose }) => html`
  <fieldset class="switch">
    <legend class="unseen">${label}</legend>
    ${options.map(([key, text]) => html`
      <label class=${key === value ? "chosen" : ""}>
        <input type="radio" name=${name} value=${key} checked=${key === value} onChange=${() => choose(key)} />
        <span>${text}</span>
      </label>`)}
  </fieldset>`;

/** A section with its title, what stands beside it, and the way to its numbers: as a table, CSV and JSON. */
export const Section = ({ id, title, aside, table, setTable, csv, json, children, wide }) => html`
  <section class=${`block${wide ? " wide" : ""}`} aria-labelledby=${`${id}-title`} id=${id}>
    <header>
      <h2 id=${`${id}-title`}>${title}</h2>
      <div class="aside">${aside}</div>
      <div class="tools">
        ${setTable && html`
          <button type="button" class="tool" onClick=${() => setTable(!table)}
            title=${table ? "Show the chart" : "Show the numbers"}>
            <${Icon} name=${table ? "chart" : "table"} />${table ? "Chart" : "Table"}
          </button>`}
        ${csv && html`<a class="tool" href=${csv} aria-label=${`CSV of ${title}`}>CSV</a>`}
        ${json && html`<a class="tool" href=${json} aria-label=${`JSON of ${title}`}>JSON</a>`}
      </div>
    </header>
    ${children}
  </section>`;

/** The heading of a column by which a table is sorted: the chosen one turns round, another begins rising, or `falling`. */
export const Heading = ({ column, sort, up, order }) => {
  const here = sort === column.key;
  return html`
    <th scope="col" role="columnheader" class=${column.right ? "right" : ""} aria-sort=${here ? (up ? "ascending" : "descending") : "none"}>
      <button type="button" class=${here ? "sort here" : "sort"} onClick=${() => order(column.key, column.falling)}>${column.title}<i aria-hidden="true">${here ? (up ? "▲" : "▼") : ""}</i></button></th>`;
};

/** Rows: [{key, title, right, cell(row)}]. Scrolls sideways by itself, never the whole page; where it `stacks`, a narrow
 * screen shows each row as a block of its own, with two cells a line for "pairs" (the roles are said, for such a layout
 * takes them away). With `sorted` ({sort, up, order}) each heading is a button that sorts by its column; where the
 * headings are not seen, there is a list of them. */
export const Table = ({ label, columns, rows, empty, rowClass, stacks, keyOf, sorted }) => html`
  ${sorted && stacks && html`<p class="order"><label>Sort by <select value=${sorted.sort} onChange=${(event) => sorted.order(event.target.value)}>
    ${columns.map((c) => html`<option value=${c.key}>${c.title}</option>`)}</select></label>
    <button type="button" class="tool" aria-label=${sorted.up ? "sorted from the lowest; reverse the order" : "sorted from the highest; reverse the order"} onClick=${() => sorted.order(sorted.sort)}>${sorted.up ? "▲" : "▼"}</button></p>`}
  <div class=${stacks === true ? "scroll tall" : "scroll"} tabindex="0" role="region" aria-label=${label}>
    <table class=${stacks === "pairs" ? "stack pairs" : stacks ? "stack" : ""} role="table">
      <thead role="rowgroup"><tr role="row">${columns.map((c) => (sorted ? html`<${Heading} key=${c.key} column=${c} ...${sorted} />` : html`<th scope="col" role="columnheader" class=${c.right ? "right" : ""}>${c.title}</th>`))}</tr></thead>
      <tbody role="rowgroup">
        ${rows.map((row) => html`
          <tr role="row" key=${keyOf ? keyOf(row) : undefined} class=${rowClass ? rowClass(row) : ""}>
            ${columns.map((c, i) => (i === 0
              ? html`<th scope="row" role="rowheader" class=${c.right ? "right" : ""}>${c.cell(row)}</th>`
              : html`<td role="cell" data-label=${typeof c.title === "string" ? c.title : ""} class=${c.right ? "right" : ""}>${c.cell(row)}</td>`))}
          </tr>`)}
        ${!rows.length && html`<tr role="row"><td role="cell" class="none" colspan=${columns.length}>${empty || "nothing yet"}</td></tr>`}
      </tbody>
    </table>
  </div>`;

/** Copies `text`, and says so. */
export const Copy = ({ text, label }) => {
  const [said, setSaid] = useState("");
  const timer = useRef(0);
  useEffect(() => () => clearTimeout(timer.current), []);
  const copy = async () => {
    const done = navigator.clipboard ? await navigator.clipboard.writeText(text).then(() => true, () => false) : false; // there is none without TLS
    setSaid(done ? "copied" : "not copied: select the text");
    timer.current = setTimeout(() => setSaid(""), 1500);
  };
  return html`
    <button type="button" class="tool" onClick=${copy} aria-label=${label || `Copy: ${text}`}>
      <${Icon} name=${said === "copied" ? "check" : "copy"} /><span>${said || "copy"}</span>
    </button><span class="unseen" role="status">${said}</span>`;
};

/** A command to paste. */
export const Command = ({ text, label }) => html`
  <div class="command">
    <pre tabindex="0" role="region" aria-label=${label || "command"}><code>${text}</code></pre>
    <${Copy} text=${text} />
  </div>`;

/** A refusal in its three lines, and what else is to be known, before the last one. */
export const Refusal = ({ error, children }) => html`
  <div class="notice bad" role="alert">
    <${Icon} name="alert" />
    <div><strong>${error.message}</strong>${error.why && html`<p>${error.why}</p>`}${children && html`<p>${children}</p>`}${error.hint && html`<p>Try: ${error.hint}</p>`}</div>
  </div>`;

/** Two buttons and what is shown; a button without an action is disabled. */
export const Pager = ({ label, said, before, after, words }) => html`
  <p class="pager" role="group" aria-label=${label}>
    <button type="button" class="tool" disabled=${!before} onClick=${() => before()}><${Icon} name="left" />${words[0]}</button>
    <span class="faint" role="status">${said}</span>
    <button type="button" class="tool" disabled=${!after} onClick=${() => after()}>${words[1]}<${Icon} name="right" /></button>
  </p>`;
