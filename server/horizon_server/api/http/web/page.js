"use strict";
// One page over the REST interface. The token lives in sessionStorage; all text reaches the page as text, never as markup.
const POLL_MS = 3000;
const MAX_LINES = 200;
const MAX_ANSWERS = 3;
const MAX_ANSWER_CHARS = 400;
const el = (id) => document.getElementById(id);
let token = sessionStorage.getItem("horizon-token") || "";
let chosen = "";        // job_id of the open detail
let watching = null;    // AbortController of its event stream
let points = [];
let evals = [];

function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i += 1; }
  return `${n >= 100 || i === 0 ? Math.round(n) : n.toFixed(1)} ${units[i]}`;
}

function span(seconds) {
  if (seconds === null || seconds === undefined || seconds <= 0) return "";
  if (seconds < 90) return `${Math.ceil(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} d`;
}

function clock(iso) {
  const at = new Date(iso);
  const time = at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  return Math.abs(at - Date.now()) < 43200000 ? time : `${at.toLocaleDateString()} ${time}`;
}

// How many steps a job will have that has done none yet, as its plan counts or estimates them.
function total(job) {
  const steps = !ended(job.state) && job.plan && job.plan.num_steps;
  return steps ? `${job.plan.steps_estimated ? "about " : ""}${steps} steps` : "";
}

// Why a job is where it is, its share and its estimated times, as one line; nothing for a job that has ended.
function outlookText(job) {
  const outlook = job.outlook;
  if (!outlook) return "";
  const waits = job.state === "QUEUED";
  // Of other users' jobs there is no reason.
  const parts = [outlook.why || (waits ? "" : `share ${Math.round(outlook.share * 100)} %`)];
  if (waits && outlook.estimated_start_time) parts.push(`starts about ${clock(outlook.estimated_start_time)}`);
  if (outlook.estimated_end_time) parts.push(`ends about ${clock(outlook.estimated_end_time)}`);
  return parts.filter(Boolean).join("; ");
}

const short = (x, digits = 4) => (x === null || x === undefined ? "" : String(Number(x.toPrecision(digits))));
const ended = (state) => ["SUCCEEDED", "FAILED", "CANCELLED"].includes(state);
const tone = (state) => ({ RUNNING: "run", STARTING: "run", PREPARING: "run", STOPPING: "run", SUCCEEDED: "good", FAILED: "bad" })[state] || "";

function bar(share, className) {
  const outer = make("div", `bar ${className || ""}`);
  const inner = make("i");
  inner.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  outer.append(inner);
  return outer;
}

function fact(value, label, extra) {
  const box = make("div", "fact");
  box.append(make("b", "", value), make("span", "", label));
  if (extra) box.append(extra);
  return box;
}

async function call(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: { Authorization: `Bearer ${token}`, ...options.headers } });
  if (answer.status === 401) { signOut("This token is wrong, expired or revoked."); throw new Error("signed out"); }
  if (!answer.ok) {
    const body = await answer.json().catch(() => null);
    throw new Error(body && body.error ? body.error.message : `the daemon answered ${answer.status}`);
  }
  return answer;
}

const read = async (path) => (await call(path)).json();

function showNode(node) {
  el("host").textContent = `${node.hostname} - ${node.version}`;
  el("who").textContent = `${node.user} (${node.role})`;
  const used = node.host_memory_limit_bytes - node.host_memory_available_bytes;
  const facts = [
    fact(`${bytes(used)} of ${bytes(node.host_memory_limit_bytes)}`, "host memory", bar(used / node.host_memory_limit_bytes)),
    fact(bytes(node.disk_free_bytes), "disk free"),
    fact(String(node.num_cpus), "processors"),
    ...node.accelerators.map((a) => fact(a.name, `GPU ${a.index}, ${bytes(a.memory_bytes)}`)),
  ];
  if (!node.accelerators.length) facts.push(fact("none", "GPUs"));
  facts.push(fact(`${bytes(node.host_memory_promised_bytes)}`, "promised to resident jobs and answers"));
  facts.push(...node.devices.filter((d) => d.num_residents).map((d) => fact(d.holder || "nobody", `has its turn on ${d.name}, ${d.num_residents} resident`)));
  const condition = node.condition;
  if (node.draining) facts.push(fact("shutting down", "accepts no new jobs"));
  else if (node.mode !== "open") facts.push(fact(node.mode, condition.message || "no job starts"));
  if (condition.window_start_time) facts.push(fact(`${clock(condition.window_start_time)} to ${clock(condition.window_end_time)}`, `maintenance${condition.message ? `: ${condition.message}` : ""}`));
  el("node").replaceChildren(...facts);
}

