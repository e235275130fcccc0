// The SHA-256 of a device's key, whole, grouped as the devices print it: two people compare it by reading it aloud.
import { html } from "./dom.js";
import { Copy } from "./parts.js";

export const groups = (digits) => digits.match(/.{1,8}/g) ?? [];

export const Fingerprint = ({ digits, label }) => html`
  <div class="fingerprint">
    <span class="groups" role="group" aria-label=${label || "Fingerprint of its key"}>
      ${groups(digits).map((group) => html`<code>${group}</code> `)}</span>
    <${Copy} text=${digits} label="Copy the fingerprint" />
  </div>`;

/** Enough to tell two apart, never to approve one by; the whole is its title, and stands on the device's own page. */
export const Short = ({ digits }) => html`<code class="short" title=${digits}>${digits.slice(0, 8)}…</code>`;
