/** Every figure of a job's steps over its steps. */
import { html } from "../vendor/preact-htm.js";
import { Chart, ChartControls, chartChoices } from "../charts.js";
import { bytes, count } from "../format.js";
import { Card, Empty, Scroll, Waiting } from "../parts.js";
import { figure, names } from "../series.js";

const NOTHING_YET = {
  QUEUED: "It has not started.",
  PREPARING: "Its data is being prepared.",
  STARTING: "Its model is being loaded.",
};
const ROWS = 12;

function linesOf(columns, name, job) {
  const { steps, series, evals } = columns;
  const lines = [{ label: name === "loss" ? "train" : "value", color: "train", steps, ...series[name] }];
  if (name === "loss" && evals.steps.length && evals.series.eval_loss) {
    lines.push({
      label: "evaluation",
      color: "eval",
      steps: evals.steps,
      mean: evals.series.eval_loss,
      dots: true,
    });
  }
  const planned = {
    host_memory_bytes: job.plan?.host_total_bytes,
    device_memory_bytes: job.plan?.device_total_bytes,
  }[name];
  if (planned && steps.length) {
    lines[0].label = "used";
    lines.push({
      label: "planned",
      color: "eval",
      steps: [steps[0], steps[steps.length - 1]],
      mean: [planned, planned],
      dash: [6, 4],
    });
  }
  return lines;
}

/** The same values as a table: some rows over all steps. */
function Table({ columns, shown }) {
  const { steps, series } = columns;
  const every = Math.max(1, Math.floor(steps.length / ROWS));
  const rows = steps.map((step, i) => [step, i]).filter(([, i]) => i % every === 0 || i === steps.length - 1);
  return html`
    <details class="values">
      <summary>Values as a table</summary>
      <${Scroll} label="Values by step">
        <table>
          <thead>
            <tr>
              <th>Step</th>
              ${shown.map((name) => html`<th class="num" key=${name}>${figure(name).title}</th>`)}
            </tr>
          </thead>
          <tbody>
            ${rows.map(([step, i]) => html`
              <tr key=${step}>
                <td>${count(step)}</td>
                ${shown.map((name) => html`
                  <td class="num" key=${name}>${figure(name).format(series[name].mean[i])}</td>
                `)}
              </tr>
            `)}
          </tbody>
        </table>
      <//>
    </details>
  `;
}

export function Curves({ job, columns, query, setQuery }) {
  if (!columns)
    return html`
      <${Card}>
        <${Waiting} rows=${6} />
      <//>
    `;
  const shown = names(columns.series, job.plan?.device);
  if (!shown.length)
    return html`
      <${Card}>
        <${Empty} title="No steps yet.">${NOTHING_YET[job.state] || ""}<//>
      <//>
    `;
  const choices = chartChoices(query);
  const onZoom = (range) => setQuery(range ? { from: range[0], to: range[1] } : { from: "", to: "" });
  const shared = {
    ...choices,
    numSteps: job.state === "SUCCEEDED" ? 0 : Math.max(columns.num_steps, 0),
    sync: job.job_id,
    onZoom,
  };
  const restarts = columns.marks.filter((mark) => mark.kind === "restart");
  return html`
    <section class="card" aria-label="Curves">
      <${ChartControls} query=${query} setQuery=${setQuery} range=${choices.range} marks />
      ${restarts.map((mark) => html`
        <p class="note warn" key=${mark.step + mark.time}>
          Restarted after step ${count(mark.step)}
          ${mark.text ? `: ${mark.text}` : ""}
        </p>
      `)}
      <div class="charts">
        ${shown.map((name) => {
          const { title, format, about, floor, isBytes } = figure(name);
          // Only what spans orders of magnitude is told better on a log axis.
          const log =
            choices.log &&
            ["loss", "grad_norm", "learning_rate", "duration_s", "tokens_per_second"].includes(name);
          return html`
            <${Chart}
              key=${name}
              title=${title}
              about=${about}
              format=${format}
              floor=${floor}
              isBytes=${isBytes}
              lines=${linesOf(columns, name, job)}
              ...${shared}
              marks=${name === "loss" ? columns.marks : restarts}
              log=${log}
              className=${name === "loss" ? "first" : ""}
              height=${name === "loss" ? 260 : 150}
            />
          `;
        })}
      </div>
      <${Table} columns=${columns} shown=${shown} />
    </section>
  `;
}