function showQueue(queue) {
  const rows = queue.jobs.map((job) => {
    const row = make("li");
    row.append(make("span", "place", job.position || ""), make("span", "name", job.name || job.job_id),
      make("span", "quiet", job.owner), make("span", `chip ${tone(job.state)}`, job.state));
    const outlook = outlookText(job);
    if (outlook) row.append(make("small", "quiet", outlook));
    return row;
  });
  el("queue").replaceChildren(...(rows.length ? rows : [make("li", "quiet", "No jobs are resident or waiting.")]));
}

function jobRow(job) {
  const row = make("tr");
  const step = job.last_step;
  const name = make("td", "", job.name);
  name.append(make("small", "", job.job_id));
  const state = make("td");
  state.append(make("span", `chip ${tone(job.state)}`, job.state));
  const progress = make("td");
  progress.append(bar(job.progress, ended(job.state) ? tone(job.state) : ""));
  progress.append(make("small", "", job.num_steps ? `step ${job.step} of ${job.num_steps}` : [job.queue_position ? `place ${job.queue_position}` : "", total(job)].filter(Boolean).join(", ")));
  const live = job.state === "RUNNING" && step;
  // At full speed a job that shares the device would end too early.
  const end = job.outlook && job.outlook.estimated_end_time;
  row.append(name, make("td", "", job.owner), state, progress, make("td", "num", step ? short(step.loss) : ""),
    make("td", "num", live ? short(step.tokens_per_second, 3) : ""), make("td", "num", end ? span((new Date(end) - Date.now()) / 1000) : live ? span(job.eta_s) : ""));
  row.tabIndex = 0;
  row.setAttribute("aria-selected", String(job.job_id === chosen));
  row.addEventListener("click", () => open(job.job_id));
  row.addEventListener("keydown", (e) => { if (e.key === "Enter") open(job.job_id); });
  return row;
}

function showDetail(job) {
  const step = job.last_step;
  el("detail").hidden = false;
  el("detail-title").textContent = `${job.name} - ${job.state.toLowerCase()}`;
  el("message").textContent = outlookText(job) || job.message || `${job.spec.method} of ${job.spec.model} on ${job.spec.dataset}`;
  const facts = [];
  if (step) {
    facts.push(fact(`${job.step} of ${job.num_steps}`, `step, epoch ${short(step.epoch, 3)}`), fact(short(step.loss), "train loss"),
      fact(short(step.grad_norm, 3), "gradient norm"), fact(short(step.learning_rate, 3), "learning rate"),
      fact(short(step.tokens_per_second, 3), "tokens/s"));
    // A job on the host has no link, so there is nothing to overlap.
    if (job.plan && job.plan.device !== "host") facts.push(fact(`${Math.round((step.overlap_ratio || 0) * 100)} %`, "transfer overlap"));
  }
  facts.push(fact(String(job.attempt), "attempt"));
  if (job.outlook && job.state !== "QUEUED") facts.push(fact(`${Math.round(job.outlook.share * 100)} %`, "share of the device"));
  if (job.device_s) facts.push(fact(span(job.device_s), "device time"));
  if (job.priority) facts.push(fact(String(job.priority), "priority"));
  if (job.deletion_time) facts.push(fact(new Date(job.deletion_time).toLocaleDateString(), "checkpoints are deleted; horizon job keep"));
  el("figures").replaceChildren(...facts);
  const planned = job.plan ? job.plan.host_bytes : {};
  const used = step ? step.host_memory_bytes : {};
  el("memory").replaceChildren(...Object.keys({ ...planned, ...used }).map((name) => {
    const row = make("div", "row");
    const most = Math.max(planned[name] || 0, used[name] || 0, 1);
    row.append(make("span", "", name), bar((used[name] || 0) / most), make("span", "quiet", `${bytes(used[name] || 0)} of ${bytes(planned[name] || 0)}`));
    return row;
  }));
}

