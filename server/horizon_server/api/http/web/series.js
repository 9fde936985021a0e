/** The figures of a job's steps and evaluations as columns, and what happens to them while the job runs. */
import { useCallback, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { pathOf, readAndRemember } from "./api.js";
import { bytes, hasEnded, percent, short, span } from "./format.js";
import { useJobEvents } from "./live.js";

/** How many points the daemon makes of all steps; a chart has fewer pixels. */
const POINTS = 1000;
/** So many more steps are appended one by one before the whole is asked for again. */
const MOST_APPENDED = 1000;

/** What is known of a figure: its title, how a value is written, and whether it has a place of its own in the page. */
const KNOWN = {
  loss: { title: "Loss", format: (v) => short(v) },
  grad_norm: { title: "Gradient norm", format: (v) => short(v, 3), about: "before clipping" },
  learning_rate: { title: "Learning rate", format: (v) => short(v, 3) },
  tokens_per_second: { title: "Tokens per second", format: (v) => short(v, 3) },
  duration_s: { title: "Time of a step", format: (v) => span(v) },
  overlap_ratio: {
    title: "Transfer overlap",
    format: (v) => percent(v),
    about: "share of the copying that compute hid",
    floor: 0,
  },
  host_memory_bytes: { title: "Host memory", format: (v) => bytes(v), floor: 0, isBytes: true },
  device_memory_bytes: { title: "Device memory", format: (v) => bytes(v), floor: 0, isBytes: true },
};
const ORDER = Object.keys(KNOWN);

export function figure(name) {
  if (KNOWN[name]) return KNOWN[name];
  if (name.startsWith("method/")) return { title: name.slice(7), format: (v) => short(v, 3) };
  const share = /\/(accuracy|exact_match)$/.test(name);
  const [set, what] = [name.slice(0, name.lastIndexOf("/")), name.slice(name.lastIndexOf("/") + 1)];
  if (name === "eval_loss") return { title: "Evaluation loss", format: (v) => short(v) };
  return {
    title: `${set}: ${what.replace("_", " ")}`,
    format: share ? (v) => (v === null ? "-" : `${(v * 100).toFixed(1)} %`) : (v) => short(v),
  };
}

/** Of a job on the processors, which has no link and no memory but the host's. */
const OF_DEVICE = ["overlap_ratio", "device_memory_bytes"];

/** Names of the figures that have values, known ones first, the method's next. */
export function names(series, device) {
  const present = Object.keys(series).filter(
    (name) => series[name].mean.some((v) => v !== null) && !(device?.startsWith("host") && OF_DEVICE.includes(name)),
  );
  const rank = (name) =>
    ORDER.includes(name) ? ORDER.indexOf(name) : name.startsWith("method/") ? 0.5 : ORDER.length;
  return present.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
}

/** Figures of evaluations that have values, without the loss of a set that the evaluation's own loss is of. */
export function evalNames({ series }) {
  const all = JSON.stringify(series.eval_loss);
  return Object.keys(series).filter(
    (name) =>
      series[name].some((v) => v !== null) && (name === "eval_loss" || JSON.stringify(series[name]) !== all),
  );
}

/** What a step's event says of each figure. */
function valuesOf(step) {
  const total = (sizes) =>
    sizes && Object.keys(sizes).length ? Object.values(sizes).reduce((sum, n) => sum + n, 0) : null;
  const values = {
    loss: step.loss,
    grad_norm: step.grad_norm,
    learning_rate: step.learning_rate,
    tokens_per_second: step.tokens_per_second,
    duration_s: step.duration_s,
    overlap_ratio: step.overlap_ratio,
    host_memory_bytes: total(step.host_memory_bytes),
    device_memory_bytes: total(step.device_memory_bytes),
  };
  for (const [name, value] of Object.entries(step.method_figures || {})) values[`method/${name}`] = value;
  return values;
}

/** Append a step to the columns, and its absence to those that it says nothing of. */
export function appendStep(data, step) {
  const { steps, series } = data;
  // Steps after the last checkpoint are done again after a restart: what was there is replaced.
  while (steps.length && steps[steps.length - 1] >= step.step) {
    steps.pop();
    for (const one of Object.values(series)) for (const column of Object.values(one)) column.pop();
  }
  const values = valuesOf(step);
  for (const name of Object.keys(values)) {
    if (!series[name] && values[name] !== null && values[name] !== undefined) {
      const empty = () => Array(steps.length).fill(null);
      series[name] = { mean: empty(), min: empty(), max: empty() };
    }
  }
  steps.push(step.step);
  for (const [name, one] of Object.entries(series)) {
    const value = values[name] ?? null;
    for (const column of Object.values(one)) column.push(value);
  }
  data.num_steps = step.num_steps || data.num_steps;
}

function appendEval(data, done) {
  const { steps, series } = data.evals;
  if (steps.includes(done.step)) return;
  const values = { eval_loss: done.eval_loss };
  for (const set of done.sets || []) {
    for (const name of ["loss", "perplexity", "accuracy", "exact_match"])
      values[`${set.name}/${name}`] = set[name];
  }
  for (const name of Object.keys(values)) series[name] ||= Array(steps.length).fill(null);
  steps.push(done.step);
  for (const [name, column] of Object.entries(series)) column.push(values[name] ?? null);
}

/** What a change of state is marked as, as the daemon marks it in what it answers. */
function markOf(data, event) {
  const before = data.marks.filter((mark) => mark.kind !== "checkpoint").pop()?.kind;
  if (event.job_state === "RUNNING")
    return before === undefined ? "start" : ["pause", "end"].includes(before) ? "resume" : "restart";
  if (event.job_state === "PAUSED") return "pause";
  return hasEnded(event.job_state) ? "end" : null;
}

function append(data, events) {
  let last = data.steps.length ? data.steps[data.steps.length - 1] : 0;
  for (const event of events) {
    if (event.kind === "step") {
      appendStep(data, event);
      last = event.step;
    } else if (event.kind === "eval") appendEval(data, event);
    else if (event.kind === "checkpoint")
      data.marks.push({ kind: "checkpoint", step: event.step, time: event.time_s, text: "" });
    else if (event.kind === "state") {
      const kind = markOf(data, event);
      if (kind) data.marks.push({ kind, step: last, time: event.time_s, text: event.message });
    }
    data.last_sequence = event.sequence;
  }
}

/**
 * Columns of several jobs, read once, then kept up to date by their events.
 *
 * @param {string[]} ids
 * @param {[number, number] | null} range steps to show in detail
 * @param {(jobId: string, events: any[]) => void} [onEvents] told of the events too
 */
export function useSeries(ids, range, onEvents) {
  const [found, set] = useState({ key: "", data: {}, error: null });
  const [, again] = useState(0);
  const appended = useRef(0);
  const key = ids.join(",");
  const [from, to] = range || [undefined, undefined];
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    if (!ids.length) return undefined;
    const asking = new AbortController();
    const readOne = (id, sketch) =>
      readAndRemember(
        pathOf(["jobs", id, "series"], { points: POINTS, from_step: from, to_step: to, sketch }),
        asking.signal,
      );
    const show = (answers) => {
      appended.current = 0;
      // A copy: answers are remembered, and these columns grow.
      const data = Object.fromEntries(answers.map((answer, i) => [ids[i], structuredClone(answer)]));
      set({ key, data, error: null });
    };
    const readAll = async () => {
      // At once a sketch, which is complete already unless the daemon has many steps to read first.
      const sketches = await Promise.all(ids.map((id) => readOne(id, "true")));
      show(sketches);
      if (sketches.every((one) => one.complete)) return;
      show(await Promise.all(sketches.map((one, i) => (one.complete ? one : readOne(ids[i])))));
    };
    readAll().catch((error) => {
      if (error.name !== "AbortError") set((old) => ({ ...old, key, error }));
    });
    return () => asking.abort();
  }, [key, from, to, turn]);
  // Events go on from a complete answer only.
  const isKnown = found.key === key && !found.error && ids.every((id) => found.data[id]?.complete);
  const ranged = useRef(range);
  ranged.current = range;
  const follow = useRef(null);
  follow.current = (id, events) => {
    onEvents?.(id, events);
    const data = found.data[id];
    // A part that was zoomed into does not grow.
    if (!data || ranged.current) return;
    append(data, events);
    appended.current += events.length;
    if (appended.current > MOST_APPENDED) setTurn((n) => n + 1);
    again((n) => n + 1);
  };
  useJobEvents(
    isKnown ? ids.map((id) => ({ job_id: id, last_sequence: found.data[id].last_sequence })) : [],
    useCallback((id, events) => follow.current(id, events), []),
  );
  return { data: found.key === key ? found.data : {}, error: found.error };
}

/** Exponential smoothing of 0 (none) to just under 1; gaps stay gaps. The start is not pulled to zero. */
export function smooth(values, weight) {
  if (!weight) return values;
  let kept = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    kept = kept * weight + (1 - weight) * value;
    mass = mass * weight + (1 - weight);
    return kept / mass;
  });
}
