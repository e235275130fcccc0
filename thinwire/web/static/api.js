// Reads of the API. Without a session one is sent to the login, and comes back.
import { link, root } from "./dom.js";

export class ApiError extends Error {
  constructor(status, said) {
    super(said.detail || `the dashboard's server answered ${status}`);
    this.status = status;
    this.why = said.why || "";
    this.hint = said.try || "";
  }
}

export async function get(path) {
  return answer(await reach(path, { headers: { Accept: "application/json" } }));
}

export async function post(path, body) {
  const sent = body ? { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) } : {};
  return answer(await reach(path, { method: "POST", ...sent }));
}

async function reach(path, options) {
  try {
    return await fetch(link(`api/v1/${path}`), options);
  } catch {
    throw new ApiError(0, { detail: "the dashboard's server is not reachable", why: "nothing says whether it heard this", try: "once more, when this page is live again" });
  }
}

async function answer(response) {
  if (response.status === 401) {
    const here = /\/(runs\/[A-Za-z0-9_-]+|devices(\/[a-z0-9-]+)?)$/.exec(location.pathname);
    location.assign(`${root}/login${here ? `?next=${here[0].slice(1)}` : ""}`);
    return new Promise(() => {});
  }
  const said = await response.json().catch(() => ({}));
  if (!response.ok) throw new ApiError(response.status, said);
  return said;
}
