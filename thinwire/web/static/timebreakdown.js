// The time breakdown of a run or a round: the seconds of each stage, and which clients the round waited for.
import { html } from "./dom.js";
import { plural, seconds } from "./format.js";

/** The stages that took any time as one line, with the requests and the round trips within them. */
export const TimeBreakdown = ({ of, along, waited }) => {
  const uncounted = listed(of.uncounted, {});
  const more = { waiting: waited?.length ? `for ${few(waited)}` : "" };
  return html`
    <p class="breakdown faint">Where it went${along && `, along ${along}`}: ${listed(of.stages, more) || "it took no time"}.${exchange(of)}${uncounted && ` In the aggregator, which a simulation's clock does not count: ${uncounted}.`}</p>`;
};

/** The same as a bar, in the colours of the rounds' picture; the line under it has the numbers. */
export const TimeBar = ({ stages }) => html`
  <div class="time-bar" role="img" aria-label="Share of each stage in the time, as the line below lists them">
    ${Object.entries(stages).filter(([, took]) => took > 0).map(([name, took]) => html`
      <i key=${name} class=${`swatch ${name}`} style=${{ flexGrow: took * 1000 }} title=${`${name} ${seconds(took)}`}></i>`)}</div>`;

/** What took no time is left out; `more`: what stands behind a stage. */
const listed = (stages, more) => Object.entries(stages).filter(([, took]) => took >= 0.005)
  .map(([name, took]) => `${name} ${seconds(took)}${more[name] ? ` (${more[name]})` : ""}`).join(" · ");

/** Round trips are no stage of their own: they lie in downloads, uploads and the rest. */
const exchange = ({ requests, rtt_s, trips_s }) => (rtt_s ? ` Round trips within these: ${plural(requests, "request")} × ${seconds(rtt_s)} = ${seconds(trips_s)}.` : requests ? ` ${plural(requests, "request")}.` : "");

const few = (names) => (names.length > 3 ? `${names.slice(0, 2).join(", ")} and ${names.length - 2} more` : names.join(", "));
