/** Who has used how much of the node, and how much of their quotas the caller has used. */
import { html } from "../vendor/preact-htm.js";
import { pathOf } from "../api.js";
import { bytes, large, plural, short, span, stateWord } from "../format.js";
import { useLive } from "../live.js";
import { Bar, Card, Choice, Empty, Problem, Time, useData, useTitle, Waiting } from "../parts.js";
import { setQuery, useAddress } from "../router.js";

const DAYS = [
  ["1", "Day"],
  ["7", "Week"],
  ["30", "Month"],
];
const QUOTAS = {
  queued_jobs: ["Jobs in the queue", (n) => short(n)],
  resident_jobs: ["Jobs on the machine", (n) => short(n)],
  host_bytes: ["Memory of jobs on it", bytes],
  stored_bytes: ["Stored data, models and checkpoints", bytes],
  device_hours_per_week: ["Device hours in 7 days", (n) => span(n * 3600)],
  retained_bytes: ["Checkpoints of ended jobs", bytes],
};

function Used({ usages, me }) {
  const most = Math.max(1, ...usages.map((one) => one.device_s));
  const sum = usages.reduce((all, one) => all + one.device_s, 0);
  return html`
    <${Card} id="used" title="Device time" aside="${span(sum)} in all" className="flush">
      <table class="list usage">
        <thead>
          <tr>
            <th>User</th>
            <th>Project</th>
            <th class="wide">Device time</th>
            <th class="num">Tokens</th>
            <th class="num">Stored now</th>
            <th>Jobs that ended</th>
          </tr>
        </thead>
        <tbody>
          ${[...usages]
            .sort((a, b) => b.device_s - a.device_s)
            .map((one) => html`
              <tr key=${one.project + one.user} class=${one.user === me?.name ? "mine" : ""}>
                <td class="name">
                  <b>${one.user === me?.name ? "you" : one.user}</b>
                </td>
                <td data-label="Project">${one.project || "-"}</td>
                <td data-label="Device time" class="wide">
                  <span class="with-bar">
                    <${Bar} share=${one.device_s / most} label=${span(one.device_s)} />
                    <span>${span(one.device_s)}</span>
                  </span>
                </td>
                <td class="num" data-label="Tokens">${large(one.num_tokens)}</td>
                <td class="num" data-label="Stored now">
                  ${one.stored_bytes ? bytes(one.stored_bytes) : "-"}
                </td>
                <td data-label="Jobs">
                  ${Object.entries(one.jobs)
                    .map(([state, n]) => `${n} ${stateWord(state).toLowerCase()}`)
                    .join(", ") || "-"}
                </td>
              </tr>
            `)}
        </tbody>
      </table>
    <//>
  `;
}

function Quotas({ allowances }) {
  return allowances.map((one) => html`
    <${Card}
      key=${one.holder + one.name}
      id="quota-${one.holder}"
      title="${one.holder === "user" ? "Your" : `Project ${one.name}:`} share and limits"
      aside="weight ${short(one.weight)}"
    >
      <ul class="uses quotas">
        ${one.quotas.map((quota) => {
          const [title, format] = QUOTAS[quota.quota] || [quota.quota, short];
          const share = quota.limit ? quota.used / quota.limit : 0;
          return html`
            <li key=${quota.quota}>
              <span>${title}</span>
              ${quota.limit === null ? html`<span></span>` : html`
                <${Bar}
                  share=${share}
                  tone=${share >= 1 ? "bad" : ""}
                  label="${format(quota.used)} of ${format(quota.limit)}"
                />
              `}
              <span class="num">
                ${format(quota.used)}
                ${quota.limit === null ? html`
                  ${" "}
                  <small class="quiet">no limit</small>
                ` : html`
                  ${" "}
                  <small class="quiet">of ${format(quota.limit)}</small>
                `}
              </span>
              ${share >= 1 && html`<p class="note warn">Makes room: ${quota.frees}</p>`}
            </li>
          `;
        })}
      </ul>
    <//>
  `);
}

export function Usage() {
  useTitle("Usage");
  const { query } = useAddress();
  const { me } = useLive();
  const days = DAYS.some(([key]) => key === query.get("days")) ? query.get("days") : "7";
  // To the hour, so that an address stays the same for a while.
  const since =
    new Date(Math.floor(Date.now() / 3600e3) * 3600e3 - Number(days) * 86400e3).toISOString().slice(0, 19) +
    "Z";
  const used = useData(pathOf(["usage"], { since }));
  const quota = useData("/quota");
  return html`
    <div class="title">
      <h1>Usage</h1>
      <${Choice}
        label="Time"
        value=${days}
        options=${DAYS}
        onChoose=${(key) => setQuery({ days: key === "7" ? "" : key })}
      />
    </div>
    ${used.error && html`<${Problem} error=${used.error} again=${used.reload} />`}
    ${!used.data ? (
      !used.error && html`
        <${Card}>
          <${Waiting} />
        <//>
      `
    ) : used.data.usages.length ? html`<${Used} usages=${used.data.usages} me=${me} />` : html`
      <${Card}>
        <${Empty} title="Nothing was used since ${new Date(since).toLocaleDateString()}." />
      <//>
    `}
    <div class="two">${quota.data && html`<${Quotas} allowances=${quota.data.allowances} />`}</div>
    ${quota.error && html`<${Problem} error=${quota.error} again=${quota.reload} />`}
    ${me && !["admin", "viewer"].includes(me.role) && html`
      <p class="quiet">
        Of other users you see what they run now in <a href="/queue">the queue</a>; admins and viewers see
        everybody's use.
      </p>
    `}
  `;
}
