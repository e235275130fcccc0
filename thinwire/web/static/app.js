// Which page this is.
import { AlertsPage } from "./alerts.js";
import { AuditPage } from "./audit.js";
import { ComparePage } from "./compare.js";
import { DevicePage } from "./device.js";
import { html, render } from "./dom.js";
import { FleetPage } from "./fleet.js";
import { Frame } from "./frame.js";
import { useNews } from "./live.js";
import { NewRunPage } from "./newrun.js";
import { RunPage } from "./run.js";
import { RunsPage } from "./runs.js";
import { UsersPage } from "./users.js";

const PAGES = [
  [/\/runs\/([A-Za-z0-9_-]+)\/?$/, (news, id) => html`<${RunPage} id=${id} news=${news} />`],
  [/\/devices\/([a-z0-9-]+)\/?$/, (news, name) => html`<${DevicePage} name=${name} news=${news} />`],
  [/\/alerts\/?$/, (news) => html`<${AlertsPage} news=${news} />`],
  [/\/users\/?$/, (news) => html`<${UsersPage} news=${news} />`],
  [/\/audit\/?$/, (news) => html`<${AuditPage} news=${news} />`],
  [/\/devices\/?$/, (news) => html`<${FleetPage} news=${news} />`],
  [/\/new\/?$/, (news) => html`<${NewRunPage} news=${news} />`],
  [/\/compare\/?$/, (news) => html`<${ComparePage} news=${news} />`],
  [/$/, (news) => html`<${RunsPage} news=${news} />`],
];

const App = () => {
  const news = useNews();
  const [address, page] = PAGES.find(([pattern]) => pattern.test(location.pathname));
  return html`<${Frame} news=${news} at=${/\/(devices|alerts|users|audit)(\/|$)/.exec(location.pathname)?.[1] ?? "runs"}>${page(news, address.exec(location.pathname)[1])}<//>`;
};

render(html`<${App} />`, document.getElementById("app"));
