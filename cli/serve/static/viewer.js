// The dialog with one video: play it large, keep or reject it, make it again, see how it was made.
import * as address from "./address.js";
import { byId, request, run, setText } from "./dom.js";
import * as form from "./form.js";
import { clock, duration, label, value } from "./format.js";
import { contentOf, isCalm, mediaOf, photoOf } from "./media.js";
import * as tabs from "./tabs.js";

const dialog = byId("viewer");
const status = byId("viewer-status");
//: Pixels of a finger's way that go to another video.
const SWIPE = 60;
let shown = null;
let media = null;
let actions = null;

export function start() {
  dialog.querySelector("[data-close]").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    byId("viewer-stage").replaceChildren();
    media = null;
    if (!address.get("video")) return; // it was closed by the browser's Back
    if (history.state?.isOurs) history.back();
    else address.put({ video: "" });
  });
  byId("viewer-before").addEventListener("click", () => go(-1));
  byId("viewer-next").addEventListener("click", () => go(1));
  byId("viewer-keep").addEventListener("click", (event) => verdict(event.target, "keep"));
  byId("viewer-reject").addEventListener("click", (event) => verdict(event.target, "reject"));
  byId("viewer-again").addEventListener("click", (event) => run(event.target, status, () => againWithNewSeed(shown)));
  byId("viewer-use").addEventListener("click", () => {
    form.use(shown.parameters);
    dialog.close();
    tabs.show("add");
    byId("add").scrollIntoView();
  });
  byId("viewer-delete").addEventListener("click", () => {
    const other = actions.neighbor(1) ?? actions.neighbor(-1);
    actions.erase();
    if (other) other.click();
    else dialog.close();
  });
  byId("viewer-photo").addEventListener("error", () => { byId("viewer-photo").parentElement.hidden = true; });
  startSwipe();
  byId("change-name").addEventListener("change", showValue);
  byId("change-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const name = byId("change-name").value;
    if (!byId("change-value").value.trim()) {
      byId("change-value").focus();
      return;
    }
    run(event.submitter, status, () => repeat(shown, { [name]: byId("change-value").value.trim() }));
  });
  dialog.addEventListener("keydown", (event) => {
    if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.matches("video") && event.key.startsWith("Arrow")) return; // it seeks
    const action = {
      ArrowLeft: () => go(-1), ArrowRight: () => go(1), k: () => verdictAndGo("keep"), r: () => verdictAndGo("reject"),
      " ": event.target.matches("button, a, video, summary") ? null : () => media?.toggle(),
    }[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (action) {
      action();
      event.preventDefault();
    }
  });
}

/** Show a result; `doing.neighbor(step)` is the button of another one, `doing.mark(verdict)` keeps or rejects. */
export function open(result, doing) {
  shown = result;
  actions = doing;
  setText(byId("viewer-title"), result.name);
  setText(status, "");
  showStage(result);
  const isFinished = result.status === "finished";
  setText(byId("viewer-about"), [
    result.ended_at && `${result.status === "stopped" ? "canceled" : result.status} ${clock(new Date(result.ended_at))}`,
    result.duration_s !== null && `made in ${duration(result.duration_s)}`, result.size, result.notice, result.error,
  ].filter(Boolean).join(" · "));
  const download = byId("viewer-download");
  download.hidden = !(isFinished && result.is_there);
  download.href = contentOf(result);
  byId("viewer-keep").hidden = byId("viewer-reject").hidden = !isFinished;
  showMark();
  byId("viewer-before").disabled = !doing.neighbor(-1);
  byId("viewer-next").disabled = !doing.neighbor(1);
  const parameters = Object.entries(result.parameters).filter(([name]) => name !== "model");
  const made = [["photo", result.photo_name], ["model", result.model], ["job", result.id], ...parameters];
  byId("viewer-made").replaceChildren(...made.filter(([, given]) => given !== "").flatMap(([name, given]) => [
    Object.assign(document.createElement("dt"), { textContent: label(name) }),
    Object.assign(document.createElement("dd"), { textContent: value(given) }),
  ]));
  const names = Object.keys(result.parameters).filter((name) => name !== "family");
  byId("change-name").replaceChildren(...names.map((name) => new Option(label(name), name)));
  showValue();
  if (address.get("video") !== result.id) address.put({ video: result.id }, !dialog.open);
  if (!dialog.open) dialog.showModal();
}

function showStage(result) {
  const stage = byId("viewer-stage");
  media = null;
  stage.replaceChildren();
  byId("viewer-photo").parentElement.hidden = false;
  byId("viewer-photo").src = photoOf(result.id);
  if (result.status !== "finished" || !result.is_there) {
    stage.replaceChildren(Object.assign(document.createElement("p"), {
      textContent: result.status === "finished" ? "Its files were removed." : "There is no video." }));
    return;
  }
  media = mediaOf(result);
  if (result.kind === "mp4") {
    Object.assign(media.element, { controls: true, muted: localStorage.getItem("with-sound") !== "yes" });
    media.element.addEventListener("volumechange", ({ target }) => localStorage.setItem("with-sound", target.muted ? "" : "yes"));
  }
  if (result.kind === "mp4") media.element.setAttribute("aria-label", result.name);
  else media.element.alt = result.name;
  stage.prepend(media.element);
  media.load();
  if (!isCalm()) media.play();
  else if (result.kind === "gif" || result.kind === "webp") {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: "Play" });
    button.addEventListener("click", () => { media.play(); button.remove(); });
    stage.append(button);
  }
}

function showMark() {
  byId("viewer-keep").ariaPressed = String(shown.mark === "keep");
  byId("viewer-reject").ariaPressed = String(shown.mark === "reject");
}

async function verdict(button, word) {
  if (shown.status !== "finished") return;
  await run(button, status, () => actions.mark(word));
  showMark();
}

/** Mark the video by a key, unless it has this verdict, and go to the next one. */
async function verdictAndGo(word) {
  if (shown.mark !== word) await verdict(null, word);
  if (shown.status === "finished") go(1);
}

/** Go to another video by a finger that moves sideways over this one. */
function startSwipe() {
  let begun = null;
  const stage = byId("viewer-stage");
  stage.addEventListener("touchstart", ({ touches }) => { begun = touches.length === 1 ? touches[0] : null; }, { passive: true });
  stage.addEventListener("touchend", ({ changedTouches: [ended] }) => {
    const [x, y] = begun ? [ended.clientX - begun.clientX, ended.clientY - begun.clientY] : [0, 0];
    if (Math.abs(x) > SWIPE && Math.abs(x) > 2 * Math.abs(y)) go(x < 0 ? 1 : -1);
  });
}

function go(step) {
  actions.neighbor(step)?.click();
  dialog.focus();
}

function showValue() {
  const given = shown.parameters[byId("change-name").value];
  byId("change-value").value = Array.isArray(given) ? given.join(" ") : given ?? "";
}

/** Make a video again with changed values; returns a sentence. */
async function repeat(result, changes) {
  const job = await request("POST", "/page/repeat", { id: result.id, changes });
  return job.is_new ? "Queued." : `Exists already: it is ${job.status}.`;
}

export const againWithNewSeed = (result) => repeat(result, {});
