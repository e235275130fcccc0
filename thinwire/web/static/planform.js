// A form made from the JSON schema of a plan: a field for each key, with its meaning, its default and what is wrong.
import { html, useState } from "./dom.js";
import { plural } from "./format.js";
import { Icon } from "./parts.js";

const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
const OPEN = ["run", "local"]; // sections that every plan has something in
// Shown at once; what is set or wrong is shown too, and the others behind a button.
const COMMON = {
  run: ["task", "rounds", "init", "target", "metric", "seed"], cohort: ["clients", "wait_for", "min_updates", "deadline_s", "over_select", "late", "mode"],
  local: ["lr", "steps", "epochs", "batch", "optimizer", "momentum", "schedule"], uplink: ["codec", "feedback", "ladder"], downlink: ["codec"],
  server: ["optimizer", "lr", "momentum"], secure: ["enabled", "adversary", "max_corrupt", "max_dropout"], privacy: ["mode", "clip", "noise_multiplier", "target_epsilon", "delta", "budget"],
};
const WIDE = ["uplink.codec", "downlink.codec", "run.init"];

/** {name, about, keys: [field]} of each table of a plan. */
export const sectionsOf = (schema) =>
  Object.entries(schema.properties)
    .map(([name, said]) => [name, resolved(said, schema)])
    .filter(([, table]) => table.properties)
    .map(([name, table]) => ({ name, about: table.description ?? "", keys: fieldsOf(table, schema) }));

const resolved = (said, schema) => {
  const ref = said.$ref ?? said.allOf?.[0]?.$ref;
  return ref ? { ...schema.$defs[ref.split("/").pop()], ...("default" in said ? { default: said.default } : {}) } : said;
};

const fieldsOf = (table, schema) => Object.entries(table.properties).map(([key, said]) => fieldOf(key, said, schema, (table.required ?? []).includes(key)));

/** {key, about, fallback, needed, kind, words, inner}: how a key is typed. */
function fieldOf(key, said, schema, needed) {
  const kinds = (said.anyOf ?? [said]).map((one) => resolved(one, schema));
  const words = kinds.flatMap((one) => one.enum ?? (one.const === undefined ? [] : [one.const]));
  const has = (type) => kinds.some((one) => one.type === type && !one.enum && one.const === undefined);
  const table = kinds.find((one) => one.properties);
  const free = ["integer", "number", "string", "array"].some(has);
  const fallback = said.default ?? (table && !kinds.some((one) => one.type === "null") ? null : said.default);
  const kind = table ? "table"
    : has("object") ? "map"
      : has("array") && !has("integer") ? "lines"
        : kinds.length === 1 && has("boolean") ? "yes"
          : words.length && !free ? "one"
            : "text";
  return { key, about: said.description ?? "", fallback, needed, kind, words: [...words, ...(kind !== "yes" && has("boolean") ? [true, false] : [])],
    numeric: has("integer") || has("number"), list: has("array"), bool: has("boolean"), inner: table ? fieldsOf(table, schema) : [] };
}

const written = (value) => (value === undefined || value === null ? "" : Array.isArray(value) ? value.join("\n")
  : typeof value === "object" ? Object.entries(value).map(([name, inner]) => `${name} = ${inner}`).join("\n") : String(value));

/** What was typed, as a value of the plan; undefined for nothing. What is not right stays as it was typed, to be refused. */
function read(field, text) {
  const typed = text.trim();
  if (!typed) return undefined;
  if (field.kind === "lines") return typed.split("\n").map((line) => line.trim()).filter(Boolean).map((line) => (NUMBER.test(line) ? Number(line) : line));
  if (field.kind === "map") return Object.fromEntries(typed.split("\n").map((line) => line.split(/=(.*)/s)).filter(([name]) => name.trim()).map(([name, inner]) => [name.trim().replace(/^"|"$/g, ""), scalar(inner ?? "")]));
  if (field.bool && /^(true|false)$/.test(typed)) return typed === "true";
  if (field.numeric && NUMBER.test(typed)) return number(typed);
  return field.list ? typed.split(/[\n,]/).map((name) => name.trim()).filter(Boolean) : typed;
}

