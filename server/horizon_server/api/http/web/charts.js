/** Line charts over steps: uPlot on a canvas, a line of values above it, and the same in words for a screen reader. */
import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact-htm.js";
import { count, short } from "./format.js";
import { smooth } from "./series.js";

const uPlot = window.uPlot;
const FONT = "12px system-ui, sans-serif";
/** So many points away a value is still that of the place that is pointed at; of evaluations, the next one is. */
const REACH = 40;
/** Steps of an axis of bytes: powers of two, so that its numbers are round. */
const BYTE_STEPS = Array.from({ length: 50 }, (_, i) => 2 ** i);

/**
 * @typedef {{label: string, color: string, steps: number[], mean: (number|null)[], min?: (number|null)[],
 *   max?: (number|null)[], dots?: boolean, dash?: number[]}} Line `color` names a variable of the style.
 * @typedef {{kind: string, step: number, text?: string}} Mark
 */

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const faded = (hex, share) =>
  hex +
  Math.round(share * 255)
    .toString(16)
    .padStart(2, "0");

/** Draw where the job started, restarted, paused, and wrote checkpoints. */
function drawMarks(u, marks) {
  const { ctx, bbox } = u;
  const px = devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height + 8 * px);
  ctx.clip();
  for (const mark of marks) {
    const x = Math.round(u.valToPos(mark.step, "x", true));
    if (mark.kind === "checkpoint") {
      const [size, bottom] = [4 * px, bbox.top + bbox.height];
      ctx.fillStyle = color("quiet");
      ctx.beginPath();
      ctx.moveTo(x - size, bottom);
      ctx.lineTo(x, bottom - size * 1.6);
      ctx.lineTo(x + size, bottom);
      ctx.fill();
    } else if (mark.kind === "restart" || mark.kind === "pause" || mark.kind === "resume") {
      ctx.strokeStyle = color(mark.kind === "restart" ? "bad" : "quiet");
      ctx.lineWidth = px;
      ctx.setLineDash([4 * px, 3 * px]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
  }
  ctx.restore();
}

/** Lines with steps of their own as one table, and the options of its columns. */
function tableOf(lines, { smoothing, band, format }) {
  const tables = [];
  const columns = [{}];
  const bands = [];
  for (const line of lines) {
    const hue = color(line.color);
    const spread = band && line.min && line.min.some((low, i) => low !== line.max[i]);
    const wanted = [];
    if (spread) {
      const edge = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
      bands.push({ series: [columns.length + 1, columns.length], fill: faded(hue, 0.16) });
      wanted.push([line.min, edge], [line.max, edge]);
    }
    const isSmooth = smoothing > 0 && !line.dots;
    const stroke = { stroke: hue, width: 1.75, dash: line.dash, spanGaps: true };
    if (isSmooth)
      wanted.push([line.mean, { ...stroke, stroke: faded(hue, 0.28), width: 1, points: { show: false } }]);
    const points =
      line.dots || line.steps.length === 1
        ? { show: true, size: 6, fill: hue, stroke: hue }
        : { show: false };
    wanted.push([
      isSmooth ? smooth(line.mean, smoothing) : line.mean,
      { ...stroke, points, shown: line.label, format, reach: line.dots ? Infinity : REACH },
    ]);
    tables.push([line.steps, ...wanted.map(([values]) => values)]);
    columns.push(...wanted.map(([, options]) => options));
  }
  return { data: tables.length > 1 ? uPlot.join(tables) : tables[0], columns, bands };
}

function optionsOf(
  width,
  height,
  { columns, bands },
  { log, floor, isBytes, format, range, numSteps, sync, marks, onCursor, onZoom },
) {
  const axis = {
    stroke: color("quiet"),
    font: FONT,
    grid: { stroke: color("grid"), width: 1 },
    ticks: { show: false },
  };
  const spaced = (min, max) => {
    const pad = (max - min || Math.abs(max) || 1) * 0.06;
    return [floor === 0 && min >= 0 ? 0 : min - pad, max + pad];
  };
  return {
    width,
    height,
    padding: [8, 22, 0, 0],
    legend: { show: false },
    series: columns,
    bands,
    scales: {
      x: { time: false, range: () => range() || [0, Math.max(numSteps(), 1)] },
      y: log ? { distr: 3 } : { range: (u, min, max) => (min === null ? [0, 1] : spaced(min, max)) },
    },
    axes: [
      {
        ...axis,
        size: 28,
        gap: 6,
        values: (u, ticks) => ticks.map((v) => (v === null || v % 1 ? "" : count(v))),
        grid: { show: false },
      },
      {
        ...axis,
        size: 62,
        gap: 8,
        space: 30,
        ...(isBytes ? { incrs: BYTE_STEPS } : {}),
        values: (u, ticks) => ticks.map((v) => (v === null ? "" : format(v))),
      },
    ],
    cursor: {
      sync: { key: sync, setSeries: false, scales: ["x", null] },
      drag: { x: true, y: false, setScale: false },
      points: { size: 7 },
      focus: { prox: -1 },
      bind: {
        dblclick: () => () => {
          onZoom(null);
          return null;
        },
      },
    },
    hooks: {
      draw: [(u) => drawMarks(u, marks())],
      setCursor: [(u) => onCursor(u.cursor.idx ?? null)],
      setSelect: [
        (u) => {
          if (u.select.width < 8) return;
          const [from, to] = [
            u.posToVal(u.select.left, "x"),
            u.posToVal(u.select.left + u.select.width, "x"),
          ];
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          if (to - from >= 1) onZoom([Math.max(0, Math.floor(from)), Math.ceil(to)]);
        },
      ],
    },
  };
}

const lastOf = (values) => {
  for (let i = values.length - 1; i >= 0; i -= 1) if (values[i] !== null && values[i] !== undefined) return i;
  return -1;
};

/** The chart in words. */
function inWords(lines, format) {
  return lines
    .map((line) => {
      const last = lastOf(line.mean);
      if (last < 0) return `${line.label}: no values`;
      const known = line.mean.filter((v) => v !== null);
      const low = known.reduce((a, b) => Math.min(a, b), Infinity);
      const high = known.reduce((a, b) => Math.max(a, b), -Infinity);
      const ends = `${format(line.mean[last])} at step ${line.steps[last]}`;
      return `${line.label}: ${ends}, between ${format(low)} and ${format(high)}`;
    })
    .join(". ");
}

/**
 * One figure of one or several jobs.
 *
 * @param {{title: string, about?: string, lines: Line[], marks?: Mark[], format?: (v: number) => string, log?: boolean,
 *   floor?: number, isBytes?: boolean, smoothing?: number, band?: boolean, range?: [number, number] | null,
 *   numSteps?: number, sync: string, height?: number,
 *   onZoom: (range: [number, number] | null) => void, className?: string}} options
 */
export function Chart({
  title,
  about,
  lines,
  marks = [],
  format = short,
  log = false,
  floor,
  isBytes = false,
  smoothing = 0,
  band = true,
  range,
  numSteps = 0,
  sync,
  height = 176,
  onZoom,
  className = "",
}) {
  const place = useRef(null);
  const plot = useRef(null);
  const values = useRef([]);
  const step = useRef(null);
  const now = useRef({});
  const [spoken, speak] = useState("");
  const [theme, setTheme] = useState(0);
  const isOne = lines.length === 1;
  const isLog = log && lines.some((line) => line.mean.some((v) => v > 0));
  // Zeros have no place on a log axis.
  const shown = isLog
    ? lines.map((line) => ({
        ...line,
        mean: line.mean.map((v) => (v > 0 ? v : null)),
        min: undefined,
        max: undefined,
      }))
    : lines;
  const last = Math.max(numSteps, ...lines.map((line) => line.steps[line.steps.length - 1] || 0));
  now.current = { range, last, marks, onZoom };

  const say = (index) => {
    const u = plot.current;
    if (!u) return;
    let at = null;
    let i = 0;
    u.series.forEach((column, number) => {
      if (!column.shown) return;
      const column_ = u.data[number];
      const found = index === null ? lastOf(column_) : nearest(column_, index, column.reach);
      if (values.current[i]) values.current[i].textContent = found < 0 ? "-" : column.format(column_[found]);
      if (found >= 0) at = Math.max(at ?? 0, u.data[0][index ?? found]);
      i += 1;
    });
    if (step.current) step.current.textContent = at === null ? "" : `step ${count(at)}`;
  };

  const look = JSON.stringify([
    shown.map((l) => [l.label, l.color, !!l.dots, !!l.min]),
    isLog,
    smoothing > 0,
    band,
    height,
    sync,
    theme,
  ]);
  useLayoutEffect(() => {
    if (!lines.length) return undefined;
    const table = tableOf(shown, { smoothing, band, format });
    const options = optionsOf(place.current.clientWidth || 300, height, table, {
      log: isLog,
      floor,
      isBytes,
      format,
      sync,
      range: () => now.current.range,
      numSteps: () => now.current.last,
      marks: () => now.current.marks,
      onZoom: (found) => now.current.onZoom(found),
      onCursor: say,
    });
    const u = new uPlot(options, table.data, place.current);
    plot.current = u;
    say(null);
    const sizes = new ResizeObserver(() => {
      const { clientWidth } = place.current;
      if (clientWidth && clientWidth !== u.width) u.setSize({ width: clientWidth, height });
    });
    sizes.observe(place.current);
    return () => {
      sizes.disconnect();
      u.destroy();
      plot.current = null;
    };
  }, [look]);
  useEffect(() => {
    const u = plot.current;
    if (!u) return;
    const table = tableOf(shown, { smoothing, band, format });
    // A spread that was not there before adds columns.
    if (table.columns.length !== u.series.length) setTheme((n) => n + 1);
    else u.setData(table.data);
    if (u.cursor.left < 0 || u.cursor.left === undefined) say(null);
  });
  useEffect(() => {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const listener = () => setTheme((n) => n + 1);
    dark.addEventListener("change", listener);
    return () => dark.removeEventListener("change", listener);
  }, []);

  const move = (event) => {
    const u = plot.current;
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape" && range) {
      onZoom(null);
      return;
    }
    if (!by || !u) return;
    event.preventDefault();
    const most = u.data[0].length - 1;
    const index = Math.max(0, Math.min(most, (u.cursor.idx ?? (by > 0 ? -1 : most + 1)) + by));
    u.setCursor({ left: u.valToPos(u.data[0][index], "x"), top: u.over.clientHeight / 2 });
    const told = lines.map((line, i) => `${line.label} ${values.current[i]?.textContent}`);
    speak(`step ${u.data[0][index]}: ${told.join(", ")}`);
  };

  return html`
    <figure class="chart ${className}">
      <figcaption>
        <b title=${about}>${title}</b>
        ${isOne && html`
          <span
            class="value"
            aria-hidden="true"
            style=${{ color: `var(--${lines[0].color})` }}
            ref=${(element) => {
              values.current[0] = element;
            }}
          ></span>
        `}
        <span class="at" ref=${step}></span>
      </figcaption>
      ${!isOne && html`
        <div class="legend" aria-hidden="true">
          ${lines.map((line, i) => html`
            <span key=${line.label}>
              <i class="line-${line.color}"></i>
              ${line.label}${" "}
              <b
                ref=${(element) => {
                  values.current[i] = element;
                }}
              ></b>
            </span>
          `)}
        </div>
      `}
      <div
        class="plot"
        style=${{ height: `${height}px` }}
        ref=${place}
        tabindex="0"
        role="application"
        aria-roledescription="chart"
        aria-label="${title}. ${inWords(lines, format)}"
        onKeyDown=${move}
      ></div>
      <p class="unseen" aria-live="polite">${spoken}</p>
    </figure>
  `;
}

