// A message at the bottom of the page about what has happened, with ten seconds to take it back.
import { byId, setText } from "./dom.js";

const SHOWN_MS = 10_000;
const NEWS_MS = 500;

let timer = 0;
let last = {};
//: What can be taken back after that, the latest last, as long as a message is shown.
let earlier = [];

export function start() {
  byId("toast-button").addEventListener("click", undo);
  addEventListener("pagehide", finish);
  addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() === "u" && last.undo && !event.ctrlKey && !event.metaKey && !event.target.matches?.("textarea, select, input:not([type=checkbox])")) undo();
  });
}

/** Show a sentence. `undo` takes the action back; `commit` does it when the time is over, or at the next action. */
export function toast(words, { undo: takeBack = null, commit = null, label = "Undo" } = {}) {
  const known = last.undo && !last.commit && takeBack ? [...earlier, last] : [];
  finish();
  earlier = known;
  show({ words, undo: takeBack, commit, label });
}

function show(message) {
  last = message;
  setText(byId("toast-words"), message.words);
  setText(byId("toast-button"), message.label);
  byId("toast-button").hidden = !message.undo;
  byId("toast").classList.add("is-shown");
  timer = setTimeout(finish, SHOWN_MS);
}

/** Show a sentence as soon as nothing is left to take back. */
export function news(words, options) {
  if (last.undo || last.commit) setTimeout(() => news(words, options), NEWS_MS);
  else toast(words, options);
}

/** Take the last action back, and offer the one before it. */
function undo() {
  const { undo: takeBack } = last;
  const before = earlier.pop();
  const rest = earlier;
  last = {};
  finish();
  takeBack?.();
  if (!before) return;
  earlier = rest;
  show(before);
}

/** End the time to take actions back; returns what the commit of the last one returns. */
export function finish() {
  clearTimeout(timer);
  const { commit } = last;
  last = {};
  earlier = [];
  byId("toast").classList.remove("is-shown");
  if (document.activeElement === byId("toast-button")) byId("toast-button").blur();
  return commit?.();
}
