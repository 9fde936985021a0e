/** Several jobs side by side: in what their specs differ, what came of it, and each figure in one chart. */
import { html } from "../vendor/preact-htm.js";
import { pathOf } from "../api.js";
import { Chart, ChartControls, chartChoices } from "../charts.js";
import { count, ending, flat, hasEnded, short, span, stepsText, valueText } from "../format.js";
import { newest, useLive } from "../live.js";
import { Card, Empty, Problem, Scroll, State, useData, useTitle, Waiting } from "../parts.js";
import { setQuery, useAddress } from "../router.js";
import { evalNames, figure, names, useSeries } from "../series.js";

const MOST = 8;
const OUTCOMES = [
  ["State", (job) => html`<${State} state=${job.state} />`],
  ["Owner", (job) => job.owner],
  ["Progress", (job) => stepsText(job) || "-"],
  ["Ends", (job) => ending(job)[0].replace(/^ends /, "") || "-"],
  ["Loss", (job) => short(job.last_step?.loss)],
  [
    "Best evaluation",
    (job) =>
      job.best_eval ? html`
        ${short(job.best_eval.eval_loss)} <small>at ${count(job.best_eval.step)}</small>
      ` : "-",
  ],
  ["Last evaluation", (job) => short(job.last_eval?.eval_loss)],
  ["Tokens/s", (job) => short(job.last_step?.tokens_per_second, 3)],
  ["Device time", (job) => (job.device_s ? span(job.device_s) : "-")],
];

/** One job, read by its id or name; the hook of each must be called the same number of times. */
function useJobs(keys) {
  const reads = Array.from({ length: MOST }, (_, i) => useData(keys[i] ? pathOf(["jobs", keys[i]]) : ""));
  const used = reads.slice(0, keys.length);
  return {
    jobs: used.every((one) => one.data) ? used.map((one) => newest(one.data)) : null,
    error: used.find((one) => one.error)?.error,
  };
}

function Add({ keys }) {
  const { jobs } = useLive();
  const others = [...jobs.values()].filter(
    (job) => !keys.includes(job.job_id) && !keys.includes(job.name) && job.state !== "QUEUED",
  );
  if (keys.length >= MOST || !others.length) return null;
  return html`
    <select
      aria-label="Add a job to compare"
      value=""
      onChange=${(event) => setQuery({ jobs: [...keys, event.target.value].join(",") }, { replace: false })}
    >
      <option value="">Add a job...</option>
      ${others.map((job) => html`
        <option key=${job.job_id} value=${job.job_id}>${job.name} (${job.owner})</option>
      `)}
    </select>
  `;
}

function Table({ jobs, keys }) {
  const specs = jobs.map((job) => new Map(flat(job.spec)));
  const fields = [...new Set(specs.flatMap((spec) => [...spec.keys()]))].filter((name) => name !== "name");
  const differing = fields.filter(
    (name) => new Set(specs.map((spec) => JSON.stringify(spec.get(name) ?? null))).size > 1,
  );
  const remove = (i) => `/compare?jobs=${keys.filter((_, other) => other !== i).join(",")}`;
  return html`
    <${Card}
      id="differences"
      title=${jobs.length > 1 ? `${differing.length} of ${fields.length} fields differ` : "One job"}
      className="flush"
    >
      <${Scroll} label="Jobs side by side">
        <table class="compare">
          <thead>
            <tr>
              <th>
                <span class="unseen">Field</span>
              </th>
              ${jobs.map((job, i) => html`
                <th key=${job.job_id} scope="col">
                  <i class="swatch line-c${i + 1}"></i>
                  <a href="/jobs/${job.job_id}">${job.name}</a>
                  ${jobs.length > 1 && html`
                    ${" "}
                    <a
                      class="remove"
                      href=${remove(i)}
                      aria-label="Remove ${job.name} from the comparison"
                    >
                      \u00d7
                    </a>
                  `}
                </th>
              `)}
            </tr>
          </thead>
          <tbody>
            ${differing.map((name) => html`
              <tr key=${name} class="differs">
                <th scope="row">
                  <code>${name}</code>
                </th>
                ${specs.map((spec, i) => html`
                  <td key=${jobs[i].job_id}>${spec.has(name) ? valueText(spec.get(name)) : "-"}</td>
                `)}
              </tr>
            `)}
            ${OUTCOMES.map(([title, of]) => html`
              <tr key=${title}>
                <th scope="row">${title}</th>
                ${jobs.map((job) => html`<td key=${job.job_id}>${of(job)}</td>`)}
              </tr>
            `)}
          </tbody>
        </table>
      <//>
    <//>
  `;
}

