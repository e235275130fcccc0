// The journal of a run as a live feed: what happened, newest first, filtered by kind and by words.
import { get } from "./api.js";
import { html, link, useEffect, useState } from "./dom.js";
import { bytes, moment, seconds } from "./format.js";
import { Refusal, Section, Table } from "./parts.js";
import { useQuery } from "./query.js";

const KEPT = 1000; // events in this tab
const SHOWN = 100;
const AGAIN_MS = 1000;
const GAP_MS = 250; // between two redraws
const STREAMS = 3; // of a browser's six connections to a host: over all its windows together
const READ_MS = 2000; // between two reads of a window that has no stream

/** Gives what frees a place for a stream, or null if other windows have them all. */
const takePlace = async () => {
  if (!navigator.locks) return () => {};
  for (let number = 0; number < STREAMS; number += 1) {
    const leave = await new Promise((got) => {
      navigator.locks.request(`thinwire-journal-${number}`, { ifAvailable: true }, (lock) => (lock ? new Promise((free) => { got(free); }) : got(null)));
    });
    if (leave) return leave;
  }
  return null;
};

/** The newest events while `on`: read once, then as they come; read again where the stream says that some are missed,
 * and every now and then where there is no place for a stream. */
const useEvents = (id, on) => {
  const [state, setState] = useState({ events: null, error: null });
  useEffect(() => {
    if (!on) return undefined;
    let source = null;
    let leave = null; // frees the place of the stream
    let taking = false;
    let over = false;
    let showing = 0; // the timers
    let rereading = 0;
    let reopening = 0;
    let reads = 0; // only the newest read counts
    let complete = false; // no read is under way, and the last one succeeded
    let fresh = [];
    const show = () => {
      showing = 0;
      if (!complete) return; // the read shows them
      const more = fresh;
      fresh = [];
      setState((old) => {
        const known = new Set((old.events ?? []).map((one) => one.id)); // the answer of a read may have them already
        return { events: [...(old.events ?? []), ...more.filter((one) => !known.has(one.id))].slice(-KEPT), error: null };
      });
    };
    const read = async () => {
      clearTimeout(rereading);
      if (document.hidden) return;
      const number = ++reads;
      complete = false;
      fresh = []; // the answer has these
      try {
        const events = await get(`runs/${id}/events`);
        if (number !== reads) return;
        const known = new Set(events.map((one) => one.id));
        const more = fresh.filter((one) => !known.has(one.id));
        fresh = [];
        complete = true;
        setState({ events: [...events, ...more].slice(-KEPT), error: null });
      } catch (error) {
        if (number !== reads) return;
        setState((old) => ({ ...old, error }));
        rereading = setTimeout(read, AGAIN_MS);
      }
    };
    const stop = () => {
      source?.close();
      source = null;
      leave?.();
      leave = null;
    };
    const turn = async () => {
      clearTimeout(reopening);
      if (document.hidden) stop();
      if (document.hidden || source || taking) return;
      taking = true;
      const free = await takePlace();
      taking = false;
      leave = free;
      if (over || document.hidden) stop();
      else if (free) follow();
      else {
        read();
        reopening = setTimeout(turn, READ_MS);
      }
    };
    const follow = () => {
      source = new EventSource(link(`api/v1/runs/${id}/events/stream`));
      source.addEventListener("open", read); // not before, so that nothing falls between the two
      source.addEventListener("reset", read);
      source.addEventListener("journal", (event) => {
        fresh.push(JSON.parse(event.data));
        showing ||= setTimeout(show, GAP_MS);
      });
      source.addEventListener("error", () => {
        if (source?.readyState !== EventSource.CLOSED) return; // the browser connects again
        stop(); // it was refused
        read();
        reopening = setTimeout(turn, AGAIN_MS);
      });
    };
    turn();
    document.addEventListener("visibilitychange", turn);
    return () => {
      over = true;
      reads += 1; // one that is under way is dropped
      [showing, rereading, reopening].forEach((timer) => clearTimeout(timer));
      stop();
      document.removeEventListener("visibilitychange", turn);
    };
  }, [id, on]);
  return state;
};

