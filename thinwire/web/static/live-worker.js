// One stream of news for all tabs of a browser: browsers allow six connections to a host, over all tabs together.
// A tab says when it becomes visible and hidden; the stream is open while some tab is visible.
const AGAIN_MS = 1000;

const ports = new Set(); // of visible tabs
let source = null;
let timer = 0;
let last = null; // the last news and when they came, for a tab that comes later

const tell = (said) => ports.forEach((port) => port.postMessage(said));

const listen = () => {
  clearTimeout(timer);
  if (source || !ports.size) return;
  source = new EventSource("../api/v1/live");
  source.addEventListener("news", (event) => {
    last = { said: JSON.parse(event.data), at: Date.now() };
    tell(last.said);
  });
  source.onerror = () => {
    stop();
    tell(null);
    timer = setTimeout(listen, AGAIN_MS);
  };
};

const stop = () => {
  source?.close();
  source = null;
  last = null;
};

self.onconnect = (event) => {
  const port = event.ports[0];
  port.onmessage = ({ data }) => {
    if (data.visible) {
      ports.add(port);
      if (last) port.postMessage({ ...last.said, now: last.said.now + (Date.now() - last.at) / 1000 });
    } else {
      ports.delete(port);
    }
    if (ports.size) listen();
    else stop();
  };
};