/** The index of the value next to an index, so many places away at most; lines with steps of their own have gaps. */
function nearest(values, index, reach) {
  if (values[index] !== null && values[index] !== undefined) return index;
  for (let away = 1; away <= Math.min(reach, values.length); away += 1) {
    for (const i of [index - away, index + away]) if (values[i] !== null && values[i] !== undefined) return i;
  }
  return -1;
}

/** What all charts of a page share: smoothing, axis, spread; kept in the address. */
export function ChartControls({ query, setQuery, range, marks = false, spread = true }) {
  const smoothing = Number(query.get("smooth") || 0);
  return html`
    <div class="controls" role="group" aria-label="Charts">
      <label>
        Smoothing${" "}
        <input
          type="range"
          min="0"
          max="0.98"
          step="0.02"
          value=${smoothing}
          onInput=${(event) => setQuery({ smooth: Number(event.target.value) || "" })}
        />
      </label>
      <label class="check">
        <input
          type="checkbox"
          checked=${query.get("log") === "1"}
          onChange=${(event) => setQuery({ log: event.target.checked })}
        />${" "}
        Log axis
      </label>
      ${spread && html`
        <label class="check">
          <input
            type="checkbox"
            checked=${query.get("spread") !== "0"}
            onChange=${(event) => setQuery({ spread: event.target.checked ? "" : "0" })}
          />${" "}
          Min and max
        </label>
      `}
      ${range ? html`
        <button type="button" class="small" onClick=${() => setQuery({ from: "", to: "" })}>
          All steps (showing ${count(range[0])} to ${count(range[1])})
        </button>
      ` : html`<span class="hint">Drag over a chart to see a part in detail</span>`}
      ${marks && html`
        <span class="hint keys">
          <i class="key-checkpoint"></i> checkpoint <i class="key-restart"></i> restart
        </span>
      `}
    </div>
  `;
}

/** The choices of `ChartControls` as an address has them. */
export function chartChoices(query) {
  const [from, to] = [Number(query.get("from")), Number(query.get("to"))];
  return {
    smoothing: Math.min(0.98, Number(query.get("smooth")) || 0),
    log: query.get("log") === "1",
    band: query.get("spread") !== "0",
    range: to > from && from >= 0 ? [from, to] : null,
  };
}