const scalar = (text) => (NUMBER.test(text.trim()) ? Number(text) : text.trim().replace(/^"|"$/g, ""));
const number = (text) => (Number.isInteger(Number(text)) && !Number.isSafeInteger(Number(text)) ? text : Number(text));
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

/** The plan with a value at a place of it; undefined, or what is the default anyhow, leaves the key out. */
export function withValue(plan, [section, ...keys], value) {
  const put = (table, [key, ...more]) => {
    const next = { ...table };
    const inner = more.length ? put(table?.[key] ?? {}, more) : value;
    if (inner === undefined || (more.length && !Object.keys(inner).length)) delete next[key];
    else next[key] = inner;
    return next;
  };
  return put(plan, [section, ...keys]);
}

/** Whether a problem is only that a key which every plan needs has not been filled in. */
export const isUnfilled = (sections, plan, [section, key, ...inner]) =>
  !inner.length && plan[section]?.[key] === undefined && !!sections.find((one) => one.name === section)?.keys.find((field) => field.key === key)?.needed;

export const idOf = (place) => `f-${place.join("-")}`;

export const PlanForm = ({ sections, plan, problems, choose, suggestions, extras }) => html`
  <div class="plan-form">
    ${sections.map((section) => html`<${SectionForm} key=${section.name} section=${section} table=${plan[section.name] ?? {}} problems=${problems.filter((one) => one.place[0] === section.name)}
      choose=${(place, value) => choose([section.name, ...place], value)} suggestions=${suggestions} extras=${extras} />`)}
  </div>`;

const SectionForm = ({ section, table, problems, choose, suggestions, extras }) => {
  const [opened, setOpened] = useState(OPEN.includes(section.name));
  const set = Object.keys(table).length;
  const wrong = problems.filter((one) => !one.unfilled).length;
  const names = section.keys.map((field) => field.key);
  const stray = problems.filter((one) => !names.includes(one.place[1]));
  const open = opened || problems.length > 0;
  const [all, setAll] = useState(!COMMON[section.name]);
  const shown = section.keys.filter((field) => all || COMMON[section.name].includes(field.key) || field.key in table || problems.some((one) => one.place[1] === field.key));
  const hidden = section.keys.length - shown.length;
  return html`
    <details class="plan-section" open=${open} id=${`s-${section.name}`}>
      <summary onClick=${(event) => { event.preventDefault(); setOpened(!open); }}>
        <h2>[${section.name}]</h2><span class="faint">${plainly(section.about.split(/\.\s/)[0].replace(/\.$/, ""))}</span>
        <span class="counts">${wrong ? html`<b class="bad-text">${plural(wrong, "problem")}</b>` : ""}${problems.length > wrong ? html`<b>${problems.length - wrong} needed</b>` : ""}${set ? html`<small>${set} set</small>` : ""}</span></summary>
      ${stray.map((one) => html`<${Said} problem=${one} />`)}
      ${open && html`<div class="fields">${shown.map((field) => html`<${Field} key=${field.key} field=${field} place=${[section.name, field.key]} value=${table[field.key]}
        problems=${problems.filter((one) => one.place[1] === field.key)} choose=${(rest, value) => choose([field.key, ...rest], value)} suggestions=${suggestions} extras=${extras} />`)}</div>
        ${(hidden > 0 || all) && COMMON[section.name] && html`<button type="button" class="tool rest" aria-expanded=${all} onClick=${() => setAll(!all)}>${all ? "Fewer keys" : `${plural(hidden, "more key")}`}</button>`}`}
    </details>`;
};

const Said = ({ problem, id }) => problem.unfilled ? html`<p class="about" id=${id}>Every plan needs it. Try: ${problem.hint}</p>` : html`
  <p class="field-error" id=${id}><${Icon} name="alert" /><span><b>${problem.what}</b>${problem.why ? html`: ${problem.why}` : ""}.${problem.hint && !problem.hint.startsWith("thinwire plan keys") ? html` <span class="faint">Try: ${problem.hint}</span>` : ""}</span></p>`;

