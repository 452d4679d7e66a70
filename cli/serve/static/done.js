// Says when a batch is done: a message on the page and, for a page that is hidden, a notification of the browser.
import { request } from "./dom.js";
import { count } from "./format.js";
import { news } from "./toast.js";

// Browsers slow the timers of hidden pages down to one a minute.
const ASK_MS = 20_000;

//: The counts of ended videos when the batch began; null while nothing is made.
let begun = null;
const canNotify = () => "Notification" in window;

export function start() {
  setInterval(async () => {
    // A hidden page has no connection.
    if (!document.hidden || !begun || !canNotify() || Notification.permission !== "granted") return;
    await request("GET", "/page/left").then(watch, () => {});
  }, ASK_MS);
}

/** Compare the numbers of videos with those before. */
export function watch({ counts }) {
  const numLeft = counts.queued + counts.started;
  if (numLeft) begun ??= counts;
  if (numLeft || !begun) return;
  const since = (status) => Math.max(0, counts[status] - begun[status]);
  const [numFinished, numFailed] = [since("finished"), since("failed")];
  begun = null;
  if (!numFinished && !numFailed) return; // canceled by somebody who knows
  const words = [`All done: ${count(numFinished, "video")}`, numFailed && `${numFailed.toLocaleString()} failed`].filter(Boolean).join(", ");
  if (document.hidden && canNotify() && Notification.permission === "granted") {
    const shown = new Notification("svdq", { body: `${words}.`, icon: document.querySelector("link[rel=icon]").href });
    shown.addEventListener("click", () => { window.focus(); shown.close(); });
  }
  const isAsked = localStorage.getItem("asked-to-notify") || !canNotify() || Notification.permission !== "default";
  localStorage.setItem("asked-to-notify", "yes");
  news(`${words}.`, isAsked ? {} : { undo: () => Notification.requestPermission(), label: "Notify me next time" });
}
