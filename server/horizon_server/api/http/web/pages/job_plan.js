/** What was planned of a job, beside what it uses. */
import { html } from "../vendor/preact-htm.js";
import { bytes, count, large, percent, plural, short, span } from "../format.js";
import { Card, Empty, Fact, Facts } from "../parts.js";

function Memory({ title, id, planned, used, total, limit }) {
  const names = Object.keys({ ...planned, ...used })
    .filter((name) => planned[name] || used[name])
    .sort((a, b) => (planned[b] || used[b] || 0) - (planned[a] || used[a] || 0));
  if (!names.length) return null;
  const most = Math.max(...names.map((name) => Math.max(planned[name] || 0, used[name] || 0)));
  const sum = Object.values(used).reduce((all, n) => all + n, 0);
  return html`
    <${Card}
      id=${id}
      title=${title}
      aside=${
        html`${sum ? `${bytes(sum)} used, ` : ""}
        ${bytes(total)} planned${limit ? `, ${bytes(limit)} allowed` : ""}`
      }
    >
      <table class="memory">
        <thead class="unseen">
          <tr>
            <th>Part</th>
            <th>Share</th>
            <th>Used</th>
            <th>Planned</th>
          </tr>
        </thead>
        <tbody>
          ${names.map((name) => html`
            <tr key=${name}>
              <th scope="row">${name.replaceAll("_", " ")}</th>
              <td class="bars">
                <div
                  class="pair"
                  role="img"
                  aria-label="used ${bytes(used[name] || 0)} of ${bytes(planned[name] || 0)} planned"
                >
                  <i class="used" style=${{ width: `${(100 * (used[name] || 0)) / most}%` }}></i>
                  <i class="planned" style=${{ width: `${(100 * (planned[name] || 0)) / most}%` }}></i>
                </div>
              </td>
              <td class="num">${used[name] === undefined ? "-" : bytes(used[name])}</td>
              <td class="num quiet">${bytes(planned[name] || 0)}</td>
            </tr>
          `)}
        </tbody>
      </table>
      <p class="quiet key">
        <i class="used"></i> used <i class="planned"></i> planned
      </p>
    <//>
  `;
}

/** The plan of a job, submitted or not. */
export function PlanFacts({ plan }) {
  const { prediction, kept } = plan;
  return html`
    <${Facts}>
      <${Fact} label="Runs on">${plan.device === "host" ? "processors" : plan.device.replaceAll(",", ", ")}<//>
      <${Fact} label="Computed in">${plan.compute_dtype}<//>
      <${Fact} label="Parameters">
        ${large(plan.num_parameters)}
        ${plan.num_trained_parameters && plan.num_trained_parameters !== plan.num_parameters ? html`
          ${" "}
          <small>${large(plan.num_trained_parameters)} trained</small>
        ` : ""}
      <//>
      <${Fact} label="Memory">
        ${bytes(plan.host_total_bytes)} <small>of ${bytes(plan.host_limit_bytes)}</small>
      <//>
      ${!plan.device.startsWith("host") && html`
        <${Fact} label="GPU memory">
          ${bytes(plan.device_total_bytes)} <small>of ${bytes(plan.device_limit_bytes)}</small>
        <//>
      `}
      ${plan.num_steps && html`
        <${Fact} label="Steps">
          ${plan.steps_estimated ? "about " : ""}
          ${count(plan.num_steps)}
        <//>
      `}
      ${prediction && html`
        <${Fact} label="A step, predicted">
          ${span(prediction.step_s)} <small>${short(prediction.tokens_per_second, 3)} tokens/s</small>
        <//>
      `}
      ${prediction && html`<${Fact} label="Limited by">${prediction.bound}<//>`}
      ${prediction?.total_s && html`<${Fact} label="In all, alone">${span(prediction.total_s)}<//>`}
      ${kept?.resident_layers ? html`
        <${Fact} label="Layers that stay on the device">${kept.resident_layers}<//>
      ` : null}
      ${kept?.state_layers ? html`
        <${Fact} label="Layers that the device updates">
          ${kept.state_layers} <small>${bytes(kept.state_bytes)}</small>
        <//>` : null}
      ${kept?.packed_layers ? html`
        <${Fact} label="Layers that stay there packed">
          ${kept.packed_layers} <small>${bytes(kept.packed_bytes)}</small>
        <//>
      ` : null}
      ${kept?.resident_head || kept?.resident_table ? html`
        <${Fact} label="Head and embedding that stay there">${bytes(kept.end_bytes)}<//>
      ` : null}
    <//>
    ${plan.message && html`<p class="note bad">${plan.message}</p>`}
    ${(plan.warnings || []).map((text) => html`<p class="note warn" key=${text}>${text}</p>`)}
    ${plan.hint && html`<p class="note">${plan.hint}</p>`}
  `;
}

export function PlanAndUse({ job }) {
  const { plan, last_step: step, data_report: report } = job;
  if (!plan)
    return html`
      <${Card}>
        <${Empty} title="There is no plan yet.">It is made when the job starts.<//>
      <//>
    `;
  const predicted = plan.prediction;
  const rows = Object.entries(report || {}).filter(([, n]) => n);
  return html`
    <${Card} id="plan" title="Plan">
      <${PlanFacts} plan=${plan} />
    <//>
    ${step && predicted && html`
      <${Card} id="speed" title="Speed">
        <table class="list">
          <thead>
            <tr>
              <th>Figure</th>
              <th class="num">Predicted</th>
              <th class="num">Last step</th>
              <th class="num">Ratio</th>
            </tr>
          </thead>
          <tbody>
            <tr>
              <th scope="row">A step</th>
              <td class="num" data-label="Predicted">${span(predicted.step_s)}</td>
              <td class="num" data-label="Last step">${span(step.duration_s)}</td>
              <td class="num" data-label="Ratio">${percent(step.duration_s / predicted.step_s)}</td>
            </tr>
            <tr>
              <th scope="row">Tokens per second</th>
              <td class="num" data-label="Predicted">${short(predicted.tokens_per_second, 3)}</td>
              <td class="num" data-label="Last step">${short(step.tokens_per_second, 3)}</td>
              <td class="num" data-label="Ratio">
                ${percent(step.tokens_per_second / predicted.tokens_per_second)}
              </td>
            </tr>
          </tbody>
        </table>
      <//>
    `}
    <div class="two">
      <${Memory}
        id="host-memory"
        title="Host memory"
        planned=${plan.host_bytes}
        used=${step?.host_memory_bytes || {}}
        total=${plan.host_total_bytes}
        limit=${plan.host_limit_bytes}
      />
      ${!plan.device.startsWith("host") && html`
        <${Memory}
          id="device-memory"
          title="Device memory"
          planned=${plan.device_bytes}
          used=${step?.device_memory_bytes || {}}
          total=${plan.device_total_bytes}
          limit=${plan.device_limit_bytes}
        />
      `}
    </div>
    ${rows.length > 0 && html`
      <${Card} id="data" title="Data">
        <${Facts}>
          ${rows.map(([name, n]) => html`
            <${Fact} key=${name} label=${name.replaceAll("_", " ")}>
              ${count(n)}
            <//>
          `)}
        <//>
      <//>
    `}
  `;
}
