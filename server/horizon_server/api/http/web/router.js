/** Addresses: links and the back button without loading the document again. */
import { useEffect, useState } from "./vendor/preact-htm.js";

const listeners = new Set();

function changed() {
  for (const listener of listeners) listener();
}

/** Go to an address; `replace` puts it in place of the present one. */
export function go(href, { replace = false } = {}) {
  const before = location.pathname;
  history[replace ? "replaceState" : "pushState"](null, "", href);
  if (location.pathname !== before) scrollTo(0, 0);
  changed();
}

/** Change parameters of the present address; empty ones are removed. They replace it: back leaves the page. */
export function setQuery(changes, { replace = true } = {}) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changes)) {
    if (value === "" || value === null || value === undefined || value === false) query.delete(name);
    else query.set(name, value === true ? "1" : value);
  }
  const text = query.toString();
  go(location.pathname + (text ? `?${text}` : ""), { replace });
}

/** The present address, again after each change: {path, query}. */
export function useAddress() {
  const [, again] = useState(0);
  useEffect(() => {
    const listener = () => again((n) => n + 1);
    listeners.add(listener);
    addEventListener("popstate", listener);
    return () => {
      listeners.delete(listener);
      removeEventListener("popstate", listener);
    };
  }, []);
  return { path: location.pathname, query: new URLSearchParams(location.search) };
}

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]");
  const otherWay = event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey;
  if (!link || otherWay || event.defaultPrevented || link.target || link.origin !== location.origin) return;
  // Jumps within the page are the browser's.
  if (link.getAttribute("href").startsWith("#")) return;
  event.preventDefault();
  go(link.href);
});

export const jobAddress = (name, query = "") => `/jobs/${encodeURIComponent(name)}${query}`;
