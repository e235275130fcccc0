// The rounds of a run as rows of a table: the newest ones are here, pages of earlier ones are read.
import { get } from "./api.js";
import { html, useState } from "./dom.js";
import { count } from "./format.js";
import { useReading } from "./live.js";
import { Pager, Refusal, Table } from "./parts.js";

const PAGE = 50;

/** The rounds from `from` to `to`: from `rounds`, where they have them all, else from the server. */
export const useRounds = (run, rounds, from, to, news) => {
  const here = !rounds.length || rounds[0].round <= from;
  const { data, error } = useReading(async () => (here ? null : { from, rows: await get(`runs/${run.run_id}/round-summaries?from=${from}&to=${to}`) }), here ? {} : news, [run.run_id, from, to, here]);
  const rows = here ? rounds.filter((r) => r.round >= from && r.round <= to) : data?.from === from ? data.rows : null;
  return { rows, error };
};

/** A table of rounds, the newest first, a page at a time. */
export const RoundTable = ({ label, run, opened, rounds, news, only, columns }) => {
  const [back, setBack] = useState(0); // pages
  const to = Math.max(1, opened - back * PAGE);
  const from = Math.max(1, to - PAGE + 1);
  const { rows, error } = useRounds(run, rounds, from, to, news);
  const shown = (rows ?? []).filter(only ?? (() => true)).reverse();
  return html`
    ${error && !rows ? html`<${Refusal} error=${error} />` : html`<${Table} label=${label} rows=${shown} columns=${columns} keyOf=${(r) => r.round} empty=${rows ? undefined : "Reading…"} />`}
    ${opened > PAGE && html`<${Pager} label=${`Pages of: ${label}`} said=${`Rounds ${count(from)} to ${count(to)} of ${count(opened)}`} before=${back > 0 && (() => setBack(back - 1))} after=${from > 1 && (() => setBack(back + 1))} words=${["Newer", "Older"]} />`}`;
};
