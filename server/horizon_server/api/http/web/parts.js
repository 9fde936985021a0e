/** Small pieces that several pages share. */
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { live } from "./live.js";
import { lastAnswer, readAndRemember } from "./api.js";
import { clock, fullTime, hasEnded, stateTone, stateWord } from "./format.js";

const TYPING_MS = 300;

/**
 * Read a path, again when it changes or `reload` is called. What was read last stays until the next answer is there.
 *
 * @returns {{data: any, error: Error | null, reload: () => void, isOf: string}}
 */
export function useData(path) {
  const [state, set] = useState({ path: "", data: undefined, error: null });
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    if (!path) return undefined;
    const asking = new AbortController();
    readAndRemember(path, asking.signal).then(
      (data) => set({ path, data, error: null }),
      (error) => {
        if (error.name !== "AbortError")
          set((old) => ({ path, data: old.path === path ? old.data : lastAnswer(path), error }));
      },
    );
    return () => asking.abort();
  }, [path, turn]);
  const known = state.path === path ? state : { data: lastAnswer(path), error: null };
  return {
    data: known.data ?? (state.error ? undefined : state.data),
    error: known.error,
    isOf: state.path,
    reload: () => setTurn((n) => n + 1),
  };
}

/** Set the document's title, and put the focus on the heading of a page that was opened by a link. */
export function useTitle(title) {
  useEffect(() => {
    document.title = title ? `${title} - horizon` : "horizon";
  }, [title]);
}

export const State = ({ state }) => html`<span class="chip ${stateTone(state)}">${stateWord(state)}</span>`;

export const Time = ({ at }) => (at ? html`<time title=${fullTime(at)}>${clock(at)}</time>` : null);

/** A bar of 0 to 1; `label` says what it is of. */
export function Bar({ share, tone = "", label, mark }) {
  const bounded = Math.max(0, Math.min(1, share || 0));
  return html`
    <div class="bar ${tone}" role="img" aria-label=${label}>
      <i style=${{ width: `${bounded * 100}%` }}></i>
      ${mark > 0 && mark < 1 && html`<b style=${{ left: `${mark * 100}%` }}></b>`}
    </div>
  `;
}

export function Progress({ job }) {
  const tone = hasEnded(job.state) ? stateTone(job.state) || "still" : job.state === "RUNNING" ? "" : "still";
  const now = Math.round((job.progress || 0) * 100);
  return html`
    <div
      class="bar ${tone}"
      role="progressbar"
      aria-label="Progress of ${job.name}"
      aria-valuemin="0"
      aria-valuemax="100"
      aria-valuenow=${now}
    >
      <i style=${{ width: `${(job.progress || 0) * 100}%` }}></i>
    </div>
  `;
}

/** One figure with what it is. */
export const Fact = ({ label, children, title, tone = "" }) => html`
  <div class="fact" title=${title}>
    <dt>${label}</dt>
    <dd class=${tone}>${children}</dd>
  </div>
`;

export const Facts = ({ children, className = "" }) => html`<dl class="facts ${className}">${children}</dl>`;

export const Card = ({ title, aside, children, className = "", id }) => html`
  <section class="card ${className}" aria-labelledby=${id}>
    ${title && html`
      <header>
        <h2 id=${id}>${title}</h2>
        ${aside && html`<div class="aside">${aside}</div>`}
      </header>
    `}
    ${children}
  </section>
`;

/** What a list shows that has nothing in it: what it would have, and how it comes to that. */
export const Empty = ({ title, children }) => html`
  <div class="empty">
    <p class="strong">${title}</p>
    ${children && html`<p>${children}</p>`}
  </div>
`;

export const Problem = ({ error, again }) => html`
  <div class="problem" role="alert">
    <p>${error.message}</p>
    ${again && html`<button type="button" onClick=${again}>Try again</button>`}
  </div>
`;

/** A page's first answer is on its way: as high as what will come. */
export const Waiting = ({ rows = 4 }) => html`
  <div class="waiting" role="status" aria-label="Loading">
    ${Array.from({ length: rows }, () => html`<i></i>`)}
  </div>
`;

/** A command or an id, with a button that copies it. */
export function Copy({ text, label = "Copy", quiet = false }) {
  const [said, say] = useState("");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      say("Copied");
    } catch {
      say("Select and copy it");
    }
    setTimeout(() => say(""), 1600);
  };
  return html`
    <span class="copy ${quiet ? "quiet" : ""}">
      <code tabindex="0">${text}</code>
      <button type="button" class="small" onClick=${copy} aria-label="${label}: ${text}">
        ${said || "Copy"}
      </button>
    </span>
  `;
}

/** A table that scrolls sideways where it is wider than the screen, and says so. */
export function Scroll({ label, children }) {
  const box = useRef(null);
  const [more, setMore] = useState(false);
  useEffect(() => {
    const element = box.current;
    const look = () => setMore(element.scrollWidth - element.clientWidth - element.scrollLeft > 8);
    look();
    const sizes = new ResizeObserver(look);
    sizes.observe(element);
    if (element.firstElementChild) sizes.observe(element.firstElementChild);
    element.addEventListener("scroll", look, { passive: true });
    return () => {
      sizes.disconnect();
      element.removeEventListener("scroll", look);
    };
  }, []);
  return html`
    <div class="scroll ${more ? "more" : ""}">
      <div class="scrolled" ref=${box} tabindex="0" role="region" aria-label=${label}>${children}</div>
    </div>
  `;
}

/** Choices of one value as small buttons. */
export const Choice = ({ label, value, options, onChoose }) => html`
  <div class="choice" role="group" aria-label=${label}>
    ${options.map(([key, text]) => html`
      <button type="button" key=${key} aria-pressed=${String(key === value)} onClick=${() => onChoose(key)}>
        ${text}
      </button>
    `)}
  </div>
`;

/** A text field that takes effect once the user stops typing. */
export function Search({ value, onSearch, label, placeholder, list }) {
  const timer = useRef(null);
  const type = (event) => {
    const text = event.target.value.trim();
    clearTimeout(timer.current);
    timer.current = setTimeout(() => onSearch(text), TYPING_MS);
  };
  return html`
    <input
      type="search"
      aria-label=${label}
      placeholder=${placeholder}
      value=${value}
      onInput=${type}
      list=${list}
      autocomplete="off"
      spellcheck=${false}
    />
  `;
}

/** Tell a screen reader what has changed; `text` is read out once it changes. */
export const Announce = ({ text }) => html`
  <p class="unseen" role="status" aria-live="polite">${text}</p>
`;

const JOBS_IN_TEXT = /(job_[0-9a-f]{8,}|(?<=\bjob )[A-Za-z0-9][A-Za-z0-9._-]*)/;

/** The job of that id, or the only one of that name that has not ended. */
function jobSaid(word) {
  const named = () => [...live.jobs.values()].filter((job) => job.name === word && !hasEnded(job.state));
  return live.jobs.get(word) || (named().length === 1 ? named()[0] : null);
}

/** A sentence of the daemon, in which jobs have names or ids: those that are known are linked by their names. */
export function Said({ text }) {
  return (text || "").split(JOBS_IN_TEXT).map((part, i) => {
    const job = i % 2 ? jobSaid(part) : null;
    return job ? html`<a href="/jobs/${job.job_id}">${job.name}</a>` : part;
  });
}

export const JobLink = ({ job, children }) => html`
  <a href="/jobs/${encodeURIComponent(job.job_id)}">${children || job.name || job.job_id}</a>
`;
