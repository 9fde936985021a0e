/** What the model said at each evaluation: figures of each set, and its answers to the same prompts over the steps.
 *  And what evaluation programs have measured of its checkpoints. */
import { html, useEffect } from "../vendor/preact-htm.js";
import { pathOf } from "../api.js";
import { Chart, chartChoices } from "../charts.js";
import { show } from "../dialog.js";
import { count, short } from "../format.js";
import { Card, Empty, Problem, Scroll, useData, Waiting } from "../parts.js";
import { evalNames, figure } from "../series.js";

function Figures({ evals }) {
  const known = evalNames(evals);
  return html`
    <${Card} id="figures" title="Figures" className="flush">
      <${Scroll} label="Figures of evaluations">
        <table class="figures">
          <thead>
            <tr>
              <th>Step</th>
              ${known.map((name) => html`<th class="num" key=${name}>${figure(name).title}</th>`)}
            </tr>
          </thead>
          <tbody>
            ${evals.steps
              .map((step, i) => [step, i])
              .reverse()
              .map(([step, i]) => html`
                <tr key=${step}>
                  <th scope="row">${count(step)}</th>
                  ${known.map((name) => html`
                    <td class="num" key=${name}>${figure(name).format(evals.series[name][i])}</td>
                  `)}
                </tr>
              `)}
          </tbody>
        </table>
      <//>
    <//>
  `;
}

/** The newest first, each a metric of a task at a step. */
function Tasks({ results }) {
  if (!results.length) return null;
  const documents = (one) =>
    one.num_documents > one.num_samples
      ? `${count(one.num_samples)} of ${count(one.num_documents)}`
      : count(one.num_samples || null);
  return html`
    <${Card} id="tasks" title="Results of evaluation programs" className="flush">
      <${Scroll} label="Results of evaluation programs by task and step">
        <table class="figures">
          <thead>
            <tr>
              <th>Step</th>
              <th>Task</th>
              <th>Metric</th>
              <th class="num">Value</th>
              <th class="num">Standard error</th>
              <th class="num">Documents</th>
              <th>Program</th>
            </tr>
          </thead>
          <tbody>
            ${[...results].reverse().map((one) => html`
              <tr key=${`${one.step} ${one.task} ${one.metric}`}>
                <th scope="row">${count(one.step)}</th>
                <td>${one.task}</td>
                <td>${one.metric}</td>
                <td class="num">${short(one.value)}</td>
                <td class="num">${short(one.stderr)}</td>
                <td class="num">${documents(one)}</td>
                <td>${one.program || "-"}</td>
              </tr>
            `)}
          </tbody>
        </table>
      <//>
    <//>
  `;
}

function Text({ title, children, tone = "" }) {
  return html`
    <h3>${title}</h3>
    <pre class="text ${tone}">${children}</pre>
  `;
}

function showAnswer(answer, step) {
  show(
    `Answer at step ${count(step)}`,
    html`<div>
      <${Text} title="Prompt">${answer.prompt}<//>
      <${Text}
        title="Answer${answer.expected === null ? "" : answer.matches ? ", which matches" : ", which does not match"}"
        tone=${answer.expected === null ? "" : answer.matches ? "good" : "bad"}
      >
        ${answer.answer || "(nothing)"}
      <//>
      ${answer.expected !== null && html`
        <p>
          Found <b>${answer.found ?? "nothing"}</b>, expected <b>${answer.expected}</b>
        </p>
      `}
      <${Text} title="Reference">${answer.reference}<//>
    </div>`,
  );
}

function Cell({ answer, step }) {
  if (!answer) return html`<td class="quiet">-</td>`;
  const compared = answer.expected !== null && answer.expected !== undefined;
  const word = !compared ? "" : answer.matches ? "matches" : "differs";
  return html`
    <td class=${word}>
      <button type="button" onClick=${() => showAnswer(answer, step)}>
        ${compared && html`
          <span class="mark" aria-hidden="true">${answer.matches ? "\u2713" : "\u2717"}</span>
          <span class="unseen">${word}: </span>
        `}
        <span class="said">
          ${compared && answer.found !== null ? html`<b>${answer.found}</b>${" "}` : ""}
          ${answer.answer || "(nothing)"}
        </span>
      </button>
    </td>
  `;
}

