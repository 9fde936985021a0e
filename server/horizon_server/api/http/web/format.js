/** Numbers, sizes, times and states as people read them. */

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(n) {
  if (n === null || n === undefined) return "-";
  let unit = 0;
  while (n >= 1024 && unit < UNITS.length - 1) {
    n /= 1024;
    unit += 1;
  }
  return `${n >= 100 || unit === 0 ? Math.round(n) : n.toFixed(1)} ${UNITS[unit]}`;
}

/** A duration in its one or two largest units. */
export function span(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "";
  const s = Math.max(0, seconds);
  if (s < 1) return s === 0 ? "0 s" : `${Math.round(s * 1000)} ms`;
  if (s < 10) return `${Number(s.toFixed(1))} s`;
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 3570) return `${Math.round(s / 60)} min`;
  const minutes = Math.round(s / 60);
  if (s < 86400) return `${Math.floor(minutes / 60)} h${minutes % 60 ? ` ${minutes % 60} min` : ""}`;
  const hours = Math.round(s / 3600);
  return `${Math.floor(hours / 24)} d${hours % 24 ? ` ${hours % 24} h` : ""}`;
}

const toDate = (time) => new Date(typeof time === "number" ? time * 1000 : time);

/** A time of day, with the day where it is not today. `time` is ISO 8601 or Unix seconds. */
export function clock(time) {
  if (!time) return "";
  const at = toDate(time);
  const text = at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
  const today = new Date();
  if (at.toDateString() === today.toDateString()) return text;
  const far = Math.abs(at - today) > 6 * 86400e3;
  const day = at.toLocaleDateString(
    [],
    far
      ? {
          day: "numeric",
          month: "short",
          ...(at.getFullYear() === today.getFullYear() ? {} : { year: "numeric" }),
        }
      : { weekday: "short" },
  );
  return `${day} ${text}`;
}

/** A time in full, for a title. */
export const fullTime = (time) =>
  time ? toDate(time).toLocaleString([], { dateStyle: "full", timeStyle: "medium" }) : "";

export const secondsFromNow = (time) => (toDate(time) - Date.now()) / 1000;

/** How long ago. */
export function ago(time) {
  if (!time) return "";
  const s = -secondsFromNow(time);
  return s < 5 ? "just now" : `${span(s)} ago`;
}

/** A number with few digits: 1.4142 as 1.414, 0.00001 as 1e-5. */
export function short(x, digits = 4) {
  if (x === null || x === undefined || !Number.isFinite(x)) return "-";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size < 1e-3 || size >= 1e7)
    return x
      .toExponential(2)
      .replace(/\.?0+e/, "e")
      .replace("e+", "e");
  if (size >= 1000) return Math.round(x).toLocaleString("en-US");
  return String(Number(x.toPrecision(digits)));
}

export const count = (n) => (n === null || n === undefined ? "-" : Math.round(n).toLocaleString("en-US"));

/** A large number in words: 12.3 M. */
export function large(n) {
  for (const [size, unit] of [
    [1e12, "T"],
    [1e9, "B"],
    [1e6, "M"],
    [1e4, "k"],
  ]) {
    if (n >= size) return `${Number((n / (unit === "k" ? 1e3 : size)).toPrecision(3))} ${unit}`;
  }
  return count(n);
}

export const percent = (share) =>
  share === null || share === undefined ? "-" : `${Math.round(share * 100)} %`;

export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

/** How a job's state is written, and its tone: run, good, bad, warn or none. */
export const STATES = {
  QUEUED: ["Queued", ""],
  PREPARING: ["Preparing", "run"],
  STARTING: ["Starting", "run"],
  RUNNING: ["Running", "run"],
  PAUSED: ["Paused", "warn"],
  STOPPING: ["Stopping", "warn"],
  SUCCEEDED: ["Finished", "good"],
  FAILED: ["Failed", "bad"],
  CANCELLED: ["Cancelled", ""],
};
export const stateWord = (state) => STATES[state]?.[0] || state;
export const stateTone = (state) => STATES[state]?.[1] || "";
export const hasEnded = (state) => ["SUCCEEDED", "FAILED", "CANCELLED"].includes(state);
export const isResident = (state) => ["PREPARING", "STARTING", "RUNNING", "STOPPING"].includes(state);

const SOON_S = 5;

/** When the job ends, as [words, time]; the words are empty where nothing is known. */
export function ending(job) {
  if (hasEnded(job.state))
    return [`${stateWord(job.state).toLowerCase()} ${clock(job.end_time)}`, job.end_time];
  // At full speed, a job that shares the device would end too early.
  const told = job.outlook?.estimated_end_time;
  const end = told || (job.state === "RUNNING" && job.eta_s ? Date.now() / 1000 + job.eta_s : null);
  if (end && secondsFromNow(end) < SOON_S) return ["ends soon", end];
  return end ? [`ends about ${clock(end)}, in ${span(secondsFromNow(end))}`, end] : ["", null];
}

/** Steps done of steps in all, as far as they are known. */
export function stepsText(job) {
  if (job.num_steps) return `step ${count(job.step)} of ${count(job.num_steps)}`;
  if (job.step) return `step ${count(job.step)}`; // a session has no last one
  const planned = job.plan?.num_steps;
  return planned ? `${job.plan.steps_estimated ? "about " : ""}${plural(planned, "step")}` : "";
}

/** Any value of a spec as text. */
export function valueText(value) {
  if (value === null || value === undefined) return "none";
  if (Array.isArray(value)) return `[${value.map(valueText).join(", ")}]`;
  if (typeof value === "object") return JSON.stringify(value);
  if (typeof value === "number" && value !== 0 && Math.abs(value) < 1e-3) return short(value);
  return String(value);
}

/** A nested object as [[dotted name, value], ...]; what is empty stays whole. */
export function flat(value, prefix = "") {
  return Object.entries(value).flatMap(([name, inner]) => {
    const path = prefix ? `${prefix}.${name}` : name;
    const isGroup = inner && typeof inner === "object" && !Array.isArray(inner) && Object.keys(inner).length;
    return isGroup ? flat(inner, path) : [[path, inner]];
  });
}
