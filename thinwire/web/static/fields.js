// Fields of forms, and forms that show their result.
import { html, useEffect, useRef, useState } from "./dom.js";
import { Icon, Refusal } from "./parts.js";

/** `value` is its first content: what a person types is not written over at the next redraw. */
export const Field = ({ label, name, hint, first, value, ...rest }) => html`
  <label class="field"><span>${label}</span>
    <input name=${name} defaultValue=${value} required data-first=${first} aria-describedby=${hint ? `${name}-hint` : undefined} spellcheck=${false} ...${rest} />
    ${hint && html`<small id=${`${name}-hint`} class="faint">${hint}</small>`}</label>`;

export const Choice = ({ label, name, options, value }) => html`
  <label class="field"><span>${label}</span>
    <select name=${name}>${options.map((one) => html`<option value=${one} selected=${one === value}>${one}</option>`)}</select></label>`;

/** A form whose fields go to `send(fields, form)`; below it stands the result, or the refusal. */
export const Form = ({ label, button, send, cancel, children }) => {
  const [state, setState] = useState({});
  const submit = async (event) => {
    event.preventDefault();
    const form = event.target;
    setState({ sent: true });
    try {
      const said = await send(Object.fromEntries(new FormData(form)));
      setState({ said });
      form.reset();
    } catch (error) {
      setState({ error });
    }
  };
  return html`
    <form class="form" aria-label=${label} onSubmit=${submit}>
      ${children}
      <div class="buttons">${cancel && html`<button type="button" class="tool" onClick=${cancel}>Cancel</button>`}<button class="tool go" disabled=${state.sent}>${button}</button></div>
      ${state.error && html`<${Refusal} error=${state.error} />`}
      ${state.said && html`<p class="came" role="status"><${Icon} name="check" /><span>${state.said}</span></p>`}
    </form>`;
};

/** A button whose second click confirms; `act` throws a refusal, which is shown beside it, or `done` is. */
export const Twice = ({ label, word, act, bad, done }) => {
  const [now, setNow] = useState({ step: "idle" });
  const keep = useRef(null);
  useEffect(() => now.step === "confirm" && keep.current?.focus(), [now.step]);
  const go = async () => {
    setNow({ step: "sent" });
    try {
      await act();
      setNow({ step: "idle", done });
    } catch (error) {
      setNow({ step: "idle", error });
    }
  };
  if (now.step === "idle") {
    return html`${now.error && html`<span class="bad-text" role="alert">${now.error.message} </span>`}${now.done && html`<span class="faint" role="status">${now.done}</span>`}
      <button type="button" class="tool" aria-label=${label} onClick=${() => setNow({ step: "confirm" })}>${word}…</button>`;
  }
  return html`<span class="confirm" role="group" aria-label=${`${label}?`}>
    <button type="button" class=${`tool ${bad ? "bad" : "go"}`} disabled=${now.step === "sent"} onClick=${go}>${word}</button>
    <button type="button" class="tool" ref=${keep} onClick=${() => setNow({ step: "idle" })}>Keep</button></span>`;
};
