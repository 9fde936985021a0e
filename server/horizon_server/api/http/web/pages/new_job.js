/** A new job, from nothing or from another one: a form made of the job spec's schema, its plan, then the submission. */
import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact-htm.js";
import { change, pathOf } from "../api.js";
import { Announce, Card, Empty, Problem, useData, useTitle, Waiting } from "../parts.js";
import { useLive } from "../live.js";
import { mayCreate } from "../rights.js";
import { go, jobAddress, useAddress } from "../router.js";
import { at, put, sectionsOf, textOf, valueOf } from "../schema.js";
import { PlanFacts } from "./job_plan.js";

const METHODS = ["dpo", "ipo", "orpo", "simpo", "kto", "policy"];
const TITLES = {
  "": "Job",
  train: "Training",
  "train.lora": "LoRA",
  checkpoint: "Checkpoints",
  eval: "Evaluation",
  "eval.generate": "Answers at evaluations",
  limits: "Limits",
};
const LISTS = { model: "models", dataset: "datasets", eval_dataset: "datasets" };

/** One field: label, control, what is wrong with it, what is allowed. */
function Field({ field, text, was, problem, onText }) {
  const id = `field-${field.path}`;
  const differs = was !== undefined && text !== was;
  const shared = {
    id,
    "aria-invalid": problem ? "true" : undefined,
    "aria-describedby": `${id}-about`,
    required: field.required,
  };
  const type = (event) => onText(field.path, event.target.value);
  const control =
    field.kind === "choice" || field.kind === "boolean" ? html`
      <select ...${shared} value=${text} onChange=${type}>
        ${(field.choices || ["true", "false"]).map((one) => html`
          <option key=${one} value=${one}>${one}</option>
        `)}
      </select>
    ` : html`
      <input
        ...${shared}
        type="text"
        inputmode=${["integer", "number"].includes(field.kind) ? "decimal" : undefined}
        value=${text}
        list=${LISTS[field.path]}
        placeholder=${field.nullable ? "none" : undefined}
        autocomplete="off"
        spellcheck=${false}
        onInput=${type}
      />
    `;
  return html`
    <div class="field ${differs ? "differs" : ""} ${problem ? "wrong" : ""}">
      <div class="name">
        <label for=${id}>${field.name}</label>
        ${differs && html`
          <button
            type="button"
            class="link"
            onClick=${() => onText(field.path, was)}
            aria-label="Set ${field.path} back to ${was || "none"}"
          >
            was ${was || "none"}
          </button>
        `}
      </div>
      ${control}
      <p id="${id}-about">
        ${problem && html`<b class="bad">${problem} </b>`}
        <span class="quiet">${field.description}</span>
        ${field.allowed && html`<span class=${problem ? "quiet" : "unseen"}> Allowed: ${field.allowed}</span>`}
      </p>
    </div>
  `;
}

function Section({ section, texts, initial, on, setOn, problems, onText }) {
  const title = TITLES[section.path] || section.path;
  const wrong = section.fields.filter((field) => problems[field.path]).length;
  const changed = section.fields.filter((field) => texts[field.path] !== initial[field.path]).length;
  const fields = html`
    <div class="fields">
      ${section.fields.map((field) => html`
        <${Field}
          key=${field.path}
          field=${field}
          text=${texts[field.path] ?? ""}
          was=${initial[field.path]}
          problem=${problems[field.path]}
          onText=${onText}
        />
      `)}
    </div>
  `;
  if (!section.path)
    return html`
      <${Card} id="section-job" title=${title}>
        ${fields}
      <//>
    `;
  return html`
    <details class="card" open=${wrong > 0 || section.path === "train"}>
      <summary>
        <h2>${title}</h2>
        <span class="quiet">
          ${[changed && `${changed} changed`, wrong && `${wrong} to correct`].filter(Boolean).join(", ")}
        </span>
      </summary>
      ${section.optional && html`
        <label class="check">
          <input
            type="checkbox"
            checked=${on}
            onChange=${(event) => setOn(section.path, event.target.checked)}
          />${" "}
          ${section.description}
        </label>
      `}
      ${(!section.optional || on) && fields}
    </details>
  `;
}

