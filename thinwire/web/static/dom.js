// Preact and htm as one vocabulary.
import htm from "./vendor/htm.js";
import { Component, h, render } from "./vendor/preact.js";

export const html = htm.bind(h);
export { Component, render };
export { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact-hooks.js";

export const root = document.documentElement.dataset.root;
/** What ends a command that is typed on the aggregator's machine: " --home FOLDER" where it would look elsewhere. */
export const home = document.documentElement.dataset.home;
export const link = (path) => `${root}/${path}`;

/** Who is logged in, with the role that says what is shown as a button; the server refuses the rest anyway. */
export const user = document.documentElement.dataset.user;
export const role = document.documentElement.dataset.role;
const ROLES = ["viewer", "operator", "admin"];
export const may = (least) => ROLES.indexOf(role) >= ROLES.indexOf(least);
