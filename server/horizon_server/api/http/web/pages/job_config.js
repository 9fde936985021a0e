/** A job's spec, and in what it differs from the defaults or from another job. */
import { html } from "../vendor/preact-htm.js";
import { pathOf } from "../api.js";
import { flat, valueText } from "../format.js";
import { useLive } from "../live.js";
import { Card, Copy, Empty, Problem, useData, Waiting } from "../parts.js";
import { defaultsOf } from "../schema.js";

const same = (a, b) => JSON.stringify(a ?? null) === JSON.stringify(b ?? null);

export function Config({ job, query, setQuery }) {
  const { jobs } = useLive();
  const other = query.get("with") || "";
  const schema = useData("/job-schema");
  const compared = useData(other ? pathOf(["jobs", other]) : "");
  const all = query.get("all") === "1";
  const failed = (other ? compared : schema).error;
  const base = other ? compared.data?.spec : schema.data && defaultsOf(schema.data);
  const mine = new Map(flat(job.spec));
  const theirs = new Map(base ? flat(base) : []);
  const fields = [...new Set([...mine.keys(), ...theirs.keys()])].map((name) => ({
    name,
    value: mine.get(name),
    other: theirs.get(name),
    differs: !same(mine.get(name), theirs.get(name)),
  }));
  const shown = fields.filter((field) => (all ? true : field.differs && field.name !== "name"));
  const choices = [...jobs.values()].filter((one) => one.job_id !== job.job_id);
  if (other && !choices.some((one) => one.job_id === other) && compared.data) choices.unshift(compared.data);
  const title = other ? compared.data?.name || "the other job" : "default";
  return html`
    <${Card}
      id="config"
      title=${all ? "All fields" : `${shown.length} of ${fields.length} fields differ`}
      className="flush"
    >
      <div class="controls">
        <label>
          from${" "}
          <select value=${other} onChange=${(event) => setQuery({ with: event.target.value })}>
            <option value="">the defaults</option>
            ${choices.map((one) => html`
              <option key=${one.job_id} value=${one.job_id}>${one.name} (${one.owner})</option>
            `)}
          </select>
        </label>
        <label class="check">
          <input
            type="checkbox"
            checked=${all}
            onChange=${(event) => setQuery({ all: event.target.checked })}
          />${" "}
          All fields
        </label>
        <span class="space"></span>
        <${Copy} quiet text="horizon job get ${job.name} -o yaml" />
      </div>
      ${failed && html`<${Problem} error=${failed} />`}
      ${!base && !failed ? html`<${Waiting} rows=${8} />` : shown.length ? html`
        <table class="list config">
          <thead>
            <tr>
              <th>Field</th>
              <th>${job.name}</th>
              <th>${title}</th>
            </tr>
          </thead>
          <tbody>
            ${shown.map((field) => html`
              <tr key=${field.name} class=${field.differs ? "differs" : ""}>
                <th scope="row">
                  <code>${field.name}</code>
                </th>
                <td data-label="This job">${mine.has(field.name) ? valueText(field.value) : "-"}</td>
                <td class="quiet" data-label=${title}>
                  ${theirs.has(field.name) ? valueText(field.other) : "-"}
                </td>
              </tr>
            `)}
          </tbody>
        </table>
      ` : html`<${Empty} title="They are the same." />`}
    <//>
  `;
}
