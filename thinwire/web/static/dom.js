// Preact and htm as one vocabulary.
import htm from "./vendor/htm.js";
import { h, render } from "./vendor/preact.js";

export const html = htm.bind(h);
export { render };
export { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact-hooks.js";

export const root = document.documentElement.dataset.root;
export const link = (path) => `${root}/${path}`;
