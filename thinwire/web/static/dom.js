// Preact and htm as one vocabulary.
import htm from "./vendor/htm.js";
import { Component, h, render } from "./vendor/preact.js";

export const html = htm.bind(h);
export { Component, render };
export { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact-hooks.js";

const said = document.documentElement.dataset; // by the server, in page.html
export const root = said.root;
/** What ends a command that is typed on the aggregator's machine: " --home FOLDER" where it would look elsewhere. */
export const home = said.home;
/** The commands that start the aggregator as it was started last, and with a device API that other machines reach. */
export const start = said.start;
export const startReachable = said.reachable || `thinwire aggregator start --listen 0.0.0.0:9090${home}`;
export const link = (path) => `${root}/${path}`;

/** Who is logged in, with the role that says what is shown as a button; the server refuses the rest anyway. */
export const user = said.user;
export const role = said.role;
/** Each may do all that those before it may. */
export const ROLES = said.roles.split(" ");
export const may = (least) => ROLES.indexOf(role) >= ROLES.indexOf(least);

/** The statuses of runs, and those of runs that are over. */
export const STATUSES = said.statuses.split(" ");
export const ENDED = said.ended.split(" ");

/** The status when the HTML was made: what the stream of news says later is compared with it. */
export const firstNews = JSON.parse(said.news);

/** What each code of a dropped update means, as a sentence. */
export const DROPS = JSON.parse(said.drops);
