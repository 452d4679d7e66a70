// The section Add: photos, their settings, and the upload, three photos at a time.
import { byId, copy, request, run, sentenceOf, setText, sumOf, tryOn, UNREACHABLE } from "./dom.js";
import { isText, ofDrop, ofFolder } from "./files.js";
import { bytes, clock, count, inSeconds } from "./format.js";
import * as form from "./form.js";
import * as tabs from "./tabs.js";
import { cropOf, draw, watch } from "./thumbnails.js";

const AT_ONCE = 3;
//: Answers after which all uploads pause, and go on by themselves: no answer at all, and errors of a server or proxy in trouble.
const PASSING = [0, 408, 425, 429, 502, 503, 504];
//: Seconds of the first pause and of the longest; each failure in a row doubles it.
const FIRST_PAUSE_S = 1;
const LONGEST_PAUSE_S = 30;

//: Suffixes of photos that are no pictures yet, and of those that every browser shows if they are whole.
const RAW = /\.(3fr|arw|cr[23w]|dng|erf|iiq|kdc|mef|mos|mrw|nef|nrw|orf|pef|raf|raw|rw2|sr2|srf|srw|x3f)$/i;
const SHOWN = /\.(jpe?g|png|webp|gif|bmp|avif)$/i;
//: Words for the states of videos, and those that have ended.
const WORDS = { started: "is made now", deferred: "waits for others", stopped: "canceled" };
const ENDED = ["finished", "failed", "stopped", "canceled"];
const MOST_ASKED = 10_000;
//: Characters of a prompt.
const MAX_PROMPT = 5000;

//: Each: file, folder, source, last, state, settings, loaded, reason, ids, request, root, parts; `last` is the file of the last frame.
// States: chosen, waiting, sending, done, refused (the server says why), failed (the server has failed on this one).
let photos = [];
const ofState = (...states) => photos.filter((photo) => states.includes(photo.state));
let numOthers = 0;
//: The numbers of videos at which the states of the uploaded ones were asked for last.
let asked = "";
//: The pause after a failure: its timer, when it ends, why it began, and the number of failures in a row.
const pause = { timer: 0, endsAt: null, reason: "", numFailures: 0 };

export function start() {
  byId("choose-photos").addEventListener("click", () => byId("photos").click());
  byId("choose-folder").addEventListener("click", () => byId("folder-of-photos").click());
  byId("photos").addEventListener("change", (event) => {
    add([...event.target.files].map((file) => ({ file, folder: "" })));
    event.target.value = "";
  });
  byId("folder-of-photos").addEventListener("change", (event) => {
    const found = ofFolder(event.target.files);
    add(found.photos, found);
    event.target.value = "";
  });
  startDrop();
  addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (files.length) add(files.map((file) => ({ file, folder: "" })));
  });
  form.start(() => {
    showPlan();
    ofState("chosen").forEach(showCrop);
    photos.forEach((photo) => { photo.parts.prompt.hidden = !form.takesPrompt(); });
  });
  byId("add-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const chosen = ofState("chosen");
    if (!chosen.length || !form.check()) return;
    const settings = form.settings();
    const last = form.lastPhoto();
    for (const photo of chosen) {
      const prompt = form.takesPrompt() && photo.parts.prompt.value.trim();
      set(photo, "waiting", { settings: prompt ? { ...settings, prompt } : settings, sentLast: photo.last ?? last });
    }
    pump();
  });
  byId("retry-uploads").addEventListener("click", retry);
  addEventListener("online", retry);
  byId("cancel-uploads").addEventListener("click", () => {
    ofState("waiting").forEach((photo) => set(photo, "chosen"));
    ofState("sending").forEach((photo) => { photo.request.abort(); set(photo, "chosen"); });
    pause.numFailures = 0;
    endPause();
  });
  byId("undo-uploads").addEventListener("click", (event) => {
    const ids = ofState("done").flatMap((photo) => photo.newIds);
    run(event.target, byId("add-problem"), async () => {
      const problems = await tryOn("cancel", ids);
      ofState("done").filter((photo) => photo.newIds.length).forEach((photo) => {
        const numLeft = photo.newIds.filter((id) => problems[id]).length;
        const reason = numLeft === 0 ? "canceled" : numLeft === photo.newIds.length ? "not canceled" : `${photo.newIds.length - numLeft} canceled`;
        set(photo, "done", { reason, newIds: [] });
      });
      show();
      return sumOf(problems);
    });
  });
  byId("clear-uploads").addEventListener("click", () => {
    drop(ofState("chosen", "done", "refused", "failed"));
    numOthers = 0;
    show();
    byId("choose-photos").focus();
  });
  addEventListener("beforeunload", (event) => { if (ofState("waiting", "sending").length) event.preventDefault(); });
}

