/** What the daemon tells by itself: the machine, the queue, jobs, and the events of the jobs that are looked at. */
import { useEffect, useState } from "./vendor/preact-htm.js";
import { isSignedIn, pathOf, read } from "./api.js";
import { Stream } from "./stream.js";

/** The state that all parts of the page show; `jobs` has the bodies of the jobs that were told of, by id. */
export const live = {
  /** @type {import("./stream.js").Connection} */
  connection: "resting",
  me: null,
  node: null,
  queue: null,
  jobs: new Map(),
  /** Whether the first list of jobs has come. */
  hasJobs: false,
};

const listeners = new Set();
const jobListeners = new Set();
/** The number of the last event received, by job. */
const lastSequence = new Map();
let watched = [];
let scheduled = false;

function changed() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    for (const listener of listeners) listener();
  });
}

/** Render again whenever something of `live` has changed, and return it. */
export function useLive() {
  const [, again] = useState(0);
  useEffect(() => {
    const listener = () => again((n) => n + 1);
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, []);
  return live;
}

const stream = new Stream(received, (state) => {
  if (live.connection === state) return;
  live.connection = state;
  changed();
});

function received(event, data) {
  if (event === "jobs") {
    for (const job of data.jobs) live.jobs.set(job.job_id, job);
    for (const id of data.gone || []) live.jobs.delete(id);
    live.hasJobs = true;
  } else if (event === "queue") live.queue = data.jobs;
  else if (event === "node") live.node = data;
  else if (event === "job" && watched.includes(data.job_id)) {
    const events = data.events.filter((one) => one.sequence > (lastSequence.get(data.job_id) || 0));
    if (!events.length) return;
    lastSequence.set(data.job_id, events[events.length - 1].sequence);
    for (const listener of jobListeners) listener(data.job_id, events);
  }
  changed();
}

function address() {
  const after = watched.map((id) => lastSequence.get(id) || 0).join(",");
  return pathOf(["stream"], { topics: "jobs,queue,node", jobs: watched.join(","), after });
}

/** Begin to follow the daemon as the signed-in user. */
export async function start() {
  stream.follow(address);
  live.me = await read("/me");
  changed();
}

/** Forget everything. */
export function stop() {
  stream.stop();
  lastSequence.clear();
  Object.assign(live, { me: null, node: null, queue: null, jobs: new Map(), hasJobs: false });
  changed();
}

/**
 * Follow the events of jobs too, from a number on, as long as the part of the page is shown.
 *
 * @param {{job_id: string, last_sequence: number}[]} jobs
 * @param {(jobId: string, events: any[]) => void} onEvents
 */
export function useJobEvents(jobs, onEvents) {
  const ids = jobs.map((job) => job.job_id);
  useEffect(() => {
    if (!ids.length || !isSignedIn()) return undefined;
    for (const job of jobs)
      lastSequence.set(job.job_id, Math.max(lastSequence.get(job.job_id) || 0, job.last_sequence));
    watched = ids;
    stream.follow(address);
    jobListeners.add(onEvents);
    return () => {
      jobListeners.delete(onEvents);
      // The next page may follow others: only the last one's choice is sent.
      if (watched === ids) {
        watched = [];
        for (const id of ids) lastSequence.delete(id);
      }
    };
  }, [ids.join(",")]);
}

/** A job's newest body: what was told last, over the one that was read, which has fields that are not told. */
export function newest(job) {
  const told = job && live.jobs.get(job.job_id);
  return told && told.last_sequence >= job.last_sequence ? { ...job, ...told, spec: job.spec } : job;
}
