/** The one event stream of an open page: server-sent events over fetch, which can send the token in a header. */
import { call, ApiError } from "./api.js";

const SILENT_FOR_MS = 40000; // the daemon sends a heartbeat every 15 s
const HIDDEN_FOR_MS = 120000;
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15000;

/**
 * @typedef {"connecting" | "live" | "reconnecting" | "resting"} Connection
 * resting: the page was hidden for long, or nobody is signed in.
 */

/** Follows one address at a time, and connects again by itself until it is stopped. */
export class Stream {
  /**
   * @param {(event: string, data: any) => void} onEvent
   * @param {(state: Connection) => void} onState
   */
  constructor(onEvent, onState) {
    this.onEvent = onEvent;
    this.onState = onState;
    /** @type {(() => string) | null} returns the address, which names what was received last */
    this.address = null;
    this.running = null;
    this.hiddenSince = null;
    document.addEventListener("visibilitychange", () => this.visibilityChanged());
  }

  /** Follow another address from now on. */
  follow(address) {
    this.address = address;
    this.restart("connecting");
  }

  stop() {
    this.address = null;
    this.restart("resting");
  }

  restart(state) {
    this.running?.abort();
    this.running = null;
    this.onState(state);
    if (this.address) {
      this.running = new AbortController();
      this.run(this.running.signal);
    }
  }

  visibilityChanged() {
    clearTimeout(this.hiddenSince);
    if (document.hidden) {
      this.hiddenSince = setTimeout(() => {
        if (this.running) this.rest();
      }, HIDDEN_FOR_MS);
    } else if (this.address && !this.running) {
      this.restart("connecting");
    }
  }

  rest() {
    this.running.abort();
    this.running = null;
    this.onState("resting");
  }

  async run(signal) {
    let wait = FIRST_WAIT_MS;
    while (!signal.aborted) {
      try {
        await this.once(signal, () => {
          wait = FIRST_WAIT_MS;
        });
      } catch (error) {
        if (signal.aborted) return;
        // Asking again does not help; signing in does.
        if (error instanceof ApiError && [401, 403, 404].includes(error.status)) {
          this.onState("resting");
          return;
        }
      }
      if (signal.aborted) return;
      this.onState("reconnecting");
      // Not all pages at once, when the daemon is back.
      await pause(wait * (0.75 + Math.random() / 2), signal);
      wait = Math.min(wait * 2, LONGEST_WAIT_MS);
    }
  }

  /** Read one connection to its end. */
  async once(signal, onLive) {
    const connection = new AbortController();
    const abort = () => connection.abort();
    signal.addEventListener("abort", abort);
    let watchdog = setTimeout(abort, SILENT_FOR_MS);
    try {
      const answer = await call(this.address(), { signal: connection.signal, accept: "text/event-stream" });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let kept = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        clearTimeout(watchdog);
        watchdog = setTimeout(abort, SILENT_FOR_MS);
        if (signal.aborted) return;
        onLive();
        this.onState("live");
        const frames = (kept + value.replaceAll("\r\n", "\n")).split("\n\n");
        kept = frames.pop();
        for (const frame of frames) this.deliver(frame);
      }
    } finally {
      clearTimeout(watchdog);
      signal.removeEventListener("abort", abort);
      connection.abort();
    }
  }

  deliver(frame) {
    let event = "message";
    const data = [];
    for (const line of frame.split("\n")) {
      if (line.startsWith("event:")) event = line.slice(6).trim();
      else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
    }
    if (data.length) this.onEvent(event, JSON.parse(data.join("\n")));
  }
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener(
      "abort",
      () => {
        clearTimeout(timer);
        resolve();
      },
      { once: true },
    );
  });
}
