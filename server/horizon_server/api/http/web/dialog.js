/** Questions before something is changed: the browser's own dialogs, opened by a function that waits for the answer. */
import { html, render, useEffect, useRef, useState } from "./vendor/preact-htm.js";

/**
 * Ask before a change. Returns what `act` returned, or undefined where the user has changed their mind.
 *
 * @param {{title: string, text?: any, confirm: string, danger?: boolean, initial?: any,
 *   fields?: (value: any, set: (v: any) => void) => any, act: (value: any) => Promise<any>}} question
 *   `act` makes the change; its error is shown in the dialog.
 */
export function ask(question) {
  return new Promise((resolve) => {
    const before = document.activeElement;
    const place = document.createElement("div");
    document.body.append(place);
    const close = (result) => {
      render(null, place);
      place.remove();
      // Where the button is gone, as the job has moved on, the focus goes to the page.
      (before?.isConnected ? before : document.getElementById("main"))?.focus();
      resolve(result);
    };
    render(html`<${Question} ...${question} close=${close} />`, place);
  });
}

function Question({ title, text, confirm, danger, fields, initial, act, close }) {
  const dialog = useRef(null);
  const [value, set] = useState(initial);
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState("");
  useEffect(() => dialog.current.showModal(), []);
  const submit = async (event) => {
    event.preventDefault();
    if (busy) return;
    setBusy(true);
    setError("");
    try {
      close(await act(value));
    } catch (problem) {
      setError(problem.message);
      setBusy(false);
    }
  };
  return html`
    <dialog
      ref=${dialog}
      aria-labelledby="question"
      onCancel=${(event) => {
        event.preventDefault();
        if (!busy) close(undefined);
      }}
    >
      <form onSubmit=${submit}>
        <h2 id="question">${title}</h2>
        ${text && html`<p>${text}</p>`}
        ${fields && fields(value, set)}
        ${error && html`<p class="bad" role="alert">${error}</p>`}
        <div class="buttons">
          <button type="button" onClick=${() => close(undefined)} disabled=${busy}>
            Not now
          </button>
          <button type="submit" class="main ${danger ? "danger" : ""}" disabled=${busy}>
            ${busy ? "Working..." : confirm}
          </button>
        </div>
      </form>
    </dialog>
  `;
}

/** Show something large, such as an answer in full. */
export function show(title, content) {
  const before = document.activeElement;
  const place = document.createElement("div");
  document.body.append(place);
  const close = () => {
    render(null, place);
    place.remove();
    before?.focus();
  };
  render(html`<${Shown} title=${title} content=${content} close=${close} />`, place);
}

function Shown({ title, content, close }) {
  const dialog = useRef(null);
  useEffect(() => dialog.current.showModal(), []);
  return html`
    <dialog class="wide" ref=${dialog} aria-labelledby="shown" onClose=${close}>
      <header>
        <h2 id="shown">${title}</h2>
        <button type="button" onClick=${() => dialog.current.close()}>
          Close
        </button>
      </header>
      ${content}
    </dialog>
  `;
}
