// Approving and revoking a device: the key's fingerprint before the eyes, then what came of it in words. Its name and tags.
import { Tags } from "./actions.js";
import { get, post } from "./api.js";
import { Dialog } from "./dialog.js";
import { html, link, useEffect, useRef, useState } from "./dom.js";
import { Field, Form } from "./fields.js";
import { Fingerprint } from "./fingerprint.js";
import { moment } from "./format.js";
import { withoutReading } from "./live.js";
import { Icon, Refusal } from "./parts.js";

const CONFIRMED_S = 5; // the aggregator looks for commands five times a second
const AGAIN_MS = 250;
const SLOWLY_MS = 2000;

const isRevoked = (device) => device.standing === "revoked";

/** `wish`: {what: "approve" | "revoke", device} as it was when the button was pressed; what is sent names its key. */
export const Deciding = ({ wish, close }) => {
  const { what, device } = wish;
  const [state, setState] = useState({ step: "confirm" });
  const decide = async () => {
    setState({ step: "sent" });
    try {
      setState({ step: "done", said: await post(`devices/${device.device}/${what}`, { fingerprint: device.fingerprint }) });
    } catch (error) {
      setState({ step: "confirm", error });
    }
  };
  const title = what === "revoke" ? `Revoke ${device.device}?` : `Approve ${device.device}${isRevoked(device) ? " again" : ""}?`;
  return html`
    <${Dialog} id="deciding" title=${state.step === "done" ? device.device : title} close=${close}>
      ${state.step === "done" ? html`<${Came} first=${state.said} what=${what} close=${close} />` : html`
        ${what === "approve" ? html`<${Approve} device=${device} />` : html`<${AccessRevoked} device=${device} />`}
        ${state.error && html`<${Refusal} error=${state.error} />`}
        <div class="buttons">
          <button type="button" class="tool" data-first onClick=${close}>${what === "approve" ? "Not now" : "Keep it"}</button>
          <button type="button" class=${`tool ${what === "approve" ? "go" : "bad"}`} disabled=${state.step === "sent"} onClick=${decide}>
            ${what === "approve" ? "It is the same: approve it" : "Revoke it"}</button>
        </div>`}
    <//>`;
};

/** The name of a device, or its tags; `wish`: {what: "rename" | "tags", device}. */
export const Naming = ({ wish: { what, device }, close, fail }) => {
  if (what === "tags") {
    const send = (verb, body) => post(`devices/${device.device}/${verb}`, body).then(() => fail(null), fail);
    return html`<${Tags} name=${device.device} known=${device.tags} close=${close} send=${send} />`;
  }
  const rename = async ({ name }) => {
    const said = await withoutReading(() => post(`devices/${device.device}/rename`, { name }));
    location.assign(link(`devices/${said.device}`));
    return `It is now ${said.device}.`;
  };
  return html`
    <${Dialog} id="naming" title=${`Rename ${device.device}`} close=${close}>
      <p>Its key and its history stay. While a run that is not over may use its name, it is not renamed.</p>
      <${Form} label="Rename the device" button="Rename" send=${rename} cancel=${close}>
        <${Field} label="New name" name="name" first value=${device.device} maxlength="63" pattern="[a-z0-9\\-]+" hint="a to z, 0 to 9 and -" />
      <//>
    <//>`;
};

const Approve = ({ device }) => html`
  ${isRevoked(device) && html`<p>Then the same key may take part in runs again.</p>`}
  <p>Compare this with what the device printed when it joined; <code>thinwire client doctor</code> prints it there again.</p>
  <${Fingerprint} digits=${device.fingerprint} />
  <p class="faint">${device.sentence} First seen ${moment(device.created_at)}.</p>
  <p>If one digit differs, somebody else holds this key: ${isRevoked(device) ? "leave it revoked" : "revoke it"}.</p>`;

const AccessRevoked = ({ device }) => {
  const [stays, setStays] = useState(null);
  useEffect(() => {
    get(`devices/${device.device}`).then((found) => setStays(found.stays_text), () => setStays("not known now"));
  }, [device.device]);
  return html`
    <${Fingerprint} digits=${device.fingerprint} />
    <ul class="plain">
      <li>Its calls end at once: it gets the reason, and it stops. Uploads are removed, its open assignment ends.</li>
      <li>Updates that are not aggregated yet are dropped.</li>
      <li>Aggregated updates stay, for a mean has no inverse: <b>${stays ?? "…"}</b>.</li>
      <li>The key never comes back by itself; you can approve it again here.</li>
    </ul>`;
};

/** What came of it. A revocation is followed until the aggregator has cleared what was open. */
const Came = ({ first, what, close }) => {
  const [said, setSaid] = useState(first);
  const [late, setLate] = useState(false);
  const began = useRef(performance.now());
  const open = what === "revoke" && said.command !== null && said.confirmed === null;
  useEffect(() => {
    if (!open) return undefined;
    let timer = 0;
    const look = async () => {
      const after = performance.now() - began.current > CONFIRMED_S * 1000;
      setLate(after);
      const next = await get(`devices/${first.device}/revocations/${first.command}`).catch(() => null);
      if (next) setSaid(next);
      if (next?.confirmed == null) timer = setTimeout(look, after ? SLOWLY_MS : AGAIN_MS);
    };
    timer = setTimeout(look, AGAIN_MS);
    return () => clearTimeout(timer);
  }, [open]);
  return html`
    <p class=${`came${open ? " open" : ""}`} role="status"><${Icon} name=${open ? "wait" : "check"} /><span>${said.sentence}</span></p>
    ${open && late && html`<p class="warn-text">The aggregator has not confirmed it within ${CONFIRMED_S} s. The device API refuses the device all the same.</p>`}
    ${what === "revoke" && html`<p>Its updates stay in: <b>${said.stays_text}</b>.</p>`}
    <div class="buttons"><button type="button" class="tool" data-first onClick=${close}>Close</button></div>`;
};
