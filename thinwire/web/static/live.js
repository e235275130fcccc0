// One stream of news for all tabs of a browser (live-worker.js), which hidden tabs do not follow.
import { firstNews, link, useEffect, useRef, useState } from "./dom.js";

const AGAIN_MS = 1000;
const LEAST_GAP_MS = 250; // between two reads: at most four redraws a second

let clockAhead = firstNews.now - Date.now() / 1000; // of the server, in seconds: times shown are the server's

export const serverNow = () => Date.now() / 1000 + clockAhead;

export const setServerNow = (now) => {
  clockAhead = now - Date.now() / 1000;
};

/** Tells `news` each message of the stream, and null when it is lost; gives a function that says whether this tab is
 * visible. Without shared workers (Chrome on Android) the tab has a stream of its own. */
const follow = (news) => {
  if (typeof SharedWorker !== "undefined") {
    const { port } = new SharedWorker(new URL(link("static/live-worker.js"), location.href)); // a name of its own would make one for each page
    port.onmessage = ({ data }) => news(data);
    return (visible) => port.postMessage({ visible });
  }
  let source = null;
  let timer = 0;
  const say = (visible) => {
    clearTimeout(timer);
    if (visible && !source) {
      source = new EventSource(link("api/v1/live"));
      source.addEventListener("news", (event) => news(JSON.parse(event.data)));
      source.onerror = () => {
        say(false);
        news(null);
        timer = setTimeout(() => say(true), AGAIN_MS);
      };
    } else if (!visible) {
      source?.close();
      source = null;
    }
  };
  return say;
};

/** {seq, acts, pending, aggregator, down_since, store, reached}: what the server said last, and whether it can be reached now. */
export function useNews() {
  const [news, setNews] = useState({ ...firstNews, reached: true, lost: 0 });
  useEffect(() => {
    const say = follow((said) => {
      if (said === null) {
        setNews((old) => ({ ...old, reached: false, lost: old.lost || serverNow() }));
        return;
      }
      setServerNow(said.now);
      setNews({ ...said, reached: true, lost: 0 });
    });
    const turn = () => say(!document.hidden);
    const hide = () => say(false);
    turn();
    document.addEventListener("visibilitychange", turn);
    addEventListener("pagehide", hide);
    addEventListener("pageshow", turn);
    return () => {
      say(false);
      document.removeEventListener("visibilitychange", turn);
      removeEventListener("pagehide", hide);
      removeEventListener("pageshow", turn);
    };
  }, []);
  return news;
}

/** The same, but for what has stood `still` since that moment. */
export function useTime(on, still) {
  const now = useNow(on && still === null);
  return still ?? now;
}

/** Since when nothing goes on any more, in the server's time; null while it does, or nobody can tell. */
export const stoodStill = (news) => (news.reached ? (news.aggregator === "gone" && news.down_since) || null : news.lost);

let paused = false;

/** Do `act`, after which what is shown has another address, or none: nothing is read at the old one, unless it fails or gives false. */
export async function withoutReading(act) {
  paused = true;
  let done = false;
  try {
    done = await act();
    return done;
  } finally {
    paused = done !== false;
  }
}

/** What `read(old)` gives, read again whenever the news or `keys` change; what was there stays until then. */
export function useReading(read, news, keys, gapMs = LEAST_GAP_MS) {
  const [state, setState] = useState({ data: null, error: null });
  const work = useRef({ busy: false, wanted: false, fresh: false, begun: 0, timer: 0, keys: "" }); // `fresh`: at once, for other keys
  useEffect(() => {
    const now = work.current;
    const wanted = JSON.stringify(keys);
    now.fresh ||= wanted !== now.keys;
    now.keys = wanted;
    now.read = read;
    const go = async () => {
      if (paused) return;
      now.wanted = false;
      now.fresh = false;
      now.busy = true;
      now.begun = performance.now();
      const requested = now.keys;
      try {
        const data = await now.read();
        if (requested === now.keys) setState({ data, error: null });
      } catch (error) {
        if (requested === now.keys) setState((old) => ({ ...old, error }));
      }
      now.busy = false;
      if (now.wanted) plan();
    };
    const plan = () => {
      now.wanted = true;
      if (now.busy) return;
      clearTimeout(now.timer);
      now.timer = setTimeout(go, now.fresh ? 0 : Math.max(0, gapMs - (performance.now() - now.begun)));
    };
    plan();
  }, [news.seq, news.acts, news.aggregator, news.reached, ...keys]);
  return state;
}

/** False until what was drawn once `ready` is on the screen: what is below it is drawn after that. */
export function useAfterPaint(ready) {
  const [after, setAfter] = useState(false);
  useEffect(() => {
    if (!ready) return undefined;
    let timer = 0;
    let frame = requestAnimationFrame(() => { // the second frame begins when the first one is drawn
      frame = requestAnimationFrame(() => { timer = setTimeout(() => setAfter(true), 0); });
    });
    return () => {
      cancelAnimationFrame(frame);
      clearTimeout(timer);
    };
  }, [ready]);
  return after;
}

/** The server's time, moving twice a second while `on`. */
export function useNow(on) {
  const [now, setNow] = useState(serverNow());
  useEffect(() => {
    if (!on) return undefined;
    const timer = setInterval(() => setNow(serverNow()), 500);
    return () => clearInterval(timer);
  }, [on]);
  return on ? Math.max(now, 0) : serverNow();
}
