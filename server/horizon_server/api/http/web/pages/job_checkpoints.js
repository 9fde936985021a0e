/** The checkpoints of a job: what to type to get one, and which are kept. */
import { html, useEffect } from "../vendor/preact-htm.js";
import { deleteCheckpoint, keepCheckpoint, keepFiles } from "../actions.js";
import { pathOf } from "../api.js";
import { bytes, count, hasEnded, short } from "../format.js";
import { Card, Copy, Empty, Problem, Time, useData, Waiting } from "../parts.js";
import { whyNotChange } from "../rights.js";

export function Checkpoints({ job, news, me }) {
  const { data, error, reload } = useData(pathOf(["jobs", job.job_id, "checkpoints"]));
  useEffect(() => {
    if (news) reload();
  }, [news]);
  const may = !whyNotChange(me, job);
  const and =
    (act) =>
    async (...given) => {
      if (await act(...given)) reload();
    };
  if (error && !data) return html`<${Card}><${Problem} error=${error} again=${reload} /><//>`;
  if (!data) return html`<${Card}><${Waiting} /><//>`;
  const listed = [...data.checkpoints].reverse();
  const total = listed.reduce((sum, one) => sum + one.size_bytes, 0);
  if (!listed.length) {
    const rule = job.spec.checkpoint.every_steps
      ? `one every ${count(job.spec.checkpoint.every_steps)} steps, and one at the end`
      : "one at the end";
    return html`
      <${Card}>
        <${Empty} title="No checkpoint ${hasEnded(job.state) ? "is left" : "yet"}.">
          ${!hasEnded(job.state) && `There will be ${rule}.`}
        <//>
      <//>
    `;
  }
  return html`
    ${job.deletion_time && html`
      <p class="notice">
        These checkpoints are deleted automatically: <${Time} at=${job.deletion_time} />.${" "}
        ${may && html`
          <button type="button" class="small" onClick=${() => keepFiles(job)}>
            Keep them
          </button>
        `}
      </p>
    `}
    <${Card} id="checkpoints" title="${listed.length} on the node" aside=${bytes(total)} className="flush">
      <table class="list checkpoints">
        <thead>
          <tr>
            <th>Step</th>
            <th>Written</th>
            <th class="num">Evaluation</th>
            <th class="num">Size</th>
            <th>On your laptop</th>
            ${may && html`
              <th>
                <span class="unseen">Change</span>
              </th>
            `}
          </tr>
        </thead>
        <tbody>
          ${listed.map((one) => html`
            <tr key=${one.step}>
              <td class="name">
                <b>${count(one.step)}</b> ${one.best && html`<span class="chip good">best</span>`}${" "}
                ${one.last && html`<span class="chip">newest</span>`}${" "}
                ${one.kept && html`<span class="chip run">kept</span>`}
              </td>
              <td data-label="Written"><${Time} at=${one.create_time} /></td>
              <td class="num" data-label="Evaluation">${short(one.eval_loss)}</td>
              <td class="num" data-label="Size">${bytes(one.size_bytes)}</td>
              <td class="command">
                <${Copy}
                  text="horizon checkpoint pull ${job.name}@${one.step} --to ${job.name}-${one.step}"
                />
              </td>
              ${may && html`
                <td class="buttons">
                  <button
                    type="button"
                    class="small"
                    onClick=${() => and(keepCheckpoint)(job, one, !one.kept)}
                  >
                    ${one.kept ? "Stop keeping" : "Keep"}
                    <span class="unseen"> step ${one.step}</span>
                  </button>
                  <button
                    type="button"
                    class="small danger"
                    onClick=${() => and(deleteCheckpoint)(job, one)}
                  >
                    Delete<span class="unseen"> step ${one.step}</span>
                  </button>
                </td>
              `}
            </tr>
          `)}
        </tbody>
      </table>
    <//>
  `;
}
