// The kept model versions of a run, each with its file to download.
import { get } from "./api.js";
import { html, link, may } from "./dom.js";
import { bytes, metric } from "./format.js";
import { useReading } from "./live.js";
import { Icon, Section, Table } from "./parts.js";

const GAP_MS = 5000; // between two reads, while a run makes versions

export const Models = ({ run }) => {
  const { data } = useReading(() => get(`runs/${run.run_id}/models`), {}, [run.run_id, run.version, run.best_version, run.status], GAP_MS);
  if (!data?.length) return null;
  const api = link(`api/v1/runs/${run.run_id}/models`);
  const measured = [...new Set(["accuracy", run.plan.run.metric])].filter((name) => data.some((one) => name in one.metrics));
  return html`
    <${Section} id="models" title="Model versions" aside=${aside(run)} json=${api}>
      <${Table} stacks label="Table of model versions" rows=${data} keyOf=${(one) => one.version} columns=${[
        { title: "Version", cell: (one) => html`${one.version}${marks(one).map((mark) => html` <span class="tag">${mark}</span>`)}` },
        { title: "Round", right: true, cell: (one) => one.round || html`<span class="faint">first model</span>` },
        ...measured.map((name) => ({ title: name, right: true, cell: (one) => metric(one.metrics[name]) })),
        { title: "Size", right: true, cell: (one) => bytes(one.size) },
        ...(may("operator") ? [{ title: "File", right: true, cell: (one) => html`
          <a class="tool" href=${`${api}/${one.version}`} download aria-label=${`safetensors of model version ${one.version}`}><${Icon} name="down" />safetensors</a>` }] : []),
      ]} />
    <//>`;
};

const marks = (one) => [one.best && "best", one.latest && "latest"].filter(Boolean);

const aside = (run) => [
  run.privacy && "released with noise",
  run.plan.local?.personal_layers?.length && "without the personal layers, which stay on each client",
  !may("operator") && "operators may download them",
].filter(Boolean).join("; ");
