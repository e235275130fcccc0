// A question in front of the dashboard. The browser's own dialog: it keeps the focus inside, and Escape closes it.
import { html, useEffect, useRef } from "./dom.js";

export const Dialog = ({ id, title, close, children }) => {
  const box = useRef(null);
  useEffect(() => {
    const before = document.activeElement;
    box.current.showModal();
    box.current.querySelector("[data-first]")?.focus();
    return () => before?.isConnected && before.focus();
  }, []);
  return html`
    <dialog ref=${box} class="dialog" aria-labelledby=${`${id}-question`} onClose=${close}>
      <h2 id=${`${id}-question`}>${title}</h2>
      ${children}
    </dialog>`;
};
