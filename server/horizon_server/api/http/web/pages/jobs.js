/** All jobs that the caller may see: searched, filtered, page by page; some of them can be compared. */
import { html, useEffect, useState } from "../vendor/preact-htm.js";
import { pathOf } from "../api.js";
import { clock, ending, hasEnded, short, STATES, stepsText } from "../format.js";
import { newest, useLive } from "../live.js";
import { Card, Empty, JobLink, Problem, Progress, Search, State, useData, useTitle, Waiting } from "../parts.js";
import { mayCreate } from "../rights.js";
import { setQuery, useAddress } from "../router.js";

const PAGE_SIZE = 25;
const MOST_COMPARED = 8;
const GROUPS = {
  "": ["All", []],
  active: ["Active", ["PREPARING", "STARTING", "RUNNING", "STOPPING", "PAUSED", "QUEUED"]],
  finished: ["Finished", ["SUCCEEDED"]],
  failed: ["Failed", ["FAILED"]],
  cancelled: ["Cancelled", ["CANCELLED"]],
};

/** When a job ends, or starts where it waits. */
function when(job) {
  if (hasEnded(job.state)) return clock(job.end_time);
  const start = job.state === "QUEUED" && job.outlook?.estimated_start_time;
  return start ? `starts about ${clock(start)}` : ending(job)[0].replace("ends ", "") || "-";
}

function Row({ job, chosen, choose, mine, marked }) {
  const step = job.last_step;
  const best = job.best_eval || job.last_eval;
  return html`
    <tr class=${marked ? "mine" : ""}>
      <td class="pick">
        <label>
          <input
            type="checkbox"
            checked=${chosen}
            onChange=${(event) => choose(job.job_id, event.target.checked)}
            aria-label="Compare ${job.name}"
          />
        </label>
      </td>
      <td class="name">
        <${JobLink} job=${job} />
        <small>
          ${job.spec.method} of ${job.spec.model} on ${job.spec.dataset}${job.box && `, on machine ${job.box}`}
        </small>
      </td>
      <td data-label="Owner">
        ${mine ? html`<b>you</b>` : job.owner}
        ${job.project !== job.owner && html`<small>${job.project}</small>`}
      </td>
      <td data-label="State">
        <${State} state=${job.state} />
      </td>
      <td class="progress" data-label="Progress">
        <${Progress} job=${job} />
        <small>
          ${job.state === "QUEUED" && job.queue_position ? `place ${job.queue_position}` : stepsText(job)}
        </small>
      </td>
      <td class="num ${step ? "" : "none"}" data-label="Loss">${step ? short(step.loss) : "-"}</td>
      <td class="num ${best ? "" : "none"}" data-label="Best evaluation">
        ${best ? short(best.eval_loss) : "-"}
      </td>
      <td class="num ${step ? "" : "none"}" data-label="Tokens/s">
        ${step ? short(step.tokens_per_second, 3) : "-"}
      </td>
      <td class="when" data-label=${hasEnded(job.state) ? "Ended" : "Ends"}>${when(job)}</td>
    </tr>
  `;
}

