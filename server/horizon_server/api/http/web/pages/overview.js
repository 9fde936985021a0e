/** The first page: what runs, who has the machine, who waits, and what needs a look. */
import { html, useEffect, useState } from "../vendor/preact-htm.js";
import { pathOf, readAndRemember } from "../api.js";
import { ago, bytes, count, ending, hasEnded, isResident, percent, short, stepsText } from "../format.js";
import { health } from "../health.js";
import { useLive } from "../live.js";
import { Machine } from "../machine.js";
import { Bar, Card, Empty, JobLink, Progress, Said, State, useTitle, Waiting } from "../parts.js";
import { mayCreate } from "../rights.js";
import { QueueRows } from "./queue.js";

const RECENT_S = 86400;
const MOST_RECENT = 6;

/** The loss of a running job as a small line, read once; newer steps are appended. */
function Sparkline({ job }) {
  const [points, set] = useState([]);
  useEffect(() => {
    readAndRemember(pathOf(["jobs", job.job_id, "series"], { points: 80 })).then(
      (data) => set(pairs(data)),
      () => {},
    );
  }, [job.job_id]);
  const loss = job.last_step?.loss;
  const last = points[points.length - 1];
  const all =
    last && loss !== null && loss !== undefined && job.step > last[0]
      ? [...points, [job.step, loss]]
      : points;
  if (all.length < 2) return html`<div class="spark"></div>`;
  const [width, height] = [240, 44];
  const values = all.map(([, v]) => v);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const end = all[all.length - 1][0];
  const x = (s) => (s / end) * (width - 4) + 2;
  const y = (v) => height - 4 - ((v - low) / (high - low || 1)) * (height - 8);
  const path = all.map(([s, v]) => `${x(s).toFixed(1)},${y(v).toFixed(1)}`).join(" ");
  return html`
    <svg
      class="spark"
      viewBox="0 0 ${width} ${height}"
      preserveAspectRatio="none"
      role="img"
      aria-label="Loss from ${short(values[0], 3)} to ${short(values[values.length - 1], 3)}"
    >
      <polyline points=${path} vector-effect="non-scaling-stroke" />
    </svg>
  `;
}

function pairs(data) {
  const mean = data.series.loss?.mean || [];
  return data.steps.map((step, i) => [step, mean[i]]).filter(([, v]) => v !== null);
}

function Running({ job, mine }) {
  const well = health(job);
  const [ends] = ending(job);
  const step = job.last_step;
  return html`
    <article class="running ${mine ? "mine" : ""}">
      <header>
        <h3>
          <${JobLink} job=${job} />
        </h3>
        <span class="quiet">
          ${job.owner}
          ${mine ? " (you)" : ""}
        </span>
        <${State} state=${job.state} />
      </header>
      <div class="figures">
        <${Sparkline} job=${job} />
        <dl>
          <div>
            <dt>Loss</dt>
            <dd>${step ? short(step.loss) : "-"}</dd>
          </div>
          <div>
            <dt>Evaluation</dt>
            <dd>${job.last_eval ? short(job.last_eval.eval_loss) : "-"}</dd>
          </div>
          <div>
            <dt>Tokens/s</dt>
            <dd>${step ? short(step.tokens_per_second, 3) : "-"}</dd>
          </div>
          <div>
            <dt>Share</dt>
            <dd>${job.outlook ? percent(job.outlook.share) : "-"}</dd>
          </div>
        </dl>
      </div>
      <${Progress} job=${job} />
      <p class="line">
        <span>${stepsText(job)}</span>
        <b>${ends}</b>
      </p>
      ${well.tone !== "good" && html`
        <p class="note ${well.tone}">
          <${Said} text=${well.text} />
        </p>
      `}
    </article>
  `;
}

function Recent({ jobs }) {
  return html`
    <ul class="recent">
      ${jobs.map((job) => html`
        <li key=${job.job_id}>
          <span class="name">
            <${JobLink} job=${job} />
          </span>
          <${State} state=${job.state} />
          <span class="quiet">${job.owner}, ${ago(job.end_time)}</span>
          ${job.state === "FAILED" ? html`<p class="note bad">${job.message}</p>` : (
            job.best_eval && html`
              <p class="note">
                best evaluation loss ${short(job.best_eval.eval_loss)} at step ${count(job.best_eval.step)}
              </p>
            `
          )}
        </li>
      `)}
    </ul>
  `;
}

export function Overview() {
  useTitle("Overview");
  const { me, node, queue, jobs, hasJobs } = useLive();
  const mine = (job) => job.owner === me?.name;
  const known = [...jobs.values()];
  const running = known
    .filter((job) => isResident(job.state))
    .sort((a, b) => mine(b) - mine(a) || b.progress - a.progress);
  const paused = known.filter((job) => job.state === "PAUSED");
  const recent = known
    .filter((job) => hasEnded(job.state) && Date.parse(job.end_time) > Date.now() - RECENT_S * 1000)
    .sort((a, b) => Date.parse(b.end_time) - Date.parse(a.end_time))
    .slice(0, MOST_RECENT);
  const waiting = (queue || []).filter((job) => job.state === "QUEUED");
  const others = (queue || []).filter((entry) => isResident(entry.state) && !jobs.has(entry.job_id));
  return html`
    <div class="title">
      <h1>Overview</h1>
      ${mayCreate(me) && html`<a class="button main" href="/new">New job</a>`}
    </div>
    <div class="overview">
      <div>
        <${Card} id="running" title="Running" aside=${running.length ? `${running.length}` : ""}>
          ${!hasJobs ? html`<${Waiting} rows=${3} />` : running.length ? html`
            <div class="runs">
              ${running.map((job) => html`<${Running} key=${job.job_id} job=${job} mine=${mine(job)} />`)}
            </div>
          ` : html`
            <${Empty} title="No job of yours runs.">
              ${waiting.some(mine) ? "The first one in the queue starts as soon as there is room." : html`
                <code>horizon job submit SPEC.yaml</code> starts one
                ${mayCreate(me) ? html`
                  , or <a href="/new">New job</a>
                ` : ""}
                .
              `}
            <//>
          `}
          ${others.length > 0 && html`
            <p class="quiet others">
              Also on the machine: ${others.map((entry) => entry.owner).join(", ")} (
              ${others.length === 1 ? "a job" : `${others.length} jobs`} you may not see)
            </p>
          `}
        <//>
        ${paused.length > 0 && html`
          <${Card} id="paused" title="Paused">
            <${Recent} jobs=${paused} />
          <//>
        `}
        <${Card} id="recent" title="Ended in the last day" aside=${html`<a href="/jobs">All jobs</a>`}>
          ${recent.length
              ? html`<${Recent} jobs=${recent} />`
              : html`<${Empty} title="No job has ended in the last day." />`}
        <//>
      </div>
      <div>
        <${Machine} node=${node} queue=${queue} me=${me} />
        <${Card} id="waiting" title="Waiting" aside=${html`<a href="/queue">Queue</a>`}>
          ${queue === null
            ? html`<${Waiting} rows=${2} />`
            : waiting.length
              ? html`<${QueueRows} entries=${waiting.slice(0, 6)} me=${me} brief />`
              : html`
            <${Empty} title="Nobody waits.">A job that is submitted now starts at once, if it fits.<//>
          `}
          ${waiting.length > 6 && html`
            <p class="quiet">
              <a href="/queue">${waiting.length - 6} more</a>
            </p>
          `}
        <//>
      </div>
    </div>
  `;
}