/** What the form says, as a spec; without what is as the schema has it. Throws {path: problem}. */
function specOf(sections, texts, on, method) {
  const spec = {};
  const problems = {};
  for (const section of sections) {
    if (METHODS.includes(section.path) && section.path !== method) continue;
    if (section.optional && !on[section.path]) continue;
    if (section.optional) put(spec, section.path, {});
    for (const field of section.fields) {
      try {
        const value = valueOf(field, texts[field.path] ?? "");
        if (field.required || JSON.stringify(value) !== JSON.stringify(field.initial ?? null))
          put(spec, field.path, value);
      } catch (error) {
        problems[field.path] = error.message;
      }
    }
  }
  if (Object.keys(problems).length) throw problems;
  return spec;
}

export function NewJob() {
  const { query } = useAddress();
  const from = query.get("from");
  const schema = useData("/job-schema");
  const source = useData(from ? pathOf(["jobs", from]) : "");
  const { me } = useLive();
  useTitle(from ? `Clone ${source.data?.name || ""}` : "New job");
  const error = schema.error || source.error;
  if (error)
    return html`
      <div class="title">
        <h1>New job</h1>
      </div>
      <${Problem} error=${error} />
    `;
  if (!schema.data || (from && !source.data) || !me)
    return html`
      <div class="title">
        <h1>New job</h1>
      </div>
      <${Waiting} rows=${8} />
    `;
  if (!mayCreate(me))
    return html`
      <div class="title">
        <h1>New job</h1>
      </div>
      <${Empty} title="You may look, but not submit jobs.">
        Ask an admin of the node for a token that allows it.
      <//>
    `;
  return html`<${Form} key=${from || ""} schema=${schema.data} source=${source.data} />`;
}

