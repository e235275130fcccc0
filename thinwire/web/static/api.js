// Reads of the API. Without a session one is sent to the login, and comes back.
import { link, root } from "./dom.js";

export class ApiError extends Error {
  constructor(status, said) {
    super(said.detail || `the dashboard's server answered ${status}`);
    this.status = status;
    this.why = said.why || "";
    this.hint = said.try || "";
    this.confirm = said.confirm;
  }
}

export async function get(path) {
  return answer(await reach(path, { headers: { Accept: "application/json" } }, UNREAD));
}

/** Sends what changes something. Where the server wants the password again, the person gives it, and this is sent again. */
export async function post(path, body) {
  const sent = body ? { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) } : {};
  try {
    return await answer(await reach(path, { method: "POST", ...sent }));
  } catch (error) {
    if (!error.confirm || !giveAgain || !(await giveAgain(error))) throw error;
    return answer(await reach(path, { method: "POST", ...sent }));
  }
}

const LOOK_MS = 300; // between two looks at a command
const PATIENT_MS = 30_000; // for which a command is looked at

/** The outcome of a command; null if the aggregator has not answered it within half a minute. A refusal is thrown. */
export async function outcome(command) {
  const until = performance.now() + PATIENT_MS;
  while (performance.now() < until) {
    let said = { done: null };
    try {
      said = await get(`commands/${command}`);
    } catch (error) {
      if (error.status && error.status < 500) throw error; // else the dashboard is away for a moment, and the command stays
    }
    if (said.done) return said;
    if (said.done === false) throw new ApiError(409, said);
    await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
  }
  return null;
}

let giveAgain = null;

/** `give(error)` promises whether the person gave the password, or a fresh code, again. */
export const onConfirm = (give) => {
  giveAgain = give;
};

/** Sends a file as it is; `tell` hears the share that is sent. Only XMLHttpRequest reports that. */
export const send = (file, tell) => new Promise((done, fail) => {
  const request = new XMLHttpRequest();
  request.open("POST", link("api/v1/uploads"));
  request.setRequestHeader("Content-Type", "application/octet-stream");
  request.responseType = "json";
  request.upload.onprogress = (event) => tell(event.loaded / Math.max(1, event.total));
  request.onload = () => (request.status === 201 ? done(request.response) : fail(new ApiError(request.status, request.response ?? {})));
  request.onerror = () => fail(new ApiError(0, { detail: "the upload was cut off", why: "the connection ended", try: "once more" }));
  request.send(file);
});

const UNREAD = { why: "a read of what this page shows failed", try: "reload this page" };
const UNHEARD = { why: "nothing says whether it heard this", try: "once more, when this page is live again" };

async function reach(path, options, said = UNHEARD) {
  try {
    return await fetch(link(`api/v1/${path}`), options);
  } catch {
    throw new ApiError(0, { detail: "the dashboard's server is not reachable", ...said });
  }
}

let leaving = false;

/** From now on a read without a session sends nobody to the login: logging out does. */
export const leave = () => {
  leaving = true;
};

const LONG = /\d{16}/;

/** A whole number that this language cannot hold, such as a seed of 63 bits, stays the text that it was. */
const exact = (key, value, context) => (Number.isInteger(value) && !Number.isSafeInteger(value) && context?.source ? context.source : value);

async function answer(response) {
  if (response.status === 401) {
    if (leaving) return new Promise(() => {});
    const here = root === "." ? /\/([a-z]+)$/.exec(location.pathname) : /\/([a-z]+\/[A-Za-z0-9_-]+)$/.exec(location.pathname);
    location.assign(`${root}/login${here ? `?next=${here[1]}` : ""}`);
    return new Promise(() => {});
  }
  let said = {};
  try {
    const text = await response.text();
    said = JSON.parse(text, LONG.test(text) ? exact : undefined);
  } catch { /* not JSON: the status says it */ }
  if (!response.ok) throw new ApiError(response.status, said);
  return said;
}
