/** Changes of a job and its checkpoints, each asked about first. */
import { html } from "./vendor/preact-htm.js";
import { change, pathOf } from "./api.js";
import { ask } from "./dialog.js";
import { bytes, count } from "./format.js";
import { live } from "./live.js";

/** Send a change of a job, and keep what the daemon answers. */
async function changeJob(method, parts, body) {
  const job = await change(method, pathOf(["jobs", ...parts]), body);
  if (job?.job_id) live.jobs.set(job.job_id, job);
  return job;
}

export const pause = (job) =>
  ask({
    title: `Pause ${job.name}?`,
    text:
      job.state === "QUEUED"
        ? "It leaves the queue until it is resumed."
        : "It writes a checkpoint, gives its memory back, and continues from there when it is resumed.",
    confirm: "Pause",
    act: () => changeJob("POST", [job.job_id, "pause"]),
  });

export const resume = (job) =>
  ask({
    title: `Resume ${job.name}?`,
    text:
      "It comes into the queue and continues after its last checkpoint." +
      (job.state === "FAILED" ? " Remove first what made it fail." : ""),
    confirm: "Resume",
    act: () => changeJob("POST", [job.job_id, "resume"]),
  });

export const cancel = (job) =>
  ask({
    title: `Cancel ${job.name}?`,
    text: "It ends for good, and cannot be resumed. Steps since its last checkpoint are lost; its checkpoints stay.",
    confirm: "Cancel the job",
    danger: true,
    act: () => changeJob("POST", [job.job_id, "cancel"]),
  });

export const setPriority = (job) =>
  ask({
    title: `Priority of ${job.name}`,
    text:
      "A higher one is served first within your share of the machine; it takes nothing from other users. " +
      "Above 100 only an admin can go.",
    confirm: "Set priority",
    initial: job.priority,
    fields: (value, set) => html`
      <label for="priority">Priority</label>
      <input
        id="priority"
        type="number"
        step="1"
        required
        value=${value}
        onInput=${(event) => set(event.target.valueAsNumber)}
      />
    `,
    act: (priority) => changeJob("PATCH", [job.job_id], { priority }),
  });

export const keepFiles = (job) =>
  ask({
    title: `Keep the checkpoints of ${job.name}?`,
    text: "They are not deleted automatically any more.",
    confirm: "Keep",
    act: () => changeJob("POST", [job.job_id, "keep"]),
  });

export const deleteCheckpoint = (job, checkpoint) =>
  ask({
    title: `Delete the checkpoint of step ${count(checkpoint.step)}?`,
    text:
      `${bytes(checkpoint.size_bytes)} of ${job.name}` +
      (checkpoint.best ? ", the best one so far" : checkpoint.last ? ", the newest one" : "") +
      ". This cannot be undone.",
    confirm: "Delete",
    danger: true,
    act: async () => {
      await change("DELETE", pathOf(["jobs", job.job_id, "checkpoints", String(checkpoint.step)]));
      return true;
    },
  });

export const keepCheckpoint = (job, checkpoint, kept) =>
  ask({
    title: kept
      ? `Keep the checkpoint of step ${count(checkpoint.step)}?`
      : `Keep the checkpoint of step ${count(checkpoint.step)} no longer?`,
    text: kept
      ? "It is not removed when newer ones are written, nor deleted automatically."
      : "It is removed as the job's own rules say.",
    confirm: kept ? "Keep" : "No longer keep",
    act: () =>
      change("POST", pathOf(["jobs", job.job_id, "checkpoints", String(checkpoint.step), "keep"]), { kept }),
  });
