/** The machine: who has its devices now, and how full its memory and disk are. */
import { html } from "./vendor/preact-htm.js";
import { bytes, isResident, percent, plural } from "./format.js";
import { Bar, Card, Waiting } from "./parts.js";

function Device({ device, accelerator, queue, me }) {
  const holder = (queue || []).find((entry) => entry.job_id === device.holder);
  const who = !device.holder ? "nobody" : holder?.owner === me?.name ? "you" : holder?.owner || "somebody";
  const name = device.holder_name || holder?.name;
  const job = name ? html`<a href="/jobs/${device.holder}">${name}</a>` : device.holder ? "a job you may not see" : "";
  const title = accelerator ? accelerator.name : device.name.replace("host", "Processors");
  return html`
    <li>
      <span class="quiet">${title}</span>
      <b class="holder">${who}</b>
      <span>${job}</span>
      <span class="quiet">
        ${device.num_residents > 1 ? `${plural(device.num_residents, "job")} take turns` : ""}
      </span>
    </li>
  `;
}

export function Machine({ node, queue, me }) {
  if (!node)
    return html`
      <${Card} id="machine" title="Machine">
        <${Waiting} rows=${3} />
      <//>
    `;
  const limit = node.host_memory_limit_bytes;
  const used = limit - node.host_memory_available_bytes;
  const isWithoutGpu = node.devices.every((device) => device.name.startsWith("host"));
  const devices = node.devices.filter(
    (device) => device.num_residents || !device.name.startsWith("host") || isWithoutGpu,
  );
  const residents = (queue || []).filter((entry) => isResident(entry.state));
  return html`
    <${Card}
      id="machine"
      title="Machine"
      aside=${residents.length ? plural(residents.length, "job") + " on it" : "idle"}
    >
      <ul class="devices">
        ${devices.map((device) => html`
          <${Device}
            key=${device.name}
            device=${device}
            queue=${queue}
            me=${me}
            accelerator=${node.accelerators.find(
              (one) => device.name === `cuda:${one.index}` || (device.name === "cuda" && one.index === 0),
            )}
          />
        `)}
      </ul>
      <dl class="meters">
        <div>
          <dt>Memory</dt>
          <dd>
            ${bytes(used)} <span class="quiet">of ${bytes(limit)}</span>
            <${Bar}
              share=${used / limit}
              mark=${node.host_memory_promised_bytes / limit}
              label="Memory used: ${percent(used / limit)}"
            />
            <span class="quiet">${bytes(node.host_memory_promised_bytes)} promised to jobs</span>
          </dd>
        </div>
        <div>
          <dt>Disk free</dt>
          <dd>${bytes(node.disk_free_bytes)}</dd>
        </div>
        <div>
          <dt>Processors</dt>
          <dd>${node.num_cpus}</dd>
        </div>
        ${node.accelerators.map((one) => html`
          <div key=${one.index}>
            <dt>GPU ${one.index}</dt>
            <dd>
              ${one.name} <span class="quiet">${bytes(one.memory_bytes)}</span>
            </dd>
          </div>
        `)}
        ${!node.accelerators.length && html`
          <div>
            <dt>GPU</dt>
            <dd>none</dd>
          </div>
        `}
      </dl>
    <//>
  `;
}
