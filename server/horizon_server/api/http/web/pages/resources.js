/** Pushed models and datasets: how large they are, who has them, and what to type to use them. */
import { html } from "../vendor/preact-htm.js";
import { pathOf } from "../api.js";
import { bytes, count, large, plural } from "../format.js";
import { useLive } from "../live.js";
import { Card, Copy, Empty, Problem, Search, Time, useData, useTitle, Waiting } from "../parts.js";
import { setQuery, useAddress } from "../router.js";

/** So many are read at once, and searched in the browser; the daemon gives no more in one answer. */
const PAGE_SIZE = 1000;

function sharedText(one) {
  const shared = one.shared_with || [];
  if (!shared.length) return "nobody else";
  return shared.includes("*") ? "everybody" : shared.join(", ");
}

/** Whether a search finds it: in its name, or in what its columns say. */
function isLike(one, search) {
  const texts = [one.name, one.architecture, one.data_kind, one.format];
  return texts.some((text) => text?.toLowerCase().includes(search.toLowerCase()));
}

function List({ kind, title, path, items, columns, searched, command, empty }) {
  useTitle(title);
  const { query } = useAddress();
  const { me } = useLive();
  const { data, error, reload } = useData(
    pathOf([path], { page_size: PAGE_SIZE, page_token: query.get("page") }),
  );
  const all = data?.[items];
  const search = query.get("search") || "";
  const owner = query.get("owner") || "";
  const owners = [...new Set((all || []).map((one) => one.owner))].sort();
  const listed = all?.filter((one) => isLike(one, search) && (!owner || one.owner === owner));
  const size = (listed || []).reduce((sum, one) => sum + (one.size_bytes || 0), 0);
  return html`
    <div class="title">
      <h1>${title}</h1>
    </div>
    <div class="filters" role="search">
      <${Search}
        label="Search"
        placeholder=${searched}
        value=${search}
        onSearch=${(text) => setQuery({ search: text })}
      />
      <select
        aria-label="Owner"
        value=${owner}
        onChange=${(event) => setQuery({ owner: event.target.value })}
      >
        <option value="">Every owner</option>
        ${owner && !owners.includes(owner) && html`<option value=${owner}>${owner}</option>`}
        ${owners.map((name) => html`
          <option key=${name} value=${name}>${name === me?.name ? `${name} (you)` : name}</option>
        `)}
      </select>
      ${listed?.length > 0 && html`
        <span class="quiet">${plural(listed.length, kind)}, ${bytes(size)}</span>
      `}
    </div>
    ${error && html`<${Problem} error=${error} again=${reload} />`}
    <${Card} className="flush">
      ${!listed ? !error && html`<${Waiting} rows=${6} />` : listed.length ? html`
        <table class="list resources">
          <thead>
            <tr>
              <th>Name</th>
              <th>Owner</th>
              <th>Shared with</th>
              ${columns.map(([text]) => html`<th key=${text}>${text}</th>`)}
              <th class="num">Size</th>
              <th>Pushed</th>
              <th>Use</th>
            </tr>
          </thead>
          <tbody>
            ${listed.map((one) => html`
              <tr key=${one[`${kind}_id`]} class=${one.owner === me?.name ? "mine" : ""}>
                <td class="name">
                  <b>${one.name}</b>
                  ${one.state !== "READY" && html`
                    ${" "}
                    <span class="chip warn">${one.state.toLowerCase()}</span>
                  `}
                </td>
                <td data-label="Owner">${one.owner === me?.name ? html`<b>you</b>` : one.owner}</td>
                <td data-label="Shared with">${sharedText(one)}</td>
                ${columns.map(([text, of]) => html`
                  <td key=${text} data-label=${text}>${of(one) || "-"}</td>
                `)}
                <td class="num" data-label="Size">${bytes(one.size_bytes)}</td>
                <td data-label="Pushed"><${Time} at=${one.create_time} /></td>
                <td class="command">
                  <${Copy} quiet text=${command(one)} />
                </td>
              </tr>
            `)}
          </tbody>
        </table>
      ` : html`
        <${Empty} title=${all.length ? `No ${kind} is like that.` : `There are no ${title.toLowerCase()} yet.`}>
          ${all.length ? html`<a href="/${path}">All ${path}</a>` : empty}
        <//>
      `}
    <//>
    <div class="pages">
      ${query.get("page") && html`<a class="button" href="/${path}">Newest</a>`}
      ${data?.next_page_token && html`
        <a class="button" href="/${path}?page=${data.next_page_token}">Older</a>
      `}
    </div>
  `;
}

export const Models = () => html`
  <${List}
    kind="model"
    title="Models"
    path="models"
    items="models"
    columns=${[
      ["Architecture", (one) => one.architecture],
      ["Parameters", (one) => one.num_parameters && large(one.num_parameters)],
    ]}
    searched="Name or architecture"
    command=${(one) => `model: ${one.name}`}
    empty=${html`<code>horizon model push DIR --name NAME</code> brings one.`}
  />
`;

export const Datasets = () => html`
  <${List}
    kind="dataset"
    title="Datasets"
    path="datasets"
    items="datasets"
    columns=${[
      ["Kind", (one) => one.data_kind],
      ["Format", (one) => one.format],
      ["Rows", (one) => one.num_rows && count(one.num_rows)],
    ]}
    searched="Name, kind or format"
    command=${(one) => `dataset: ${one.name}`}
    empty=${html`<code>horizon dataset push FILE --name NAME</code> brings one.`}
  />
`;