/** Go on at once after a failure. */
export function retry() {
  ofState("failed").forEach((photo) => set(photo, "waiting"));
  endPause();
}

/** Show what has become of the videos of uploaded photos; those that have ended cannot be canceled. */
export async function refresh({ latest, counts }) {
  const now = JSON.stringify([latest, counts]);
  const made = ofState("done").filter((photo) => photo.newIds.length);
  if (now === asked || !made.length) return;
  asked = now;
  try {
    const { states } = await request("POST", "/page/verdicts", { ids: made.flatMap((photo) => photo.newIds).slice(0, MOST_ASKED) });
    made.forEach((photo) => {
      photo.newIds.filter((id) => ENDED.includes(states[id])).forEach((id) => photo.ended.push(states[id]));
      photo.newIds = photo.newIds.filter((id) => !ENDED.includes(states[id]));
      const rest = photo.newIds.map((id) => states[id]).filter(Boolean);
      const words = [...photo.ended, ...rest].map((state) => WORDS[state] ?? state);
      const numbers = [...new Set(words)].map((word) => [words.filter((each) => each === word).length, word]);
      if (words.length) setText(photo.parts.state, words.length > 1 ? numbers.map((each) => each.join(" ")).join(", ") : words[0]);
    });
    show();
  } catch {
    asked = ""; // the next state tries again
  }
}

function endPause() {
  clearTimeout(pause.timer);
  pause.endsAt = null;
  pump();
}

/** Wait with all uploads after a failure that may pass; those that are on their way decide for themselves. */
function beginPause(photo, reason, afterS) {
  set(photo, "waiting");
  if (pause.endsAt) return;
  const delayS = Math.max(afterS || 0, Math.min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** pause.numFailures));
  pause.numFailures += 1;
  pause.reason = reason;
  pause.endsAt = inSeconds(delayS);
  pause.timer = setTimeout(endPause, delayS * 1000);
}

function startDrop() {
  let depth = 0;
  const hasFiles = (event) => [...event.dataTransfer.types].includes("Files");
  addEventListener("dragenter", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    depth += 1;
    byId("overlay").hidden = false;
  });
  addEventListener("dragover", (event) => { if (hasFiles(event)) event.preventDefault(); });
  addEventListener("dragleave", () => {
    depth = Math.max(0, depth - 1);
    byId("overlay").hidden = depth === 0;
  });
  addEventListener("drop", async (event) => {
    depth = 0;
    byId("overlay").hidden = true;
    if (!hasFiles(event)) return;
    event.preventDefault();
    document.querySelectorAll("dialog[open]").forEach((dialog) => dialog.close());
    const found = await ofDrop(event.dataTransfer);
    add(found.photos, found);
    tabs.show("add");
    byId("add").scrollIntoView();
  });
}

const stemOf = ({ file, folder }) => `${folder}/${file.name.replace(/\.[^.]*$/, "")}`;

