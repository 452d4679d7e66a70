// A message at the bottom of the page about what has happened, with ten seconds to take it back.
import { byId, setText } from "./dom.js";

const SHOWN_MS = 10_000;
const NEWS_MS = 500;

let timer = 0;
let last = {};

export function start() {
  byId("toast-button").addEventListener("click", undo);
  addEventListener("pagehide", finish);
  addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() === "u" && last.undo && !event.ctrlKey && !event.metaKey && !event.target.matches?.("textarea, select, input:not([type=checkbox])")) undo();
  });
}

/** Show a sentence. `undo` takes the action back; `commit` does it when the time is over, or at the next action. */
export function toast(words, { undo: takeBack = null, commit = null, label = "Undo" } = {}) {
  finish();
  last = { undo: takeBack, commit };
  setText(byId("toast-words"), words);
  setText(byId("toast-button"), label);
  byId("toast-button").hidden = !takeBack;
  byId("toast").classList.add("is-shown");
  timer = setTimeout(finish, SHOWN_MS);
}

/** Show a sentence as soon as nothing is left to take back. */
export function news(words, options) {
  if (last.undo || last.commit) setTimeout(() => news(words, options), NEWS_MS);
  else toast(words, options);
}

function undo() {
  const takeBack = last.undo;
  last = {};
  finish();
  takeBack?.();
}

/** End the time to take the last action back; returns what its commit returns. */
export function finish() {
  clearTimeout(timer);
  const { commit } = last;
  last = {};
  byId("toast").classList.remove("is-shown");
  if (document.activeElement === byId("toast-button")) byId("toast-button").blur();
  return commit?.();
}
