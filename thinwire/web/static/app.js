// Which page this is.
import { html, render } from "./dom.js";
import { Frame } from "./frame.js";
import { useNews } from "./live.js";
import { RunPage } from "./run.js";
import { RunsPage } from "./runs.js";

const App = () => {
  const news = useNews();
  const run = /\/runs\/([A-Za-z0-9_-]+)\/?$/.exec(location.pathname);
  return html`<${Frame} news=${news}>
    ${run ? html`<${RunPage} id=${run[1]} news=${news} />` : html`<${RunsPage} news=${news} />`}
  <//>`;
};

render(html`<${App} />`, document.getElementById("app"));
