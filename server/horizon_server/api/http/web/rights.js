/** What the caller may do: a button is not there, or says why it does nothing. The daemon decides in the end. */
import { hasEnded } from "./format.js";

/** Whether the caller may change anything at all. */
export const mayCreate = (me) => !!me && me.may_change;

/** Why the caller may not change a job, or nothing. */
export function whyNotChange(me, job) {
  if (!me) return "Not signed in";
  if (me.scope !== "full") return "Your token allows no changes";
  if (me.role === "viewer") return "Viewers may look but not change";
  const isProjectAdmin = me.projects?.some?.((one) => one.name === job.project && one.role === "admin");
  if (me.role === "admin" || me.name === job.owner || isProjectAdmin) return "";
  return `Only ${job.owner}, an admin of project ${job.project}, or an admin may change this job`;
}

/** Why a job cannot be paused, resumed or cancelled as it is, or nothing. */
export function whyNotNow(action, job) {
  const word = job.state.toLowerCase();
  if (action === "cancel") return hasEnded(job.state) ? `It has ended: ${word}` : "";
  if (action === "pause")
    return hasEnded(job.state) || ["PAUSED", "STOPPING"].includes(job.state) ? `It is ${word}` : "";
  if (action === "resume") return ["PAUSED", "FAILED"].includes(job.state) ? "" : `It is ${word}`;
  if (action === "priority") return hasEnded(job.state) ? `It has ended: ${word}` : "";
  return "";
}
