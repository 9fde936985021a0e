/** The log of an attempt as sentences, followed while the job runs. */
import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";
import { pathOf, read } from "../api.js";
import { hasEnded } from "../format.js";
import { Card, Copy, Empty, Problem, Waiting } from "../parts.js";

/** Text comes at most this often: an open page makes few calls. */
const EVERY_MS = 10000;
/** As an offset: the last part of a log. */
const AT_END = -1;
const MOST_CHARS = 400000;

export function Log({ job, columns, query, setQuery }) {
  const [state, set] = useState(null);
  const [error, setError] = useState(null);
  const [follows, setFollows] = useState(true);
  const box = useRef(null);
  const attempt = query.get("attempt") || "";
  // A pulse for each event: what happens to a job is in its log too.
  const pulse = `${columns?.last_sequence}`;
  const [start, setStart] = useState(AT_END);
  const wanted = useRef({ offset: start, busy: false, lastMs: 0 });

  useEffect(() => {
    set(null);
    wanted.current = { offset: start, busy: false, lastMs: 0 };
  }, [attempt, job.attempt, start]);
  useEffect(() => {
    let isShown = true;
    const asked = wanted.current;
    const more = async () => {
      if (asked.busy || !isShown) return;
      asked.busy = true;
      asked.lastMs = Date.now();
      try {
        for (let isMore = true; isMore && asked === wanted.current;) {
          const answer = await read(pathOf(["jobs", job.job_id, "log"], { attempt, offset: asked.offset }));
          isMore = start !== AT_END && answer.next_offset > asked.offset && !answer.complete;
          asked.offset = answer.next_offset;
          if (asked === wanted.current)
            set((old) => ({
              ...answer,
              offset: old ? old.offset : answer.offset,
              text: ((old?.text || "") + answer.text).slice(-MOST_CHARS),
            }));
        }
        setError(null);
      } catch (problem) {
        setError(problem);
      }
      asked.busy = false;
    };
    const wait = Math.max(0, asked.lastMs + EVERY_MS - Date.now());
    const timer = setTimeout(more, asked.lastMs ? wait : 0);
    return () => {
      isShown = false;
      clearTimeout(timer);
    };
  }, [attempt, job.attempt, start, pulse, job.state]);
  useEffect(() => {
    if (follows && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [state?.text, follows]);

  const attempts = state?.attempts || [];
  const lines = state?.text.split("\n").filter(Boolean) || [];
  return html`
    <${Card} id="log" title="Log">
      <div class="controls">
        ${attempts.length > 1 && html`
          <label>
            Attempt${" "}
            <select
              value=${attempt || String(state.attempt)}
              onChange=${(event) => setQuery({ attempt: event.target.value })}
            >
              ${attempts.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}
            </select>
          </label>
        `}
        ${!hasEnded(job.state) && html`
          <label class="check">
            <input type="checkbox" checked=${follows} onChange=${(event) => setFollows(event.target.checked)} />${" "}
            Follow
          </label>
        `}
        ${state?.offset > 0 && html`
          <button type="button" class="small" onClick=${() => setStart(0)}>
            Show it from its beginning
          </button>
        `}
        <span class="space"></span>
        <${Copy} quiet text="horizon job logs ${job.name}" />
      </div>
      ${error && html`<${Problem} error=${error} />`}
      ${!state ? !error && html`<${Waiting} rows=${8} />` : lines.length ? html`
        <pre
          class="log"
          ref=${box}
          tabindex="0"
          role="log"
          aria-live="off"
          aria-label="Log of attempt ${state.attempt}"
        >
          ${lines.map((line, i) => html`
            <span
              key=${i}
              class=${
                /\b(error|failed|traceback)\b/i.test(line) ? "bad" : /\bwarning\b/i.test(line) ? "warn" : ""
              }
            >
              ${line}
            </span>
          `)}
        </pre>
      ` : html`
        <${Empty} title="Nothing is written yet.">
          ${job.state === "QUEUED" && "An attempt writes its log once it starts."}
        <//>
      `}
    <//>
  `;
}