function svg(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function drawCurve() {
  const train = points.filter((p) => p.loss !== null).map((p) => [p.step, p.loss]);
  const evaluated = evals.filter((p) => p.eval_loss !== null).map((p) => [p.step, p.eval_loss]);
  const all = [...train, ...evaluated];
  if (!all.length) { el("curve").replaceChildren(svg("text", { x: 320, y: 120, "text-anchor": "middle" }, "no steps yet")); return; }
  const [left, right, top, bottom] = [46, 630, 10, 214];
  const lastStep = all.reduce((most, p) => Math.max(most, p[0]), 1);
  let low = all.reduce((least, p) => Math.min(least, p[1]), Infinity);
  let high = all.reduce((most, p) => Math.max(most, p[1]), -Infinity);
  if (high - low < 1e-9) { low -= 0.5; high += 0.5; }
  const x = (step) => left + (right - left) * (step / lastStep);
  const y = (loss) => bottom - (bottom - top) * ((loss - low) / (high - low));
  const parts = [];
  for (let i = 0; i <= 4; i += 1) {
    const loss = low + (high - low) * (i / 4);
    parts.push(svg("line", { class: "grid", x1: left, x2: right, y1: y(loss), y2: y(loss) }));
    parts.push(svg("text", { x: left - 6, y: y(loss) + 4, "text-anchor": "end" }, short(loss, 3)));
  }
  parts.push(svg("text", { x: left, y: 232 }, "0"), svg("text", { x: right, y: 232, "text-anchor": "end" }, `step ${lastStep}`));
  const line = (dots) => dots.map((p) => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ");
  parts.push(svg("polyline", { class: "train", points: line(train) }), svg("polyline", { class: "eval", points: line(evaluated) }));
  parts.push(...evaluated.map((p) => svg("circle", { cx: x(p[0]), cy: y(p[1]), r: 3 })));
  el("curve").replaceChildren(...parts);
}

// Of a method other than cross-entropy, such as rewards/margins of dpo.
const figuresOf = (data) => Object.entries(data.method_figures || {}).map(([name, value]) => `, ${name} ${short(value)}`).join("");

// Unset numbers are null, as are those that JSON cannot write.
function evaluationText(data) {
  const lines = [`evaluation after step ${data.step}: loss ${short(data.eval_loss)}${figuresOf(data)}`];
  for (const set of data.sets || []) {
    const match = set.exact_match === null ? "" : `, exact match ${short(100 * set.exact_match, 2)} % (${set.num_matches} of ${set.num_answers})`;
    const ofText = set.accuracy === null ? "" : `, perplexity ${short(set.perplexity)}, accuracy ${short(100 * set.accuracy, 2)} %`;
    lines.push(`  ${set.name}: loss ${short(set.loss)}${ofText} of ${set.num_targets} tokens${match}`);
  }
  for (const one of (data.answers || []).slice(0, MAX_ANSWERS)) {
    const mark = one.expected === null ? "" : ` [${one.matches ? "right" : "wrong"}, data: ${one.expected}]`;
    lines.push(`  prompt: ${one.prompt.slice(-MAX_ANSWER_CHARS)}`, `  answer: ${one.answer.slice(0, MAX_ANSWER_CHARS)}${mark}`);
  }
  return lines.join("\n");
}

function textOf(kind, data) {
  if (kind === "state") return [data.job_state, data.reason, data.message].filter(Boolean).join(" - ");
  if (kind === "step") return `step ${data.step}: loss ${short(data.loss)}, gradient norm ${short(data.grad_norm, 3)}${figuresOf(data)}${data.skipped ? `, skipped: ${data.skipped}` : ""}`;
  if (kind === "eval") return evaluationText(data);
  if (kind === "checkpoint") return `checkpoint of step ${data.step}: ${bytes(data.size_bytes)} in ${span(data.duration_s) || "0 s"}`;
  if (kind === "prepare") return `prepared ${data.done_rows}${data.total_rows ? ` of ${data.total_rows}` : ""} rows`;
  return kind === "message" ? data.text : "";
}

function onEvent(kind, data) {
  if (kind === "step") { points = points.filter((p) => p.step < data.step); points.push(data); drawCurve(); }
  if (kind === "eval") { evals = evals.filter((p) => p.step < data.step); evals.push(data); drawCurve(); }
  if (kind === "state") refresh();
  const line = make("li");
  line.append(make("time", "", new Date(data.time_s * 1000).toLocaleTimeString()), document.createTextNode(textOf(kind, data)));
  const log = el("events");
  log.prepend(line);
  while (log.childElementCount > MAX_LINES) log.lastElementChild.remove();
}

// EventSource cannot send the token, so the stream is read with fetch; returns the last event's number, or null at the end.
async function follow(jobId, after, signal) {
  const answer = await call(`/horizon/v1/jobs/${encodeURIComponent(jobId)}/events`, { headers: { "Last-Event-ID": String(after) }, signal });
  if (answer.status === 204) return null;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return after;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      const fields = Object.fromEntries(frame.split("\n").filter((l) => l.includes(": ") && !l.startsWith(":")).map((l) => [l.slice(0, l.indexOf(": ")), l.slice(l.indexOf(": ") + 2)]));
      if (fields.event === "end") return null;
      if (!fields.id) continue;
      after = Number(fields.id);
      onEvent(fields.event, JSON.parse(fields.data));
    }
  }
}

