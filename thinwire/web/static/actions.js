// What a person may do with a run beside pausing and stopping it now: a menu at the head of its page.
import { outcome, post } from "./api.js";
import { Dialog } from "./dialog.js";
import { ENDED, html, link, may, useState } from "./dom.js";
import { withoutReading } from "./live.js";
import { Refusal } from "./parts.js";

const TAG = "[a-z0-9\\-]{1,32}";

/** `gone`: no aggregator runs that would carry a command out. */
export const Actions = ({ run, gone }) => {
  const [dialog, open] = useState(null); // the dialog that is open
  const [said, say] = useState("");
  const [error, fail] = useState(null);
  const over = ENDED.includes(run.status), path = `runs/${run.run_id}`;
  const send = async (verb, body, done) => {
    fail(null);
    say(["extend", "delete", "stop-after-round"].includes(verb) ? "sent to the aggregator" : "saving…");
    try {
      const answer = await post(`${path}/${verb}`, body);
      const waits = (verb === "extend" || verb === "delete") && !(await outcome(answer.command));
      say(waits ? "the aggregator has not answered yet; the command stays" : done);
      return !waits;
    } catch (problem) {
      say("");
      fail(problem);
      return false;
    }
  };
  const close = () => open(null);
  const item = (name, act, tone = "", disabled = false) => html`<li><button type="button" class=${`tool ${tone}`} disabled=${disabled} onClick=${(event) => {
    const menu = event.target.closest("details");
    menu.open = false;
    menu.querySelector("summary").focus(); // a dialog gives the focus back to where it was
    act();
  }}>${name}</button></li>`;
  return html`
    <details class="actions">
      <summary class="tool">More</summary>
      <ul>
        ${!over && run.source === "devices" && run.status !== "preparing" ? item("Stop after the round", () => send("stop-after-round", null, "it stops when its round closes"), "", gone) : null}
        ${over && run.source === "devices" ? item("Add rounds…", () => open("extend"), "", gone) : null}
        ${item("Tags…", () => open("tags"))}
        ${over ? item(run.archived_at ? "Take out of the archive" : "Archive", () => send(run.archived_at ? "unarchive" : "archive", null, run.archived_at ? "it is in the lists again" : "archived")) : null}
        ${over && may("admin") ? item("Delete…", () => open("delete"), "bad", gone) : null}
      </ul>
    </details>
    ${said && html`<span class="faint" role="status">${said}</span>`}
    ${error && html`<${Refusal} error=${error} />`}
    ${dialog === "extend" && html`<${Extend} run=${run} close=${close} send=${send} />`}
    ${dialog === "tags" && html`<${Tags} name=${run.run_id} known=${run.tags ?? []} close=${close} send=${send} />`}
    ${dialog === "delete" && html`<${Delete} run=${run} close=${close} send=${send} />`}`;
};

/** Values of a plan, in TOML's notation, by the key `section.key` before the first "=" of a line. */
const setsOf = (text) => Object.fromEntries(text.split("\n").filter((line) => line.trim()).map((line) => {
  const [key, ...value] = line.split("=");
  return [key.trim(), value.join("=").trim()];
}));

const Extend = ({ run, close, send }) => {
  const [rounds, setRounds] = useState(String(run.rounds_total));
  const [keys, setKeys] = useState("");
  const submit = (event) => {
    event.preventDefault();
    close();
    send("extend", { rounds: Number(rounds), sets: setsOf(keys) }, `${rounds} more rounds are queued`);
  };
  return html`<${Dialog} id="extend" title=${`More rounds for ${run.run_id}`} close=${close}>
    <form class="form" onSubmit=${submit}>
      <p>Versions and round numbers go on. Devices begin with residual 0, and the learning rate's schedule keeps its rounds.</p>
      <label class="field"><span>More rounds</span><input data-first type="number" min="1" required value=${rounds} onInput=${(event) => setRounds(event.target.value)} /></label>
      <label class="field"><span>Keys to change</span><textarea rows="2" spellcheck=${false} aria-describedby="keys-hint" value=${keys} onInput=${(event) => setKeys(event.target.value)}></textarea>
        <small id="keys-hint" class="faint">one a line, as local.lr = 0.05; a key that decided the closed rounds is refused</small></label>
      <div class="buttons"><button type="button" class="tool" onClick=${close}>Cancel</button><button class="tool go">Add rounds</button></div>
    </form><//>`;
};

/** The tags of a run or a device, as `send(verb, body, done)` changes them. */
export const Tags = ({ name, known, close, send }) => {
  const [text, setText] = useState(known.join(" "));
  const submit = (event) => {
    event.preventDefault();
    const wanted = text.split(/\s+/).filter(Boolean);
    close();
    send("tags", { add: wanted.filter((tag) => !known.includes(tag)), remove: known.filter((tag) => !wanted.includes(tag)) }, `tags: ${wanted.join(" ") || "none"}`);
  };
  return html`<${Dialog} id="tags" title=${`Tags of ${name}`} close=${close}>
    <form class="form" onSubmit=${submit}>
      <label class="field"><span>Tags, with spaces between them</span><input data-first type="text" pattern=${`\\s*(${TAG}(\\s+|$))*`} title="each of a to z, 0 to 9 and -, at most 32" value=${text} onInput=${(event) => setText(event.target.value)} /></label>
      <div class="buttons"><button type="button" class="tool" onClick=${close}>Cancel</button><button class="tool go">Save</button></div>
    </form><//>`;
};

const Delete = ({ run, close, send }) => {
  const [repeated, repeat] = useState("");
  const submit = async (event) => {
    event.preventDefault();
    close();
    if (await withoutReading(() => send("delete", { run_id: repeated }, "deleted"))) location.assign(link(""));
  };
  return html`<${Dialog} id="delete" title=${`Delete ${run.run_id}?`} close=${close}>
    <form class="form" onSubmit=${submit}>
      <p>Its models, rounds, updates and events are deleted, and nothing brings them back. Its row, the audit log and the privacy ledger stay.</p>
      <label class="field"><span>Repeat its name</span><input data-first type="text" autocomplete="off" value=${repeated} onInput=${(event) => repeat(event.target.value)} /></label>
      <div class="buttons"><button type="button" class="tool" onClick=${close}>Cancel</button><button class="tool bad" disabled=${repeated !== run.run_id}>Delete</button></div>
    </form><//>`;
};
