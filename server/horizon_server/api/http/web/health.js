/** Whether a job is well, in a sentence: what the page says first. */
import { ago, clock, count, hasEnded, percent, plural, secondsFromNow, short, span } from "./format.js";

/** A step that takes so many times its usual time is worth a word. */
const MUCH_LATER = 6;
const AT_LEAST_S = 60;

/**
 * @param {any} job
 * @param {any} [data] columns of the job, where they are known
 * @param {number} [lastTime] when the last event came, in Unix seconds
 * @returns {{tone: string, word: string, text: string}}
 */
export function health(job, data, lastTime) {
  const { state, outlook } = job;
  if (state === "FAILED") return { tone: "bad", word: "Failed", text: job.message };
  if (hasEnded(state))
    return {
      tone: state === "SUCCEEDED" ? "good" : "",
      word: state === "SUCCEEDED" ? "Finished" : "Cancelled",
      text: [resultText(job), job.message].filter(Boolean).join("; "),
    };
  if (state === "PAUSED")
    return { tone: "warn", word: "Paused", text: job.message || "It continues when it is resumed." };
  if (state === "QUEUED") {
    const start = outlook?.estimated_start_time;
    return {
      tone: "",
      word: job.queue_position ? `Waiting, place ${job.queue_position}` : "Waiting",
      text: [
        outlook?.why || job.message,
        start && `starts about ${clock(start)}, in ${span(secondsFromNow(start))}`,
      ]
        .filter(Boolean)
        .join("; "),
    };
  }
  if (state !== "RUNNING")
    return {
      tone: "run",
      word: { PREPARING: "Preparing data", STARTING: "Starting", STOPPING: "Stopping" }[state],
      text: outlook?.why || job.message,
    };
  return running(job, data, lastTime);
}

function running(job, data, lastTime) {
  const step = job.last_step;
  if (!step)
    return { tone: "run", word: "Running", text: job.outlook?.why || "Its first step is not done yet." };
  const worries = [];
  if (step.loss === null) worries.push("the loss is not a number");
  if (step.skipped) worries.push("the last step changed nothing, as its gradient was not finite");
  const quiet = lastTime ? Date.now() / 1000 - lastTime : 0;
  // While others have their turn, no step is due.
  const share = job.outlook?.share || 1;
  if (quiet > Math.max(AT_LEAST_S, (MUCH_LATER * step.duration_s) / share))
    worries.push(`no step for ${span(quiet)}, where one takes ${span(step.duration_s)}`);
  if (job.num_restarts > 0)
    worries.push(
      `restarted ${plural(job.num_restarts, "time")}${job.last_failure ? ` after ${job.last_failure}` : ""}`,
    );
  const trend = trendOf(data);
  if (trend?.rises) worries.push(trend.text);
  if (worries.length) return { tone: "warn", word: "Look at it", text: sentence(worries.join("; ")) };
  const slowed = job.outlook && share < 0.995 ? `it has ${percent(share)} of the device` : "";
  const said = lastTime ? `last step ${ago(lastTime)}` : "";
  return {
    tone: "good",
    word: "Healthy",
    text: sentence([trend?.text, said, slowed].filter(Boolean).join("; ") || `loss ${short(step.loss)}`),
  };
}

/** How the loss of the last tenth of the steps compares with that before. */
function trendOf(data) {
  const losses = data?.series.loss?.mean.filter((v) => v !== null) || [];
  if (losses.length < 20) return null;
  const part = Math.max(5, Math.floor(losses.length / 10));
  const mean = (values) => values.reduce((sum, v) => sum + v, 0) / values.length;
  const [first, before, now] = [
    mean(losses.slice(0, part)),
    mean(losses.slice(-2 * part, -part)),
    mean(losses.slice(-part)),
  ];
  const swing = Math.max(...losses.slice(-2 * part)) - Math.min(...losses.slice(-2 * part));
  const rises = now > first && now - before > swing * 0.25;
  const word = rises ? "rises" : before - now > Math.abs(before) * 0.002 ? "falls" : "is level";
  return { rises, text: `loss ${word}: ${short(first, 3)} at first, ${short(now, 3)} now` };
}

function resultText(job) {
  const best = job.best_eval?.eval_loss;
  if (best !== null && best !== undefined)
    return `best evaluation loss ${short(best)} at step ${count(job.best_eval.step)}`;
  return job.last_step ? `loss ${short(job.last_step.loss)}` : "";
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);
