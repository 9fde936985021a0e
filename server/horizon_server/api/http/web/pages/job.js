/** One job: is it well, when does it end, and below that everything known of it, in parts with own addresses. */
import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";
import * as actions from "../actions.js";
import { count, ending, hasEnded, percent, short, span, stateWord, stepsText } from "../format.js";
import { health } from "../health.js";
import { newest, useLive } from "../live.js";
import {
  Announce,
  Copy,
  Empty,
  Fact,
  Facts,
  Problem,
  Progress,
  Said,
  State,
  Time,
  useData,
  useTitle,
  Waiting,
} from "../parts.js";
import { pathOf } from "../api.js";
import { mayCreate, whyNotChange, whyNotNow } from "../rights.js";
import { jobAddress, setQuery, useAddress } from "../router.js";
import { chartChoices } from "../charts.js";
import { useSeries } from "../series.js";
import { Checkpoints } from "./job_checkpoints.js";
import { Config } from "./job_config.js";
import { Curves } from "./job_curves.js";
import { Evaluations } from "./job_evaluations.js";
import { Log } from "./job_log.js";
import { PlanAndUse } from "./job_plan.js";

const PARTS = [
  ["", "Curves", Curves],
  ["evaluations", "Evaluations", Evaluations],
  ["checkpoints", "Checkpoints", Checkpoints],
  ["config", "Config", Config],
  ["plan", "Plan and use", PlanAndUse],
  ["log", "Log", Log],
];

/** A button that does nothing says why, also to a keyboard and a screen reader: it stays reachable. */
function Action({ why, onClick, danger, children }) {
  return html`
    <button
      type="button"
      class=${danger ? "danger" : ""}
      aria-disabled=${String(!!why)}
      title=${why || undefined}
      onClick=${() => {
        if (!why) onClick();
      }}
    >
      ${children}
    </button>
  `;
}

function Actions({ job, me }) {
  if (!me) return null;
  const why = whyNotChange(me, job);
  const button = (name, act, text, danger) => {
    const cannot = why || whyNotNow(name, job);
    return html`
      <${Action} why=${cannot} danger=${danger} onClick=${() => act(job)}>
        ${text}
      <//>
    `;
  };
  const resumable = ["PAUSED", "FAILED"].includes(job.state);
  return html`
    <div class="actions" role="group" aria-label="Actions">
      ${!hasEnded(job.state) && !resumable && button("pause", actions.pause, "Pause")}
      ${resumable && button("resume", actions.resume, "Resume")}
      ${!hasEnded(job.state) && button("priority", actions.setPriority, "Priority")}
      ${mayCreate(me) && html`
        <a class="button" href="/new?from=${encodeURIComponent(job.job_id)}">Clone</a>
      `}
      <a class="button" href="/compare?jobs=${job.job_id}">Compare</a>
      ${!hasEnded(job.state) && button("cancel", actions.cancel, "Cancel", true)}
      ${why && !hasEnded(job.state) && html`<span class="quiet why-not">${why}</span>`}
    </div>
  `;
}