/** Add photos; a text beside a photo is its prompt. */
function add(found, { texts = [], numOthers: others = 0 } = {}) {
  const key = ({ file, folder }) => `${folder}/${file.name} ${file.size} ${file.lastModified}`;
  const known = new Set(ofState("chosen", "waiting", "sending").map(key));
  const stems = new Set([...found, ...photos].filter(({ file }) => !isText(file.name)).map(stemOf));
  const isPrompt = (each) => isText(each.file.name) && stems.has(stemOf(each));
  const prompts = [...found.filter(isPrompt), ...texts.filter(isPrompt)];
  const fresh = [];
  for (const { file, folder, source = "" } of found.filter((photo) => !known.has(key(photo)) && !isPrompt(photo))) {
    const photo = { file, folder, source, ...copy("upload-template"), newIds: [] };
    setText(photo.parts.name, folder ? `${folder}/${file.name}` : file.name);
    photo.parts.remove.setAttribute("aria-label", `Remove ${file.name}`);
    photo.parts.remove.addEventListener("click", () => { drop([photo]); show(); byId("upload-list").focus(); });
    photo.parts.prompt.setAttribute("aria-label", `Prompt of ${file.name}`);
    photo.parts.prompt.hidden = !form.takesPrompt();
    if (RAW.test(file.name)) set(photo, "refused", { reason: "a RAW photo: export it as JPEG" });
    else set(photo, "chosen");
    watch(photo, showCrop, () => {
      if (photo.state !== "chosen" || !SHOWN.test(file.name)) return;
      photo.isBad = true;
      showCrop(photo);
      show();
    });
    fresh.push(photo);
  }
  photos.push(...fresh);
  byId("upload-list").append(...fresh.map((photo) => photo.root));
  makePairs();
  numOthers += others + texts.length - texts.filter(isPrompt).length;
  prompts.forEach(readPrompt);
  show();
  // Those of earlier uploads may fill the list.
  const [first] = fresh.filter((photo) => photo.root.isConnected);
  if (first) byId("upload-list").scrollTop = first.root.offsetTop - byId("upload-list").offsetTop;
}

async function readPrompt(given) {
  const text = (await given.file.text()).trim().slice(0, MAX_PROMPT);
  photos.filter((photo) => stemOf(photo) === stemOf(given)).forEach((photo) => { photo.parts.prompt.value = text; });
  showPlan();
}

/** Make `cup.last.jpg` the last frame of `cup.jpg` where both are chosen, as `svdq submit` does. */
function makePairs() {
  const firsts = new Map(ofState("chosen").map((photo) => [`${stemOf(photo)}.last`, photo]));
  for (const photo of ofState("chosen")) {
    const first = firsts.get(stemOf(photo).replace(/\.last$/i, ".last"));
    if (!first || first.last) continue;
    first.last = photo.file;
    setText(first.parts.name, `${first.parts.name.textContent} → ${photo.file.name}`);
    drop([photo]);
  }
}

function drop(gone) {
  gone.forEach((photo) => photo.root.remove());
  photos = photos.filter((photo) => !gone.includes(photo));
}

function set(photo, state, more = {}) {
  Object.assign(photo, { state, reason: "", loaded: 0 }, more);
  photo.root.className = `is-${state}`;
  photo.parts.remove.hidden = !["chosen", "refused", "failed"].includes(state);
  const words = { chosen: bytes(photo.file.size), waiting: "waits", sending: "uploading", done: photo.reason };
  setText(photo.parts.state, words[state] ?? photo.reason);
}

/** Draw what a crop removes of a photo, and say so while it can be changed. */
function showCrop(photo) {
  const target = form.cropSize();
  draw(photo, target);
  if (photo.state !== "chosen") return;
  photo.root.classList.toggle("is-bad", Boolean(photo.isBad));
  setText(photo.parts.state, [bytes(photo.file.size), photo.isBad && "cannot be read", cropOf(photo, target)].filter(Boolean).join(" · "));
}

/** Send the next photos: after a failure one, and as many as may be when it has arrived. */
function pump() {
  const limit = pause.endsAt ? 0 : pause.numFailures ? 1 : AT_ONCE;
  for (const photo of ofState("waiting").slice(0, Math.max(0, limit - ofState("sending").length))) send(photo);
  show();
}

