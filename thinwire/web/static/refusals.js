// Refused requests, with the reason that the other side is not told.
import { html, link } from "./dom.js";
import { moment, plural } from "./format.js";
import { Section, Table } from "./parts.js";

const SHOWN = 5;

const COLUMNS = [
  { title: "When", cell: (r) => moment(r.at) },
  { title: "From", cell: (r) => html`<code>${r.address}</code>` },
  { title: "Called itself", cell: (r) => r.name || "–" },
  { title: "Why", cell: (r) => (r.kind === "join" ? `invitation ${r.why}` : r.why) },
  { title: "Was told", cell: (r) => html`<span class="faint">${r.told === r.why ? "the same" : r.told}</span>` },
];

export const Refusals = ({ rows }) => html`
  <${Section} id="refusals" title="Refused" aside="What they call themselves proves nothing." json=${link("api/v1/refusals")}>
    <${Table} label="Refusals of the device API" rows=${rows.slice(0, SHOWN)} stacks columns=${COLUMNS} />
    ${rows.length > SHOWN ? html`<details class="more"><summary>${plural(rows.length - SHOWN, "earlier one")}</summary>
      <${Table} label="Earlier refusals of the device API" rows=${rows.slice(SHOWN)} stacks columns=${COLUMNS} /></details>` : null}
  <//>`;
