// The audit log: who did what, the latest first, a page at a time.
import { get } from "./api.js";
import { html, link, useEffect } from "./dom.js";
import { count, plural, when } from "./format.js";
import { Gone } from "./frame.js";
import { serverNow, useReading } from "./live.js";
import { Pager, Refusal, Section, Table } from "./parts.js";
import { useQuery } from "./query.js";

const PAGE = 50;

export const AuditPage = ({ news }) => {
  const [first, choose] = useQuery("first", "0");
  const from = Math.max(0, Number.parseInt(first, 10) || 0);
  const { data, error } = useReading(() => get(`audit?first=${from}&count=${PAGE}`), news, [from]);
  useEffect(() => {
    document.title = "Audit log · Thinwire";
  }, []);
  if (!data) return error && news.reached ? html`<${Refusal} error=${error} />` : html`<${Gone} news=${news} /><p class="loading">Reading…</p>`;
  const turn = (to) => choose(to > 0 ? String(to) : "0");
  const last = Math.min(from + PAGE, data.total);
  return html`
    <${Gone} news=${news} error=${error} />
    <div class="head"><h1>Audit log</h1></div>
    <p class="sentence">${data.total ? `${plural(data.total, "action")}. A command that was typed on the aggregator's machine has the name of its system user.` : "Nothing has been done yet."}</p>
    <${Section} id="log" title="Actions" aside="latest first" csv=${link("api/v1/audit.csv")} json=${link(`api/v1/audit?first=${from}&count=${PAGE}`)}>
      <${Table} label="Actions, latest first" rows=${data.rows} stacks empty="none" columns=${[
    { title: "When", cell: (r) => when(r.at, serverNow()) },
    { title: "Who", cell: (r) => r.who },
    { title: "What", cell: (r) => html`${r.what.replaceAll("-", " ")} <${About} row=${r} />` },
    { title: "Detail", cell: (r) => r.detail || "–" },
  ]} />
      ${data.total > PAGE || from > 0 ? html`<${Pager} label="Pages of the audit log" said=${`${count(Math.min(from + 1, data.total))} to ${count(last)} of ${count(data.total)}`}
        before=${from > 0 && (() => turn(from - PAGE))} after=${last < data.total && (() => turn(from + PAGE))} words=${["Later", "Earlier"]} />` : null}
    <//>`;
};

/** The device or the run, as a link. */
const About = ({ row }) => {
  if (!row.about) return null;
  const place = row.what.includes("run") || row.what.startsWith("stop-after") ? "runs" : "devices";
  return html`<a href=${link(`${place}/${row.about}`)}>${row.about}</a>`;
};