function send(photo) {
  const body = new FormData();
  const own = { below: photo.folder, source: photo.source, file_name: photo.file.name };
  for (const [name, value] of Object.entries({ ...photo.settings, ...own })) if (value) body.append(name, value);
  // Last: the server reads the settings before the photos.
  body.append("input_reference", photo.file, photo.file.name);
  if (photo.sentLast) body.append("last_reference", photo.sentLast, photo.sentLast.name);
  const request = new XMLHttpRequest();
  request.open("POST", "/page/photos");
  request.upload.onprogress = (event) => {
    photo.loaded = event.lengthComputable ? event.loaded / event.total : 0;
    setText(photo.parts.state, photo.loaded < 1 ? `${Math.floor(photo.loaded * 100)} %` : "is being checked");
    showProgress();
  };
  request.onerror = () => { beginPause(photo, UNREACHABLE); pump(); };
  request.onload = () => {
    if (request.status === 200) {
      pause.numFailures = 0;
      const jobs = JSON.parse(request.responseText).jobs;
      const fresh = jobs.filter((job) => job.is_new);
      set(photo, "done", {
        newIds: fresh.map((job) => job.id),
        ended: [],
        // Its thumbnail has shown the crop, unless the browser cannot show such a photo.
        reason: fresh.length ? [photo.settings.at ? "scheduled" : "queued", !photo.bitmap && jobs[0].warning].filter(Boolean).join("; ") :
          `exists already, ${jobs[0].status}`,
      });
    } else {
      if (request.status === 401) location.reload();
      const reason = sentenceOf(request.status, request.responseText);
      if (PASSING.includes(request.status)) beginPause(photo, reason, Number.parseInt(request.getResponseHeader("Retry-After"), 10));
      else set(photo, request.status < 500 ? "refused" : "failed", { reason });
    }
    pump();
  };
  set(photo, "sending", { request });
  request.send(body);
}

function showProgress() {
  const active = photos.filter((photo) => photo.settings);
  const done = active.reduce((sum, photo) => sum + (photo.state === "sending" ? photo.loaded * 0.95 : photo.state === "waiting" ? 0 : 1), 0);
  const bar = byId("upload-progress");
  bar.hidden = !ofState("waiting", "sending").length;
  bar.max = Math.max(1, active.length);
  bar.value = done;
}

function show() {
  const numBad = ofState("chosen").filter((photo) => photo.isBad).length;
  const number = Object.fromEntries(["chosen", "waiting", "sending", "done", "refused", "failed"].map((state) => [state, ofState(state).length]));
  byId("uploads").hidden = !photos.length && !numOthers;
  const words = [
    number.chosen - numBad && `${count(number.chosen - numBad, "photo")} chosen`,
    numBad && `${count(numBad, "photo")} cannot be read`,
    number.waiting + number.sending && `${(number.waiting + number.sending).toLocaleString()} to upload`,
    number.done && `${number.done.toLocaleString()} uploaded`,
    number.refused && `${number.refused.toLocaleString()} refused`,
    number.failed && `${number.failed.toLocaleString()} failed`,
    numOthers && `${count(numOthers, "other file")} left out`,
  ].filter(Boolean);
  const why = pause.endsAt && `${pause.reason} Trying again at ${clock(pause.endsAt, new Date(), true)}.`;
  setText(byId("upload-summary"), [`${words.join(", ")}.`, why].filter(Boolean).join(" "));
  const numNew = ofState("done").reduce((sum, photo) => sum + photo.newIds.length, 0);
  const isBusy = number.waiting + number.sending > 0;
  byId("retry-uploads").hidden = !number.failed && !pause.endsAt;
  setText(byId("retry-uploads"), pause.endsAt ? "Try again now" : `Try again (${number.failed.toLocaleString()})`);
  byId("cancel-uploads").hidden = !isBusy;
  byId("undo-uploads").hidden = isBusy || !numNew;
  setText(byId("undo-uploads"), numNew === 1 ? "Cancel this video" : `Cancel these ${count(numNew, "video")}`);
  byId("clear-uploads").hidden = isBusy;
  byId("make").disabled = !number.chosen;
  showProgress();
  showPlan();
}

/** Show what is to be made of the chosen photos, or how far the upload is, in the line that stays in sight. */
function showPlan() {
  const good = ofState("chosen").filter((photo) => !photo.isBad);
  const sent = photos.filter((photo) => photo.settings);
  const numLeft = ofState("waiting", "sending").length;
  const ends = [["done", "uploaded"], ["refused", "refused"], ["failed", "failed"]];
  const ended = ends.map(([state, word]) => [sent.filter((photo) => photo.state === state).length, word])
    .filter(([number]) => number).map(([number, word]) => `${number.toLocaleString()} ${word}`).join(", ");
  const uploaded = numLeft ? `Uploading ${count(numLeft, "photo")}…${ended && ` ${ended}`}` : ended && `${ended}.`;
  form.plan(good.length, good.filter((photo) => !photo.parts.prompt.value.trim()).length, uploaded);
}
