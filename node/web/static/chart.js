// A chart over time with marks, by uPlot. It is redrawn only when its data has changed.
import { html, useEffect, useRef } from "/static/vendor/htm-preact.js";
import { colour } from "/static/parts.js";

const MARKS = { death: "--bad", leave: "--warn", dropped: "--warn", join: "--good", plan: "--mark", resume: "--link" };

function marksPlugin(read) {
  return { hooks: { draw: [(plot) => {
    const context = plot.ctx, ratio = devicePixelRatio;
    context.save();
    context.textAlign = "left";
    context.font = `${11 * ratio}px system-ui, sans-serif`;
    for (const [at, , kind] of read()) {
      if (!MARKS[kind] || at < plot.scales.x.min || at > plot.scales.x.max) continue;
      const x = Math.round(plot.valToPos(at, "x", true));
      context.strokeStyle = context.fillStyle = colour(MARKS[kind]);
      context.lineWidth = (kind === "death" ? 2 : 1) * ratio;
      context.setLineDash(kind === "death" ? [] : [4 * ratio, 3 * ratio]);
      context.beginPath();
      context.moveTo(x, plot.bbox.top);
      context.lineTo(x, plot.bbox.top + plot.bbox.height);
      context.stroke();
      if (kind === "death" || kind === "join") context.fillText(kind, x + 3 * ratio, plot.bbox.top + 11 * ratio);
    }
    context.restore();
  }] } };
}

export function Chart({ label, series, data, marks = [], version, height = 180 }) {
  const place = useRef(null), plot = useRef(null), shown = useRef(marks);
  shown.current = marks;
  useEffect(() => {
    if (!window.uPlot) { place.current.textContent = label; return undefined; }
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
    const width = () => Math.max(200, place.current.clientWidth - 8);
    plot.current = new window.uPlot({
      width: width(), height, plugins: [marksPlugin(() => shown.current)], cursor: { drag: { x: true, y: false } },
      axes: [{ ...axis }, { ...axis, size: 60 }], legend: { live: true },
      series: [{}, ...series.map((each) => ({ ...each, stroke: colour(each.stroke), width: 1.5, points: { show: false } }))],
    }, data, place.current);
    const resized = new ResizeObserver(() => plot.current && plot.current.setSize({ width: width(), height }));
    resized.observe(place.current);
    return () => { resized.disconnect(); plot.current.destroy(); plot.current = null; };
  }, [document.documentElement.dataset.theme, series.map((each) => each.label).join()]);
  useEffect(() => { if (plot.current) plot.current.setData(data); }, [version]);
  return html`<figure style="margin:0"><div class="chart" role="img" aria-label=${label} ref=${place}></div></figure>`;
}
