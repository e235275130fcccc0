// Where time went, as one line: the stages that took any, with requests x round trip and whom was waited for.
import { html } from "./dom.js";
import { plural, seconds, trip } from "./format.js";

const WORDS = { before: "before it was asked", between: "between its stages", asked: "until it was taken up", away: "no aggregator" };

export const Went = ({ went, along, waited }) => {
  const uncounted = listed(went.uncounted, {});
  const more = { trips: went.requests ? exchange(went) : "", waiting: waited?.length ? `for ${few(waited)}` : "" };
  return html`
    <p class="went faint">Where it went${along && `, along ${along}`}: ${listed(went.stages, more) || "it took no time"}.${uncounted && ` In the aggregator, which a simulation's clock does not count: ${uncounted}.`}</p>`;
};

/** What took no time is left out; `more`: what stands behind a stage. */
const listed = (stages, more) => Object.entries(stages).filter(([, took]) => took >= 0.005)
  .map(([name, took]) => `${WORDS[name] ?? name} ${seconds(took)}${more[name] ? ` (${more[name]})` : ""}`).join(" · ");

const exchange = ({ requests, rtt_s }) => `${plural(requests, "request")}${rtt_s ? ` × ${trip(rtt_s)}` : ""}`;

const few = (names) => (names.length > 3 ? `${names.slice(0, 2).join(", ")} and ${names.length - 2} more` : names.join(", "));