const Field = ({ field, place, value, problems, choose, suggestions, extras }) => {
  const id = idOf(place);
  const wide = WIDE.includes(place.join(".")) || field.kind === "lines" || field.kind === "map" || field.kind === "table";
  const wrong = problems.some((one) => !one.unfilled);
  const told = [`${id}-about`, ...problems.map((_, i) => `${id}-wrong-${i}`)].join(" ");
  const errors = problems.map((one, i) => html`<${Said} problem=${one} id=${`${id}-wrong-${i}`} />`);
  const tone = `plan-field${wide ? " wide" : ""}${value === undefined ? "" : " set"}${wrong ? " wrong" : ""}`;
  if (field.kind === "table") {
    return html`
      <fieldset class=${tone} id=${id} tabindex="-1"><legend><code>${field.key}</code></legend>
        <p class="about">${plainly(field.about)}</p>
        <div class="fields">${field.inner.map((inner) => html`<${Field} key=${inner.key} field=${inner} place=${[...place, inner.key]} value=${value?.[inner.key]} problems=${[]}
          choose=${(rest, next) => choose([inner.key, ...rest], next)} suggestions=${suggestions} />`)}</div>
        ${errors}
      </fieldset>`;
  }
  const change = (next) => choose([], next !== undefined && same(next, field.fallback) ? undefined : next);
  return html`
    <div class=${tone}>
      <label for=${id}><code>${field.key}</code>${field.needed ? html`<small> needed</small>` : ""}</label>
      <${Input} id=${id} field=${field} value=${value} change=${change} told=${told} wrong=${wrong} suggestions=${suggestions?.[place.join(".")]} />
      <p class="about" id=${`${id}-about`}>${plainly(field.about)}</p>
      ${extras?.[place.join(".")] ?? ""}
      ${errors}
    </div>`;
};

const WORDED = { init: "a device makes it" };

/** What stands between backticks is code. */
const plainly = (text) => text.split("`").map((part, i) => (i % 2 ? html`<code>${part}</code>` : part));

const shownDefault = (field) => (field.needed ? "" : WORDED[field.key] ? WORDED[field.key] : field.fallback === null || field.fallback === undefined ? "not set" : field.fallback === "" ? "empty" : written(field.fallback).replaceAll("\n", ", ") || "none");

/** An input keeps what is typed while that means the value it has: "0." is not turned into "0" under the cursor. */
const Input = ({ id, field, value, change, told, wrong, suggestions }) => {
  const [draft, setDraft] = useState({ text: written(value), value });
  const text = same(draft.value, value) ? draft.text : written(value);
  const type = (event) => {
    const next = read(field, event.target.value);
    const kept = next !== undefined && same(next, field.fallback) ? undefined : next;
    setDraft({ text: event.target.value, value: kept });
    change(next);
  };
  const common = { id, "aria-describedby": told, "aria-invalid": wrong ? "true" : undefined };
  if (field.kind === "yes") {
    const on = value ?? field.fallback ?? false;
    return html`<span class="yes"><input type="checkbox" ...${common} checked=${on === true} onChange=${(event) => change(event.target.checked)} /> <small>${on === true ? "on" : "off"}${value === undefined ? ", the default" : ""}</small></span>`;
  }
  if (field.kind === "one") {
    const chosen = value ?? field.fallback;
    const words = field.words.includes(chosen) || chosen === undefined || chosen === null ? field.words : [chosen, ...field.words];
    return html`<select ...${common} onChange=${(event) => change(words.find((word) => String(word) === event.target.value))}>
      ${words.map((word) => html`<option key=${word} value=${word} selected=${same(word, chosen)}>${word}${same(word, field.fallback) ? " (default)" : ""}</option>`)}</select>`;
  }
  if (field.kind === "lines" || field.kind === "map") {
    const lines = Math.max(2, text.split("\n").length);
    return html`<textarea ...${common} rows=${lines} spellcheck=${false} placeholder=${field.kind === "map" ? "name = value, a line each" : "a line each"} onInput=${type} value=${text}></textarea>`;
  }
  const options = suggestions ?? field.words;
  return html`
    <input type="text" ...${common} inputmode=${field.numeric && !field.words.length && !field.list ? "decimal" : undefined} required=${field.needed} autocomplete="off" spellcheck=${false}
      list=${options.length ? `${id}-list` : undefined} placeholder=${shownDefault(field)} value=${text.replaceAll("\n", ", ")} onInput=${type} />
    ${options.length > 0 && html`<datalist id=${`${id}-list`}>${options.map((one) => html`<option key=${one} value=${String(one)} />`)}</datalist>`}`;
};