/** Prompts are rows, evaluations are columns, the newest first. */
function Answers({ evaluations }) {
  const told = evaluations.filter((one) => one.answers.length).reverse();
  if (!told.length)
    return html`
      <${Card} id="answers" title="Answers">
        <${Empty} title="The model answers no prompts at evaluations.">
          <code>
            eval: {generate: {prompts: 16}
            }
          </code>${" "}
          in the job's spec has it answer some.
        <//>
      <//>
    `;
  const documents = [
    ...new Map(told.flatMap((one) => one.answers.map((answer) => [answer.document, answer]))),
  ];
  const matches = (one) => one.answers.filter((answer) => answer.matches).length;
  const compared = told.some((one) =>
    one.answers.some((answer) => answer.expected !== null && answer.expected !== undefined),
  );
  return html`
    <${Card} id="answers" title="Answers" aside="newest first; choose one to read it in full" className="flush">
      <${Scroll} label="Answers by prompt and step">
        <table class="answers">
          <thead>
            <tr>
              <th>Prompt</th>
              ${told.map((one) => html`
                <th key=${one.step}>
                  step ${count(one.step)}
                  ${compared && html`<small>${matches(one)} of ${one.answers.length} match</small>`}
                </th>
              `)}
            </tr>
          </thead>
          <tbody>
            ${documents.map(([document, example]) => html`
              <tr key=${document}>
                <th scope="row">
                  <span class="prompt">${example.prompt}</span>
                  ${example.expected !== null && example.expected !== undefined && html`
                    <small>
                      expected <b>${example.expected}</b>
                    </small>
                  `}
                </th>
                ${told.map((one) => html`
                  <${Cell}
                    key=${one.step}
                    step=${one.step}
                    answer=${one.answers.find((answer) => answer.document === document)}
                  />
                `)}
              </tr>
            `)}
          </tbody>
        </table>
      <//>
    <//>
  `;
}

export function Evaluations(props) {
  return html`
    <${Tasks} results=${props.job.task_results || []} />
    <${OwnEvaluations} ...${props} />
  `;
}

/** Those that the job's worker has made. */
function OwnEvaluations({ job, columns, news, query, setQuery }) {
  const { data, error, reload } = useData(pathOf(["jobs", job.job_id, "answers"]));
  useEffect(() => {
    if (news) reload();
  }, [columns?.evals.steps.length]);
  if (!columns)
    return html`
      <${Card}>
        <${Waiting} />
      <//>
    `;
  if (!columns.evals.steps.length) {
    return html`
      <${Card}>
        <${Empty} title="No evaluation yet.">
          ${job.spec.eval_every_steps ? (
            `There is one every ${count(job.spec.eval_every_steps)} steps.`
          ) : html`
            <code>eval_every_steps</code> in the job's spec says how often there is one.
          `}
        <//>
      <//>
    `;
  }
  const { evals } = columns;
  const drawn = evalNames(evals).filter(
    (name) => evals.series[name].filter((v) => v !== null).length > 1 && !name.endsWith("/perplexity"),
  );
  const { range } = chartChoices(query);
  const onZoom = (found) => setQuery(found ? { from: found[0], to: found[1] } : { from: "", to: "" });
  return html`
    ${error && html`<${Problem} error=${error} again=${reload} />`}
    ${data ? html`<${Answers} evaluations=${data.evaluations} />` : (
      !error && html`
        <${Card} title="Answers">
          <${Waiting} />
        <//>
      `
    )}
    ${drawn.length > 0 && html`
      <section class="card" aria-label="Curves of evaluations">
        <div class="charts">
          ${drawn.map((name) => html`
            <${Chart}
              key=${name}
              title=${figure(name).title}
              format=${figure(name).format}
              lines=${[
                { label: "value", color: "eval", steps: evals.steps, mean: evals.series[name], dots: true },
              ]}
              marks=${[]}
              range=${range}
              numSteps=${columns.num_steps}
              sync=${job.job_id}
              height=${140}
              onZoom=${onZoom}
            />
          `)}
        </div>
      </section>
    `}
    <${Figures} evals=${evals} />
  `;
}