function Form({ schema, source }) {
  const sections = useMemo(() => sectionsOf(schema), [schema]);
  const initial = useMemo(() => {
    const values = source ? { ...source.spec, name: `${source.spec.name}-2`.slice(-63) } : {};
    return Object.fromEntries(
      sections.flatMap((section) =>
        section.fields.map((field) => [field.path, textOf(field, at(values, field.path) ?? field.initial)]),
      ),
    );
  }, [sections, source]);
  const was = useMemo(() => (source ? { ...initial, name: source.spec.name } : initial), [initial]);
  const [texts, setTexts] = useState(initial);
  const [on, setOn] = useState(() =>
    Object.fromEntries(
      sections
        .filter((one) => one.optional)
        .map((one) => [one.path, !!(source && at(source.spec, one.path))]),
    ),
  );
  const [problems, setProblems] = useState({});
  const [failure, setFailure] = useState("");
  const [planned, setPlanned] = useState(null);
  const [busy, setBusy] = useState("");
  // The same for every try, so that a lost answer does not make a second job.
  const requestId = useRef(newRequestId());
  const top = useRef(null);
  const models = useData("/models?page_size=1000");
  const datasets = useData("/datasets?page_size=1000");
  const onText = (path, text) => {
    setTexts((old) => ({ ...old, [path]: text }));
    setProblems((old) => ({ ...old, [path]: undefined }));
    setPlanned(null);
  };
  const method = texts.method;
  const shown = sections.filter((section) => !METHODS.includes(section.path) || section.path === method);
  const changed = shown
    .flatMap((section) => section.fields)
    .filter((field) => texts[field.path] !== was[field.path]);

  const send = async (what) => {
    setBusy(what);
    setFailure("");
    let spec;
    try {
      spec = specOf(sections, texts, on, method);
      if (what === "plan") setPlanned((await change("POST", "/jobs/plan", { spec })).plan);
      else {
        const job = await change("POST", "/jobs", { spec, request_id: requestId.current });
        go(jobAddress(job.job_id));
        return;
      }
      setProblems({});
    } catch (error) {
      showProblems(error);
    }
    setBusy("");
  };
  const showProblems = (error) => {
    const found =
      error instanceof Error
        ? Object.fromEntries(
            (error.violations || []).map((one) => [one.field.replace(/^spec\./, ""), one.description]),
          )
        : error;
    const known = new Set(sections.flatMap((section) => section.fields.map((field) => field.path)));
    const elsewhere = Object.entries(found)
      .filter(([path]) => !known.has(path))
      .map(([, text]) => text);
    setProblems(found);
    setPlanned(null);
    // Another request: the same id with another spec would be refused.
    requestId.current = newRequestId();
    setFailure(
      [error instanceof Error && !Object.keys(found).length ? error.message : "", ...elsewhere]
        .filter(Boolean)
        .join(" ") ||
        `${Object.keys(found).length === 1 ? "One field has" : "Some fields have"} to be corrected.`,
    );
  };
  useEffect(() => {
    const first = Object.keys(problems).find((path) => problems[path]);
    if (first && failure) document.getElementById(`field-${first}`)?.focus();
  }, [failure]);

  return html`
    <div class="title">
      <div>
        ${source && html`
          <p class="crumbs">
            <a href=${jobAddress(source.job_id)}>${source.name}</a>
          </p>
        `}
        <h1 ref=${top}>${source ? `Clone ${source.name}` : "New job"}</h1>
        <p class="quiet sub">
          ${source
            ? `${changed.length === 1 ? "One field differs" : `${changed.length} fields differ`} from ${source.name}`
            : "Only name, model and dataset are needed; the rest has defaults."}
        </p>
      </div>
    </div>
    <form
      class="new-job"
      noValidate
      onSubmit=${(event) => {
        event.preventDefault();
        send("plan");
      }}
    >
      <datalist id="models">
        ${(models.data?.models || []).map((one) => html`<option key=${one.model_id} value=${one.name} />`)}
      </datalist>
      <datalist id="datasets">
        ${(datasets.data?.datasets || []).map((one) => html`
          <option key=${one.dataset_id} value=${one.name} />
        `)}
      </datalist>
      <div class="sections">
        ${shown.map((section) => html`
          <${Section}
            key=${section.path}
            section=${section}
            texts=${texts}
            initial=${was}
            on=${on[section.path]}
            setOn=${(path, value) => {
              setOn({ ...on, [path]: value });
              setPlanned(null);
            }}
            problems=${problems}
            onText=${onText}
          />
        `)}
      </div>
      <aside class="card" aria-label="Plan and submit">
        ${failure && html`<p class="note bad" role="alert">${failure}</p>`}
        ${planned ? html`
          <h2>Plan</h2>
          <${PlanFacts} plan=${planned} />
        ` : html`
          <p class="quiet">
            The plan says how much memory the job needs and how fast it is expected to be, before anything
            is submitted.
          </p>
        `}
        <div class="buttons">
          <button type="submit" class=${planned ? "" : "main"} disabled=${busy !== ""}>
            ${busy === "plan" ? "Planning..." : planned ? "Plan again" : "Show the plan"}
          </button>
          ${planned && html`
            <button
              type="button"
              class="main"
              disabled=${busy !== "" || !planned.fits}
              onClick=${() => send("submit")}
            >
              ${busy === "submit" ? "Submitting..." : "Submit"}
            </button>
          `}
        </div>
        <${Announce}
          text=${planned ? `The plan is there. ${planned.fits ? "It fits." : "It does not fit."}` : ""}
        />
      </aside>
    </form>
  `;
}

/** A UUID; a page that came over plain HTTP from another host has no randomUUID. */
function newRequestId() {
  if (crypto.randomUUID) return crypto.randomUUID();
  const hex = [...crypto.getRandomValues(new Uint8Array(16))]
    .map((byte) => byte.toString(16).padStart(2, "0"))
    .join("");
  return `${hex.slice(0, 8)}-${hex.slice(8, 12)}-4${hex.slice(13, 16)}-a${hex.slice(17, 20)}-${hex.slice(20)}`;
}