/** Lines of one figure, a job a line; of evaluations, a job's dots have its colour. */
function linesOf(jobs, data, name) {
  return jobs.flatMap((job, i) => {
    const columns = data[job.job_id];
    if (!columns) return [];
    const label =
      jobs.filter((other) => other.name === job.name).length > 1
        ? `${job.name} (${job.job_id.slice(-4)})`
        : job.name;
    if (name === "eval_loss" || !columns.series[name]) {
      const mean = columns.evals.series[name];
      return mean ? [{ label, color: `c${i + 1}`, steps: columns.evals.steps, mean, dots: true }] : [];
    }
    return [{ label, color: `c${i + 1}`, steps: columns.steps, ...columns.series[name] }];
  });
}

export function Compare() {
  useTitle("Compare");
  const { query } = useAddress();
  const keys = [...new Set((query.get("jobs") || "").split(",").filter(Boolean))].slice(0, MOST);
  const { jobs, error } = useJobs(keys);
  const choices = chartChoices(query);
  const series = useSeries(jobs ? jobs.map((job) => job.job_id) : [], choices.range);
  const title = html`
    <div class="title">
      <h1>Compare</h1>
      <${Add} keys=${keys} />
    </div>
  `;
  if (!keys.length)
    return html`
      ${title}
      <${Card}>
        <${Empty} title="Choose jobs to compare.">
          Mark them in <a href="/jobs">the list of jobs</a>, or add them here.
        <//>
      <//>
    `;
  if (error)
    return html`
      ${title}
      <${Problem} error=${error} />
    `;
  if (!jobs)
    return html`
      ${title}
      <${Card}>
        <${Waiting} rows=${8} />
      <//>
    `;
  const loaded = jobs.filter((job) => series.data[job.job_id]);
  const steps = [
    ...new Set(loaded.flatMap((job) => names(series.data[job.job_id].series, job.plan?.device))),
  ];
  const evals = [...new Set(loaded.flatMap((job) => evalNames(series.data[job.job_id].evals)))].filter(
    (name) => !name.endsWith("/perplexity"),
  );
  const drawn = [...new Set([...steps.slice(0, 1), ...evals, ...steps.slice(1)])];
  const onZoom = (range) => setQuery(range ? { from: range[0], to: range[1] } : { from: "", to: "" });
  return html`
    ${title}
    <${Table} jobs=${jobs} keys=${keys} />
    ${series.error && html`<${Problem} error=${series.error} />`}
    ${loaded.length < jobs.length ? (
      !series.error && html`
        <${Card}>
          <${Waiting} rows=${6} />
        <//>
      `
    ) : drawn.length ? html`
      <section class="card" aria-label="Curves">
        <${ChartControls} query=${query} setQuery=${setQuery} range=${choices.range} spread=${false} />
        <div class="charts">
          ${drawn.map((name) => {
            const { title: text, format, about, floor, isBytes } = figure(name);
            const lines = linesOf(jobs, series.data, name);
            return (
              lines.length > 0 && html`
                <${Chart}
                  key=${name}
                  title=${text}
                  about=${about}
                  format=${format}
                  floor=${floor}
                  isBytes=${isBytes}
                  lines=${lines}
                  ...${choices}
                  band=${false}
                  log=${choices.log && !name.includes("ratio") && !name.includes("memory")}
                  sync="compare"
                  className=${name === "loss" ? "first" : ""}
                  height=${name === "loss" ? 280 : 170}
                  onZoom=${onZoom}
                />
              `
            );
          })}
        </div>
      </section>
    ` : html`
      <${Card}>
        <${Empty} title="None of them has done a step yet." />
      <//>
    `}
  `;
}