export function Jobs() {
  useTitle("Jobs");
  const { query } = useAddress();
  const { me, jobs: told, node } = useLive();
  const [chosen, setChosen] = useState([]);
  const group = GROUPS[query.get("state")] ? query.get("state") : "";
  const states = STATES[query.get("state")] ? [query.get("state")] : (GROUPS[group] || GROUPS[""])[1];
  const filters = { state: states, owner: query.get("owner"), search: query.get("search") };
  const path = pathOf(["jobs"], { ...filters, page_size: PAGE_SIZE, page_token: query.get("page") });
  const { data, error, reload, isOf } = useData(path);
  const listed = (data?.jobs || []).map(newest);
  // A job that has come since the list was read: read it again, where it would be on this page.
  const ids = new Set(listed.map((job) => job.job_id));
  const newestTime = listed[0]?.create_time || "";
  const isNew =
    !query.get("page") &&
    !filters.search &&
    data &&
    [...told.values()].some(
      (job) =>
        !ids.has(job.job_id) &&
        job.create_time > newestTime &&
        (!states.length || states.includes(job.state)) &&
        (!filters.owner || job.owner === filters.owner),
    );
  useEffect(() => {
    if (isNew) reload();
  }, [isNew]);
  const choose = (id, wanted) =>
    setChosen((old) => (wanted ? [...old, id].slice(-MOST_COMPARED) : old.filter((one) => one !== id)));
  const filter = (changes) => setQuery({ ...changes, page: "" });
  const owners = [...new Set([...told.values()].map((job) => job.owner))].sort();
  const onlyMine = listed.every((job) => job.owner === me?.name);
  const isFiltered = group || filters.owner || filters.search || states.length;
  return html`
    <div class="title">
      <h1>Jobs</h1>
      ${mayCreate(me) && html`<a class="button main" href="/new">New job</a>`}
    </div>
    <div class="filters" role="search">
      <${Search}
        label="Search"
        placeholder="Name, id, model or data"
        value=${query.get("search") || ""}
        onSearch=${(text) => filter({ search: text })}
      />
      <div class="choice" role="group" aria-label="State">
        ${Object.entries(GROUPS).map(([key, [text]]) => html`
          <button
            type="button"
            key=${key}
            aria-pressed=${String(key === group)}
            onClick=${() => filter({ state: key })}
          >
            ${text}
          </button>
        `)}
      </div>
      <${Search}
        label="Owner"
        placeholder="Owner"
        value=${query.get("owner") || ""}
        list="owners"
        onSearch=${(text) => filter({ owner: text })}
      />
      <datalist id="owners">
        ${owners.map((owner) => html`<option key=${owner} value=${owner} />`)}
      </datalist>
      ${me && html`
        <button
          type="button"
          class="small"
          aria-pressed=${String(filters.owner === me.name)}
          onClick=${() => filter({ owner: filters.owner === me.name ? "" : me.name })}
        >
          Mine
        </button>
      `}
    </div>
    ${error && html`<${Problem} error=${error} again=${reload} />`}
    <${Card} className="flush">
      ${!data ? !error && html`<${Waiting} rows=${8} />` : listed.length ? html`
        <table class="list jobs" aria-busy=${String(isOf !== path)}>
          <thead>
            <tr>
              <th>
                <span class="unseen">Compare</span>
              </th>
              <th>Job</th>
              <th>Owner</th>
              <th>State</th>
              <th>Progress</th>
              <th class="num">Loss</th>
              <th class="num">Best eval</th>
              <th class="num">Tokens/s</th>
              <th class="when">Ends</th>
            </tr>
          </thead>
          <tbody>
            ${listed.map((job) => html`
              <${Row}
                key=${job.job_id}
                job=${job}
                mine=${job.owner === me?.name}
                marked=${job.owner === me?.name && !onlyMine}
                chosen=${chosen.includes(job.job_id)}
                choose=${choose}
              />
            `)}
          </tbody>
        </table>
      ` : html`
        <${Empty} title=${isFiltered ? "No job is like that." : "There are no jobs yet."}>
          ${isFiltered
            ? html`<a href="/jobs">All jobs</a>`
            : html`<code>horizon job submit SPEC.yaml</code> starts one.`}
        <//>
      `}
    <//>
    <div class="pages">
      ${query.get("page") && html`<a class="button" href="/jobs${withPage("")}">Newest</a>`}
      ${data?.next_page_token && html`
        <a class="button" href="/jobs${withPage(data.next_page_token)}">Older</a>
      `}
    </div>
    ${chosen.length > 0 && html`
      <div class="picked" role="status">
        <span>${chosen.length} chosen</span>
        <button type="button" onClick=${() => setChosen([])}>
          None
        </button>
        ${chosen.length > 1 ? html`
          <a class="button main" href="/compare?jobs=${chosen.join(",")}">Compare</a>
        ` : html`<span class="quiet">choose another one</span>`}
      </div>
    `}
  `;
}

function withPage(token) {
  const query = new URLSearchParams(location.search);
  if (token) query.set("page", token);
  else query.delete("page");
  const text = query.toString();
  return text ? `?${text}` : "";
}