/** The figures that answer a glance. */
function Glance({ job }) {
  const step = job.last_step;
  const [, end] = ending(job);
  const evaluation = job.last_eval;
  const predicted = job.plan?.prediction;
  const onDevice = job.plan && !job.plan.device.startsWith("host");
  const lastSets = (evaluation?.sets || []).filter(
    (set) => set.exact_match !== null && set.exact_match !== undefined,
  );
  return html`
    <${Facts}>
      ${step && html`<${Fact} label="Loss">${short(step.loss)}<//>`}
      ${evaluation && html`
        <${Fact} label="Last evaluation" title="at step ${evaluation.step}">
          ${short(evaluation.eval_loss)}
          ${job.best_eval && job.best_eval.step !== evaluation.step && html`
            ${" "}
            <small>best ${short(job.best_eval.eval_loss)} at ${count(job.best_eval.step)}</small>
          `}
        <//>
      `}
      ${lastSets.map((set) => html`
        <${Fact} key=${set.name} label=${lastSets.length > 1 ? `Right in ${set.name}` : "Answers right"}>
          ${count(set.num_matches)} of ${count(set.num_answers)}
        <//>
      `)}
      ${step && html`
        <${Fact} label="Tokens/s">
          ${short(step.tokens_per_second, 3)}
          ${predicted && html`
            ${" "}
            <small>predicted ${short(predicted.tokens_per_second, 3)}</small>
          `}
        <//>
      `}
      ${step && html`<${Fact} label="A step takes">${span(step.duration_s)}<//>`}
      ${step && onDevice && html`<${Fact} label="Transfer overlap">${percent(step.overlap_ratio)}<//>`}
      ${job.outlook && !["QUEUED", "PAUSED"].includes(job.state) && html`
        <${Fact} label="Share of the device">${percent(job.outlook.share)}<//>
      `}
      ${job.device_s > 0 && html`<${Fact} label="Device time">${span(job.device_s)}<//>`}
      ${job.attempt > 1 && html`<${Fact} label="Attempt">${job.attempt}<//>`}
      ${job.priority !== 0 && html`<${Fact} label="Priority">${job.priority}<//>`}
      ${job.deletion_time && html`
        <${Fact} label="Checkpoints are deleted" tone="warn">
          <${Time} at=${job.deletion_time} />
        <//>
      `}
    <//>
  `;
}

export function Job({ name }) {
  const { me, queue } = useLive();
  const { data, error, reload } = useData(pathOf(["jobs", name]));
  if (error?.status === 404) {
    return html`
      <div class="title">
        <h1>${name}</h1>
      </div>
      <${Empty} title="There is no such job, or it is not yours.">
        <a href="/jobs">All jobs</a>
      <//>
    `;
  }
  if (!data)
    return html`
      <div class="title">
        <h1>${name}</h1>
      </div>
      ${error ? html`<${Problem} error=${error} again=${reload} />` : html`<${Waiting} rows=${6} />`}
    `;
  return html`<${Known} key=${data.job_id} read=${data} me=${me} queue=${queue} reload=${reload} />`;
}

function Known({ read, me, queue, reload }) {
  const job = newest(read);
  const { query } = useAddress();
  const [lastTime, setLastTime] = useState(null);
  const [news, setNews] = useState(0);
  const lastState = useRef(read.state);
  const { range } = chartChoices(query);
  const { data, error } = useSeries([job.job_id], range, (id, events) => {
    setLastTime(events[events.length - 1].time_s);
    if (events.some((event) => !["step", "prepare"].includes(event.kind))) setNews((n) => n + 1);
  });
  const columns = data[job.job_id];
  const well = health(job, range ? null : columns, lastTime);
  const [ends, end] = ending(job);
  const part = PARTS.find(([key]) => key === (query.get("tab") || "")) || PARTS[0];
  useTitle(
    `${job.name}, ${stateWord(job.state).toLowerCase()}` +
      (job.state === "RUNNING" ? ` ${Math.floor(job.progress * 100)} %` : ""),
  );
  // What is told of a job has no plan: the whole is read again when its state changes.
  useEffect(() => {
    if (job.state !== read.state || news) reload();
  }, [job.state, job.attempt, news]);
  const said =
    lastState.current === job.state ? "" : `${job.name} is now ${stateWord(job.state).toLowerCase()}`;
  const Shown = part[2];
  return html`
    <div class="title job-title">
      <div>
        <p class="crumbs">
          <a href="/jobs">Jobs</a>
        </p>
        <h1>
          ${job.name} <${State} state=${job.state} />
        </h1>
        <p class="quiet sub">
          <${Copy} quiet text=${job.job_id} label="Copy the id" />
          <span>
            ${job.owner === me?.name ? html`<b>yours</b>` : html`
              of <b>${job.owner}</b>
            `}
            ${job.project !== job.owner ? ` in ${job.project}` : ""}
          </span>
          ${job.box && html`<span>on machine <b>${job.box}</b></span>`}
          <span>${job.spec.method} of ${job.spec.model} on ${job.spec.dataset}</span>
          <span>
            submitted <${Time} at=${job.create_time} />
          </span>
        </p>
      </div>
      <${Actions} job=${job} me=${me} />
    </div>
    <section class="card glance" aria-label="At a glance">
      <p class="health ${well.tone}">
        <b>${well.word}</b>
        <span>
          <${Said} text=${well.text} />
        </span>
      </p>
      <${Progress} job=${job} />
      <p class="line">
        <span>
          ${stepsText(job)}
          ${job.last_step && job.last_step.epoch ? `, epoch ${short(job.last_step.epoch, 3)}` : ""}
        </span>
        <b>${end ? ends : ""}</b>
      </p>
      <${Glance} job=${job} />
      <${Company} job=${job} queue=${queue} me=${me} />
    </section>
    <nav class="tabs" aria-label="Parts of this job">
      ${PARTS.map(([key, text]) => html`
        <a
          key=${key}
          href=${jobAddress(
            read.job_id === job.job_id
              ? location.pathname.split("/")[2] && decodeURIComponent(location.pathname.split("/")[2])
              : job.job_id,
            key ? `?tab=${key}` : "",
          )}
          aria-current=${part[0] === key ? "page" : undefined}
        >
          ${text}
        </a>
      `)}
    </nav>
    ${error && html`<${Problem} error=${error} />`}
    <${Shown} job=${job} columns=${columns} news=${news} me=${me} query=${query} setQuery=${setQuery} />
    <${Announce} text=${said} />
  `;
}

/** Who shares the device with a job that is on it. */
function Company({ job, queue, me }) {
  const mine = (queue || []).find((entry) => entry.job_id === job.job_id);
  if (!mine || mine.state === "QUEUED") return null;
  const others = queue.filter((entry) => entry.job_id !== job.job_id && entry.outlook?.share > 0);
  if (!others.length) return null;
  return html`
    <p class="quiet company">
      Shares the machine with${" "}
      ${others.map((entry, i) => html`
        ${i > 0 && ", "}
        ${entry.name ? html`<a href="/jobs/${entry.job_id}">${entry.name}</a> of${" "}` : ""}
        ${entry.owner === me?.name ? "you" : entry.owner} (${percent(entry.outlook.share)})
      `)}
    </p>
  `;
}
