// Curves of several series on shared axes, drawn by uPlot: each has a colour and a dash of its own.
import { html, useEffect, useRef, useState } from "./dom.js";
import { isDark, onThemeChange } from "./frame.js";
import { Icon } from "./parts.js";
import uPlot from "./vendor/uplot.js";

const HEIGHT = 300;
const STEP = 0.25; // of the shown width, by which a click on an arrow moves it
const DASHES = [[], [], [], [], [7, 4], [7, 4], [7, 4], [7, 4]];

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The line beside a name: as on the chart, by colour and dash. */
export const Mark = ({ place, faint }) => html`<svg class=${faint ? "mark-line pale" : "mark-line"} viewBox="0 0 22 8" aria-hidden="true"><path d="M1 4h20" class=${`series-${place + 1}`} stroke-dasharray=${(DASHES[place] ?? []).join(" ") || undefined} /></svg>`;

/** `series`: [{name, place, points: [{x, y}]}]; `read` is told the x that is pointed at, or null. */
export const RunChart = ({ label, series, showX, show, whole, log, read }) => {
  const box = useRef(null);
  const plot = useRef(null);
  const told = useRef(read);
  told.current = read;
  const seen = useRef(series);
  seen.current = series;
  const [dark, setDark] = useState(isDark());
  const [range, setRange] = useState(null); // of x, null for all
  const held = useRef(null);
  held.current = range;
  useEffect(() => onThemeChange(() => setDark(isDark())), []);
  const names = series.map((one) => `${one.name}/${one.place}`).join();
  useEffect(() => {
    const zoomed = (low, high) => setRange(high > low ? [low, high] : null);
    const chart = new uPlot(options(box.current, { series: seen.current, showX, show, whole, log, told, zoomed, held }), columns(seen.current, log), box.current);
    plot.current = chart;
    const sized = new ResizeObserver(([entry]) => chart.setSize({ width: entry.target.clientWidth, height: HEIGHT }));
    sized.observe(box.current);
    return () => {
      sized.disconnect();
      chart.destroy();
      plot.current = null;
    };
  }, [dark, names, whole, log, showX]);
  useEffect(() => plot.current?.setData(columns(series, log)), [series]);
  useEffect(() => setRange(null), [showX]);
  const ends = extent(series);
  useEffect(() => {
    const [min, max] = range ?? ends;
    if (plot.current && max > min) plot.current.setScale("x", { min, max });
  }, [range?.[0], range?.[1]]);
  const [low, high] = range ?? ends;
  const move = (by) => {
    const step = by * STEP * (high - low);
    const shift = Math.max(ends[0] - low, Math.min(ends[1] - high, step));
    setRange([low + shift, high + shift]);
  };
  const zoom = (by) => {
    const [middle, half] = [(low + high) / 2, ((high - low) / 2) * by];
    const next = [Math.max(ends[0], middle - half), Math.min(ends[1], middle + half)];
    setRange(next[0] <= ends[0] && next[1] >= ends[1] ? null : next);
  };
  return html`
    <div class="run-chart" role="img" aria-label=${label} ref=${box}></div>
    <div class="zoom" role="group" aria-label="Shown part of the chart">
      <button type="button" class="tool square" onClick=${() => zoom(0.5)} aria-label="Zoom in" title="Zoom in"><${Icon} name="plus" /></button>
      <button type="button" class="tool square" disabled=${!range} onClick=${() => zoom(2)} aria-label="Zoom out" title="Zoom out"><${Icon} name="dash" /></button>
      <button type="button" class="tool square" disabled=${!range || low <= ends[0]} onClick=${() => move(-1)} aria-label="Earlier" title="Earlier"><${Icon} name="left" /></button>
      <button type="button" class="tool square" disabled=${!range || high >= ends[1]} onClick=${() => move(1)} aria-label="Later" title="Later"><${Icon} name="right" /></button>
      <button type="button" class="tool" disabled=${!range} onClick=${() => setRange(null)}>All</button>
      <span class="faint" role="status">${range ? `${showX(low)} to ${showX(high)}` : "drag over the chart to zoom"}</span>
    </div>`;
};

const extent = (series) => {
  const all = series.flatMap((one) => one.points.map((p) => p.x)).filter((x) => x !== null);
  return all.length ? [Math.min(...all), Math.max(...all)] : [0, 1];
};

/** uPlot's columns: one x for all, and null where a series has no point. A log axis has no place for 0 and below. */
function columns(series, log) {
  const tables = series.map((one) => {
    const own = one.points.filter((p) => p.x !== null && p.y !== null && p.y !== undefined && (!log || p.y > 0));
    return [own.map((p) => p.x), own.map((p) => p.y)];
  });
  if (!tables.length) return [[], []];
  return tables.length === 1 ? tables[0] : uPlot.join(tables);
}

function options(box, { series, showX, show, whole, log, told, zoomed, held }) {
  const ink = style("--muted");
  const grid = { stroke: style("--rule"), width: 1 };
  const axis = { stroke: ink, grid, ticks: { show: false }, font: "12px " + style("--sans"), gap: 6 };
  return {
    width: box.clientWidth,
    height: HEIGHT,
    padding: [12, 24, 8, 0],
    legend: { show: false },
    cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false, setScale: false } },
    scales: {
      x: { time: false, range: (_, low, high) => held.current ?? (low === null || low === undefined ? [0, 1] : low === high ? [low - 0.5, high + 0.5] : [low, high]) },
      y: log ? { distr: 3 } : { range: (_, low, high) => room(low, high) },
    },
    axes: [
      { ...axis, size: 30, space: 60, incrs: whole ? [1, 10, 100, 1000, 10000, 100000].flatMap((power) => [power, 2 * power, 5 * power]) : undefined, values: (_, ticks) => ticks.map(showX), grid: { show: false } },
      { ...axis, size: 52, space: 36, values: (_, ticks) => ticks.map((t) => (t === null ? "" : show(t))) },
    ],
    series: [{}, ...series.map((one) => {
      const stroke = style(`--series-${one.place + 1}`);
      return { stroke, width: one.faint ? 1 : 2, alpha: one.faint ? 0.35 : 1, dash: DASHES[one.place], spanGaps: true, points: { show: !one.faint && one.points.length < 30, size: 5, fill: stroke } };
    })],
    hooks: {
      setCursor: [(u) => told.current?.(u.cursor.idx === null || u.cursor.idx === undefined ? null : u.data[0][u.cursor.idx])],
      setSelect: [(u) => {
        if (u.select.width < 4) return;
        zoomed(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"));
        u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      }],
    },
  };
}

const room = (low, high) => {
  if (low === null || high === null || low === undefined) return [0, 1];
  const margin = (high - low || Math.abs(high) || 1) * 0.08;
  return [low >= 0 ? Math.max(0, low - margin) : low - margin, high + margin];
};

/** The last value of a series at or before x; of all where x is null. */
export const valueAt = (points, x) => points.findLast((p) => p.y !== null && p.y !== undefined && (x === null || p.x <= x))?.y ?? null;
