/** Everybody's resident and waiting jobs, and why each is where it is. */
import { html } from "../vendor/preact-htm.js";
import { clock, isResident, percent, secondsFromNow, span } from "../format.js";
import { useLive } from "../live.js";
import { Machine } from "../machine.js";
import { Card, Empty, JobLink, Said, State, Time, useTitle, Waiting } from "../parts.js";

const SOON_S = 5;

function when(entry) {
  const { estimated_start_time: start, estimated_end_time: end } = entry.outlook || {};
  if (entry.state === "QUEUED" && start && secondsFromNow(start) < SOON_S) return "starts soon";
  if (entry.state === "QUEUED")
    return start ? html`
      starts about <${Time} at=${start} />, in ${span(secondsFromNow(start))}
    ` : "";
  if (end && secondsFromNow(end) < SOON_S) return "ends soon";
  return end ? html`
    until about <${Time} at=${end} />, ${span(secondsFromNow(end))}
  ` : "";
}

/** Entries of the queue, the caller's own marked; of others' jobs there is neither name nor reason. */
export function QueueRows({ entries, me, brief = false }) {
  return html`
    <ol class="queue ${brief ? "brief" : ""}">
      ${entries.map((entry) => {
        const mine = entry.owner === me?.name;
        return html`
          <li key=${entry.job_id} class=${mine ? "mine" : ""}>
            <span class="place">${entry.position || ""}</span>
            <span class="name">
              ${entry.name
                ? html`<${JobLink} job=${entry} />`
                : html`<span class="quiet">a job of ${entry.owner}</span>`}
            </span>
            <span class="owner">${mine ? html`<b>you</b>` : entry.owner}</span>
            ${entry.state !== "QUEUED" && html`<${State} state=${entry.state} />`}
            <span class="when">${when(entry)}</span>
            ${!brief && html`
              <span class="share">
                ${isResident(entry.state) && entry.outlook
                  ? `share ${percent(entry.outlook.share)}`
                  : entry.priority
                    ? `priority ${entry.priority}`
                    : ""}
              </span>
            `}
            ${entry.outlook?.why && html`
              <p class="why">
                <${Said} text=${entry.outlook.why} />
              </p>
            `}
          </li>
        `;
      })}
    </ol>
  `;
}

export function Queue() {
  useTitle("Queue");
  const { me, node, queue } = useLive();
  const residents = (queue || []).filter((entry) => entry.state !== "QUEUED");
  const waiting = (queue || []).filter((entry) => entry.state === "QUEUED");
  const uses = node?.share_uses || [];
  const most = Math.max(1, ...uses.map((use) => use.device_s));
  return html`
    <div class="title">
      <h1>Queue</h1>
    </div>
    <div class="overview">
      <div>
        <${Card} id="residents" title="On the machine">
          ${queue === null
            ? html`<${Waiting} />`
            : residents.length
              ? html`<${QueueRows} entries=${residents} me=${me} />`
              : html`<${Empty} title="Nothing runs." />`}
        <//>
        <${Card} id="waiting" title="Waiting, in the order of their turn">
          ${queue === null
            ? html`<${Waiting} />`
            : waiting.length
              ? html`<${QueueRows} entries=${waiting} me=${me} />`
              : html`
            <${Empty} title="Nobody waits.">A job that is submitted now starts at once, if it fits.<//>
          `}
        <//>
      </div>
      <div>
        <${Machine} node=${node} queue=${queue} me=${me} />
        <${Card} id="shares" title="Who has used it lately">
          ${uses.length ? html`
            <ul class="uses">
              ${[...uses]
                .sort((a, b) => b.device_s - a.device_s)
                .map((use) => html`
                  <li key=${use.project + use.user} class=${use.user === me?.name ? "mine" : ""}>
                    <span>
                      ${use.user === me?.name ? html`<b>you</b>` : use.user}${" "}
                      <small class="quiet">${use.project === use.user ? "" : use.project}</small>
                    </span>
                    <div class="bar" role="img" aria-label=${span(use.device_s)}>
                      <i style=${{ width: `${(100 * use.device_s) / most}%` }}></i>
                    </div>
                    <span class="num">${span(use.device_s)}</span>
                  </li>
                `)}
            </ul>
            <p class="quiet">
              Device time, of which half is forgotten every ${span(node.share_half_life_s)}. Who has used
              less comes first.
            </p>
          ` : html`<${Empty} title="Nobody has used it lately." />`}
        <//>
      </div>
    </div>
  `;
}
