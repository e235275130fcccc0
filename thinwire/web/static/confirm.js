// A person gives the password again, or a fresh code, where the server wants it before an action.
import { ApiError, onConfirm, post } from "./api.js";
import { Dialog } from "./dialog.js";
import { home, html, useEffect, useState } from "./dom.js";
import { Field } from "./fields.js";
import { Command, Refusal } from "./parts.js";

/** Stands once on every page: it opens when an action is refused for want of the password. */
export const Confirming = () => {
  const [wish, setWish] = useState(null);
  const [state, setState] = useState({});
  useEffect(() => onConfirm((error) => new Promise((done) => {
    setState({});
    setWish({ what: error.confirm, why: error.why, done });
  })), []);
  if (!wish) return null;
  const close = () => {
    wish.done(false);
    setWish(null);
  };
  const send = async (event) => {
    event.preventDefault();
    const given = new FormData(event.target).get("given");
    setState({ sent: true });
    try {
      await post("session/confirm", { [wish.what]: given });
      wish.done(true);
      setWish(null);
    } catch (error) {
      setState({ error: error instanceof ApiError ? error : new ApiError(0, { detail: String(error) }) });
    }
  };
  const code = wish.what === "code";
  return html`
    <${Dialog} id="confirming" title=${code ? "A fresh code, please" : "Your password again, please"} close=${close}>
      <form class="form" onSubmit=${send}>
        <p class="faint">${wish.why[0].toUpperCase()}${wish.why.slice(1)}.</p>
        ${code && html`<p>On the aggregator's machine:</p><${Command} text=${`thinwire aggregator status --login${home}`} />`}
        <${Field} label=${code ? "One-time code" : "Password"} name="given" type=${code ? "text" : "password"} first
          autocomplete=${code ? "off" : "current-password"} />
        ${state.error && html`<${Refusal} error=${state.error} />`}
        <div class="buttons">
          <button type="button" class="tool" onClick=${close}>Not now</button>
          <button class="tool go" disabled=${state.sent}>Go on</button>
        </div>
      </form>
    <//>`;
};
