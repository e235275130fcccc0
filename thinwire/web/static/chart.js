// One curve with the spread of the clients around it, drawn by uPlot.
import { html, useEffect, useRef, useState } from "./dom.js";
import { isDark, onThemeChange } from "./frame.js";
import uPlot from "./vendor/uplot.js";

const HEIGHT = 220;

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** `points`: [{x, y, low, high, train}], `show(y)` and `showX(x)` say a value; `read` is told what is pointed at, and
 * `steps` are between the marks of x. */
export const Curve = ({ label, points, color, show, showX, read, whole, height = HEIGHT, fromZero, steps }) => {
  const box = useRef(null);
  const plot = useRef(null);
  const told = useRef(read);
  const seen = useRef(points);
  told.current = read;
  seen.current = points;
  const [dark, setDark] = useState(isDark());
  useEffect(() => onThemeChange(() => setDark(isDark())), []);
  const more = points.some((p) => p.train !== null && p.train !== undefined);
  useEffect(() => {
    const chart = new uPlot(options(box.current, { color, show, showX, whole, more, told, seen, height, fromZero, steps }), columns(seen.current), box.current);
    plot.current = chart;
    const sized = new ResizeObserver(([entry]) => chart.setSize({ width: entry.target.clientWidth, height }));
    sized.observe(box.current);
    return () => {
      sized.disconnect();
      chart.destroy();
      plot.current = null;
    };
  }, [dark, color, whole, more, showX, height]);
  useEffect(() => plot.current?.setData(columns(points)), [points]);
  return html`<div class="curve" role="img" aria-label=${label} style=${{ minHeight: `${height}px` }} ref=${box}></div>`;
};

const columns = (points) => [
  points.map((p) => p.x),
  points.map((p) => p.y),
  points.map((p) => p.low ?? null),
  points.map((p) => p.high ?? null),
  points.map((p) => p.train ?? null),
];

function options(box, { color, show, showX, whole, more, told, seen, height, fromZero, steps }) {
  const ink = style("--muted");
  const grid = { stroke: style("--rule"), width: 1 };
  const font = "12px " + style("--sans");
  const axis = { stroke: ink, grid, ticks: { show: false }, font, gap: 6 };
  const line = style(color);
  const unseen = { stroke: "transparent", points: { show: false } };
  return {
    width: box.clientWidth,
    height,
    padding: [12, 24, 8, 0],  // at the right, half of the last label
    legend: { show: false },
    cursor: { y: false, points: { size: 7 }, drag: { x: false, y: false } },
    scales: { x: { time: false }, y: { range: (_, low, high) => (fromZero ? [0, 1.08 * (high || 1)] : room(low, high)) } },
    axes: [
      { ...axis, size: 30, space: 60, incrs: whole ? [1, 10, 100, 1000, 10000, 100000].flatMap((power) => [power, 2 * power, 5 * power]) : steps,
        values: (_, ticks) => ticks.map(showX), grid: { show: false } },
      { ...axis, size: fromZero ? 60 : 48, space: 36, values: (_, ticks) => ticks.map((t) => show(t)) },
    ],
    bands: [{ series: [3, 2], fill: line + "26" }],
    series: [
      {},
      { stroke: line, width: 2, spanGaps: true, points: { show: (u) => u.data[0].length < 40, size: 5, fill: line } },
      { ...unseen, spanGaps: true },
      { ...unseen, spanGaps: true },
      more ? { stroke: ink, width: 1.5, dash: [4, 4], spanGaps: true, points: { show: false } } : unseen,
    ],
    hooks: { setCursor: [(u) => told.current(u.cursor.idx === null || u.cursor.idx === undefined ? null : seen.current[u.cursor.idx])] },
  };
}

const room = (low, high) => {
  if (low === null || high === null || low === undefined) return [0, 1];
  const margin = (high - low || Math.abs(high) || 1) * 0.08;
  return [low >= 0 ? Math.max(0, low - margin) : low - margin, high + margin];
};
