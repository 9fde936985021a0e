/** The log of an attempt as sentences, followed while the job runs. */
import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";
import { pathOf, read } from "../api.js";
import { hasEnded } from "../format.js";
import { Card, Copy, Empty, Problem, Waiting } from "../parts.js";

/** Text comes at most this often: an open page makes few calls. */
const EVERY_MS = 10000;
const MOST_CHARS = 400000;

export function Log({ job, columns, query, setQuery }) {
  const [state, set] = useState(null);
  const [error, setError] = useState(null);
  const [follows, setFollows] = useState(true);
  const box = useRef(null);
  const attempt = query.get("attempt") || "";
  // A pulse for each event: what happens to a job is in its log too.
  const pulse = `${columns?.last_sequence}`;
  const wanted = useRef({ offset: undefined, busy: false, lastMs: 0 });

  useEffect(() => {
    set(null);
    wanted.current = { offset: undefined, busy: false, lastMs: 0 };
  }, [attempt, job.attempt]);
  useEffect(() => {
    let isShown = true;
    const asked = wanted.current;
    const more = async () => {
      if (asked.busy || !isShown) return;
      asked.busy = true;
      asked.lastMs = Date.now();
      try {
        const answer = await read(pathOf(["jobs", job.job_id, "log"], { attempt, offset: asked.offset }));
        asked.offset = answer.next_offset;
        if (asked === wanted.current) set((old) => ({ ...answer, text: ((old?.text || "") + answer.text).slice(-MOST_CHARS) }));
        setError(null);
      } catch (problem) {
        setError(problem);
      }
      asked.busy = false;
    };
    const wait = Math.max(0, asked.lastMs + EVERY_MS - Date.now());
    const timer = setTimeout(more, asked.offset === undefined ? 0 : wait);
    return () => { isShown = false; clearTimeout(timer); };
  }, [attempt, job.attempt, pulse, job.state]);
  useEffect(() => { if (follows && box.current) box.current.scrollTop = box.current.scrollHeight; }, [state?.text, follows]);

  const attempts = state?.attempts || Math.max(1, job.attempt);
  const lines = state?.text.split("\n").filter(Boolean) || [];
  return html`<${Card} id="log" title="Log">
    <div class="controls">
      ${attempts > 1 && html`<label>Attempt <select value=${attempt || String(attempts)} onChange=${(event) => setQuery({ attempt: event.target.value })}>
        ${Array.from({ length: attempts }, (_, i) => html`<option key=${i} value=${i + 1}>${i + 1}</option>`)}</select></label>`}
      ${!hasEnded(job.state) && html`<label class="check"><input type="checkbox" checked=${follows} onChange=${(event) => setFollows(event.target.checked)} /> Follow</label>`}
      <span class="space"></span><${Copy} quiet text="horizon job logs ${job.name}" />
    </div>
    ${error && html`<${Problem} error=${error} />`}
    ${!state ? !error && html`<${Waiting} rows=${8} />` : lines.length
      ? html`<pre class="log" ref=${box} tabindex="0" role="log" aria-live="off" aria-label="Log of attempt ${state.attempt}">${lines.map((line, i) => html`<span key=${i} class=${/\b(error|failed|traceback)\b/i.test(line) ? "bad" : /\bwarning\b/i.test(line) ? "warn" : ""}>${line}\n</span>`)}</pre>`
      : html`<${Empty} title="Nothing is written yet.">${job.state === "QUEUED" && "An attempt writes its log once it starts."}<//>`}
  <//>`;
}