const UNITS = [[/_s$/, seconds], [/_bytes$/, bytes], [/_at$/, moment]]; // of a number, by the end of its field's name
const spaced = (name) => name.replaceAll("_", " ");
/** The name of an event as words: "Update dropped" of UpdateDropped. */
const titled = (name) => name.replace(/(?<=[a-z])[A-Z]/g, (letter) => ` ${letter.toLowerCase()}`);

const FEW = 3; // values of a list or a table that are written out
const scalar = (value) => (typeof value === "number" && !Number.isInteger(value) ? value.toPrecision(4) : /^[0-9a-f]{64}$/.test(value) ? `${value.slice(0, 12)}…` : `${value}`);

/** The fields that say something, as words: numbers with their unit and short texts, a long list by its length. */
const told = (fields) =>
  Object.entries(fields)
    .filter(([, value]) => value !== null && value !== "" && !(typeof value === "object" && !Object.keys(value).length))
    .map(([name, value]) => {
      const [end, shown] = (typeof value === "number" && UNITS.find(([one]) => one.test(name))) || [];
      if (shown) return `${spaced(name.replace(end, ""))} ${shown(value)}`;
      if (typeof value !== "object") return `${spaced(name)} ${scalar(value)}`;
      const inner = Object.entries(value);
      const few = inner.length <= FEW && inner.every(([, one]) => typeof one !== "object");
      const items = inner.map(([key, one]) => (Array.isArray(value) ? scalar(one) : `${key} ${scalar(one)}`));
      return `${spaced(name)} ${few ? items.join(", ") : `(${inner.length})`}`;
    })
    .join(" · ");

const COLUMNS = [
  { title: "When", cell: (one) => moment(one.at) },
  { title: "Event", cell: (one) => html`<b>${titled(one.event)}</b>` },
  { title: "Facts", cell: (one) => html`<span class="facts">${told(one.fields)}${one.why && html`<small class="below">${one.why}</small>`}</span>` },
];

export const Journal = ({ id }) => {
  const [open, setOpen] = useQuery("journal", "");
  const [kind, setKind] = useQuery("event", "");
  const [words, setWords] = useQuery("words", "");
  const { events, error } = useEvents(id, open === "open");
  const kinds = [...new Set((events ?? []).map((one) => one.event))].sort();
  const wanted = words.toLowerCase();
  const rows = (events ?? []).filter((one) => (!kind || one.event === kind) && (!wanted || `${JSON.stringify(one)} ${titled(one.event)} ${told(one.fields)}`.toLowerCase().includes(wanted)));
  return html`
    <${Section} id="journal" title="Journal" json=${link(`api/v1/runs/${id}/events`)}>
      <details class="more" open=${open === "open"} onToggle=${(event) => setOpen(event.target.open ? "open" : "")}><summary>Every decision of this run, as it is recorded</summary>
        ${error && html`<${Refusal} error=${error} />`}
        ${events === null ? html`<p class="loading">Reading…</p>` : html`
          <div class="filters">
            <label>Event <select value=${kind} onChange=${(event) => setKind(event.target.value)}>
              <option value="">all</option>${kinds.map((one) => html`<option value=${one} selected=${one === kind}>${titled(one)}</option>`)}</select></label>
            <label>Words <input type="search" value=${words} onInput=${(event) => setWords(event.target.value)} /></label>
            <span class="faint" role="status">${rows.length} of the newest ${events.length}</span>
          </div>
          <${Table} label="Events of this run, newest first" rows=${rows.slice(-SHOWN).reverse()} stacks keyOf=${(one) => one.id} columns=${COLUMNS} empty="none like this" />`}
      </details>
    <//>`;
};
