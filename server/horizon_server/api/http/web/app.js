/** The frame of every page: the bar with its links, notices of the whole node, and the page of the present address. */
import { html, render, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { isSignedIn, signOut, whenSignedOut } from "./api.js";
import { clock } from "./format.js";
import { start, stop, useLive } from "./live.js";
import { Announce, Empty, Problem } from "./parts.js";
import { useAddress } from "./router.js";
import { Compare } from "./pages/compare.js";
import { Job } from "./pages/job.js";
import { Jobs } from "./pages/jobs.js";
import { NewJob } from "./pages/new_job.js";
import { Overview } from "./pages/overview.js";
import { Queue } from "./pages/queue.js";
import { Datasets, Models } from "./pages/resources.js";
import { SignIn } from "./pages/sign_in.js";
import { Usage } from "./pages/usage.js";

const PAGES = [
  [/^\/$/, Overview],
  [/^\/jobs$/, Jobs],
  [/^\/jobs\/([^/]+)$/, Job],
  [/^\/new$/, NewJob],
  [/^\/compare$/, Compare],
  [/^\/queue$/, Queue],
  [/^\/usage$/, Usage],
  [/^\/models$/, Models],
  [/^\/datasets$/, Datasets],
];
const LINKS = [
  ["/", "Overview"],
  ["/jobs", "Jobs"],
  ["/queue", "Queue"],
  ["/usage", "Usage"],
  ["/models", "Models"],
  ["/datasets", "Datasets"],
];
const CONNECTIONS = {
  live: ["live", "good", "Everything on this page follows the daemon."],
  connecting: ["connecting", "", "Connecting to the daemon."],
  reconnecting: [
    "reconnecting",
    "warn",
    "The daemon cannot be reached; the page tries again by itself and shows what it knew last.",
  ],
  resting: ["paused", "", "Nothing is followed while the page is hidden for long."],
};

function isHere(path, href) {
  return href === "/" ? path === "/" : path === href || path.startsWith(`${href}/`);
}

function Connection({ state }) {
  const [word, tone, meaning] = CONNECTIONS[state];
  return html`
    <span class="connection ${tone}" role="status" title=${meaning}>${word}</span>
  `;
}

function Top({ path, node, me, connection }) {
  return html`
    <header class="top">
      <a class="skip" href="#main">Skip to the content</a>
      <a class="brand" href="/">
        <span class="sun" aria-hidden="true"></span>horizon
      </a>
      <div class="row">
        <span class="host" title=${node ? `horizon ${node.version}` : ""}>${node?.hostname}</span>
        <span class="space"></span>
        <${Connection} state=${connection} />
        <span class="who">
          ${me && html`
            <b>${me.name}</b>${" "}
            <span>
              ${me.role === "user" ? "" : me.role}
              ${me.scope === "full" ? "" : ` ${me.scope} only`}
            </span>
          `}
        </span>
        <button type="button" class="plain" onClick=${() => signOut()}>
          Sign out
        </button>
      </div>
      <nav aria-label="Pages">
        ${LINKS.map(([href, text]) => html`
          <a key=${href} href=${href} aria-current=${isHere(path, href) ? "page" : undefined}>${text}</a>
        `)}
      </nav>
    </header>
  `;
}

/** What concerns everybody: maintenance, a closed node, a daemon that stops. */
function Notices({ node }) {
  if (!node) return null;
  const { condition } = node;
  const said = condition.message ? ` ${condition.message}` : "";
  const notices = [];
  if (node.draining)
    notices.push(
      "The daemon is shutting down: it accepts no new jobs, and running ones continue when it is back.",
    );
  else if (node.mode === "drained")
    notices.push(`The node is drained: jobs are checkpointed and wait.${said}`);
  else if (node.mode === "cordoned")
    notices.push(
      `The node is closed for new starts: running jobs continue, waiting ones stay in the queue.${said}`,
    );
  if (condition.window_start_time) {
    notices.push(
      `Maintenance ${clock(condition.window_start_time)} to ${clock(condition.window_end_time)}: ` +
        `jobs are checkpointed before, and continue afterwards.${node.mode === "open" ? said : ""}`,
    );
  }
  return notices.map((text) => html`<p class="notice" key=${text}>${text}</p>`);
}

function Page({ path }) {
  for (const [pattern, Shown] of PAGES) {
    const found = pattern.exec(path);
    if (found) return html`<${Shown} key=${path} name=${found[1] && decodeURIComponent(found[1])} />`;
  }
  return html`
    <${Empty} title="There is no such page.">
      <a href="/">Overview</a>
    <//>
  `;
}

function App() {
  const { path } = useAddress();
  const { node, me, connection } = useLive();
  const [isIn, setIn] = useState(isSignedIn());
  const [why, setWhy] = useState("");
  const [problem, setProblem] = useState(null);
  const main = useRef(null);
  const opened = useRef(path);
  const begin = () =>
    start().then(
      () => setProblem(null),
      (error) => {
        if (isSignedIn()) setProblem(error);
      },
    );
  useEffect(() => {
    whenSignedOut((reason) => {
      stop();
      setWhy(reason);
      setIn(false);
    });
    if (isSignedIn()) begin();
  }, []);
  // A link leads to another page: keyboard and screen reader go on from its beginning.
  useEffect(() => {
    if (opened.current !== path) main.current?.focus({ preventScroll: true });
    opened.current = path;
  }, [path]);
  if (!isIn)
    return html`
      <${SignIn}
        why=${why}
        onSignIn=${() => {
          setWhy("");
          setIn(true);
          begin();
        }}
      />
    `;
  return html`
    <${Top} path=${path} node=${node} me=${me} connection=${connection} />
    <main id="main" tabindex="-1" ref=${main}>
      <${Notices} node=${node} />
      ${problem && html`<${Problem} error=${problem} again=${begin} />`}
      <${Page} path=${path} />
    </main>
    <${Announce} text=${connection === "reconnecting" ? "Reconnecting to the daemon" : ""} />
  `;
}

const place = document.getElementById("app");
place.replaceChildren();
render(html`<${App} />`, place);