async function watch(job) {
  if (watching) watching.abort();
  watching = new AbortController();
  const { signal } = watching;
  let after = Math.max(0, job.last_sequence - MAX_LINES);
  while (after !== null && !signal.aborted) {
    try { after = await follow(job.job_id, after, signal); } catch (error) { if (signal.aborted || !token) return; }
    if (after !== null) await new Promise((resolve) => { setTimeout(resolve, 2000); });
  }
}

async function open(jobId) {
  chosen = jobId;
  el("events").replaceChildren();
  try {
    const [job, curve] = [await read(`/horizon/v1/jobs/${encodeURIComponent(jobId)}`), await read(`/horizon/v1/jobs/${encodeURIComponent(jobId)}/metrics`)];
    if (chosen !== jobId) return;
    points = curve.points;
    evals = curve.evals;
    showDetail(job);
    drawCurve();
    watch(job);
  } catch (error) { complain(error); }
}

function complain(error) {
  if (!token) return;
  el("problem").textContent = error.message;
  el("problem").hidden = false;
  el("sign-in").hidden = true;
  el("board").hidden = false;
  el("leave").hidden = false;
  el("link").textContent = "not connected";
  el("link").className = "chip bad";
}

async function refresh() {
  if (!token) return;
  try {
    const [node, queue, page] = await Promise.all([read("/horizon/v1/node"), read("/horizon/v1/queue"), read("/horizon/v1/jobs?page_size=50")]);
    el("sign-in").hidden = true;
    el("board").hidden = false;
    el("leave").hidden = false;
    showNode(node);
    showQueue(queue);
    el("jobs").replaceChildren(...page.jobs.map(jobRow));
    el("no-jobs").hidden = page.jobs.length > 0;
    const shown = page.jobs.find((job) => job.job_id === chosen);
    if (shown) showDetail(shown);
    else if (!chosen && page.jobs.length) open((page.jobs.find((job) => job.state === "RUNNING") || page.jobs[0]).job_id);
    el("problem").hidden = true;
    el("link").textContent = "live";
    el("link").className = "chip good";
  } catch (error) { complain(error); }
}

function signOut(why) {
  token = "";
  sessionStorage.removeItem("horizon-token");
  if (watching) watching.abort();
  chosen = "";
  for (const id of ["board", "leave", "detail"]) el(id).hidden = true;
  for (const id of ["host", "who", "link"]) el(id).textContent = "";
  el("refused").textContent = why || "";
  el("sign-in").hidden = false;
}

el("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = el("token").value.trim();
  el("token").value = "";
  sessionStorage.setItem("horizon-token", token);
  refresh();
});
el("leave").addEventListener("click", () => signOut(""));
if (token) refresh(); else signOut("");
setInterval(refresh, POLL_MS);
