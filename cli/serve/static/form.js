// The settings of the videos to make: what differs from the defaults, and their number and expected end.
import { byId, request, setText } from "./dom.js";
import { bytes, clock, count, duration, inSeconds } from "./format.js";
import * as presets from "./presets.js";

const WAIT_MS = 300;

const form = byId("add-form");
const family = () => form.querySelector(".family:not([hidden])");
/** The fields that count: of all families, and of the chosen one. */
const own = (selector) => [...form.querySelectorAll(selector)].filter((field) => !field.closest(".family[hidden]"));
let timer = 0;
let asked = new AbortController();
let planned = "";
//: The families of the models that run, null for any, by the names of the models.
let models = {};

/** The settings that differ from the defaults, by name, as text. */
export function settings() {
  const found = { family: family().dataset.family };
  own("[name][data-default]").forEach((field) => {
    if (field.value.trim() !== field.dataset.default && field.value.trim() !== "") found[field.name] = field.value.trim();
  });
  own("[data-checks]").forEach((group) => {
    const chosen = [...group.querySelectorAll("input:checked")].map((box) => box.value).join(" ");
    if (chosen && chosen !== group.dataset.default) found[group.dataset.checks] = chosen;
  });
  if (shape() !== "other") {
    delete found.width;
    delete found.height;
    found.size = shape();
  }
  if (byId("start").value === "at") found.at = startsAt().toISOString();
  return found;
}

/** The photo of the last frame, for the photos that have none of their own. */
export const lastPhoto = () => own(".last-photo")[0]?.files[0];

/** The chosen shape and size: `auto`, `auto:` and a size, a size such as 1024x576, or `other` for the fields. */
const shape = () => own(".shape")[0].value;

/** Whether the chosen model takes prompts. */
export const takesPrompt = () => own('[name="prompt"]').length > 0;

/** Number of videos of each photo. */
export const variations = () => Math.max(1, Number.parseInt(byId("variations").value, 10) || 1);

/** The size that photos are cropped to, [width, height]; null if nothing is cropped, or the model decides. */
export function cropSize() {
  const valueOf = (name) => own(`[name="${name}"]`)[0]?.value ?? "";
  const size = shape() === "other" ? [Number(valueOf("width")), Number(valueOf("height"))] : shape().split("x").map(Number);
  return valueOf("fit") === "crop" && size.every((side) => side > 0) ? size : null;
}

/** Whether every field has an allowed value; shows the first that does not. */
export function check() {
  for (const field of own("input, select, textarea")) {
    if (!field.closest("[hidden]") && !field.checkValidity()) {
      const closed = field.closest("details:not([open])");
      if (closed) closed.open = true;
      field.reportValidity();
      return false;
    }
  }
  return true;
}

/** The next such time of day where the reader is. */
function startsAt() {
  const [hours, minutes] = (byId("at").value || "22:00").split(":").map(Number);
  const moment = new Date();
  moment.setHours(hours, minutes, 0, 0);
  if (moment <= new Date()) moment.setDate(moment.getDate() + 1);
  return moment;
}

/**
 * Show the number of videos, how many photos have no prompt of their own, and when the videos will be done, as soon as
 * nothing changes any more; without photos, what is uploaded.
 */
export function plan(numPhotos, numUnprompted, uploaded) {
  const line = byId("plan");
  // What is uploaded is also said above the list, which screen readers announce.
  line.ariaLive = numPhotos || !uploaded ? "polite" : "off";
  if (!numPhotos) setText(line, uploaded || "No photos are chosen.");
  const numVideos = numPhotos * variations();
  const { folder: _folder, variations: _variations, ...wanted } = settings();
  const query = `${new URLSearchParams({ ...wanted, num_videos: String(numVideos) })}`;
  const rest = takesPrompt() && !wanted.prompt ? unprompted(numUnprompted) : "";
  // A text that changed while a button is pressed would move it away.
  if (`${query} ${rest}` === planned) return;
  planned = `${query} ${rest}`;
  clearTimeout(timer);
  asked.abort();
  setText(byId("add-problem"), "");
  if (!numPhotos) return;
  const sum = sumOf(numPhotos, numVideos);
  setText(line, [sum, rest].filter(Boolean).join(" "));
  timer = setTimeout(() => estimate(query, sum, rest), WAIT_MS);
}

const unprompted = (number) => (number === 0 ? "" : `${count(number, "photo")} ${number === 1 ? "has no prompt; it" : "have no prompt; they"} will move at random.`);

function sumOf(numPhotos, numVideos) {
  const photos = count(numPhotos, "photo");
  return numVideos === numPhotos ? `${photos}, ${count(numVideos, "video")}.` :
    `${photos} × ${variations().toLocaleString()} = ${count(numVideos, "video")}.`;
}

async function estimate(query, sum, rest) {
  asked = new AbortController();
  try {
    const found = await request("GET", `/page/estimate?${query}`, undefined, { signal: asked.signal });
    const end = found.eta_s === null ? `Their end is not known: ${found.reason}` :
      `Done about ${clock(inSeconds(found.eta_s))} (in ${duration(found.eta_s)}${found.reason && " by published times"}).`;
    setText(byId("plan"), [sum, end, found.bytes && `About ${bytes(found.bytes)} on the disk.`, rest].filter(Boolean).join(" "));
  } catch (error) {
    if (error.name === "AbortError") return;
    planned = ""; // the next change asks again
    if (error.status) setText(byId("add-problem"), error.message);
  }
}

const fields = () => [...form.querySelectorAll("input:not([type=file]), select, textarea")].filter((field) => !field.closest(".uploads, .presets"));
const keyOf = (field) => field.id || `${field.closest(".family").dataset.family} ${field.value}`;

const all = () => Object.fromEntries(fields().map((field) => [keyOf(field), field.type === "checkbox" ? field.checked : field.value]));

/** Keep the settings of this tab, so that they survive a reload. */
function save() {
  sessionStorage.setItem("settings", JSON.stringify(all()));
}

function restore(saved) {
  for (const field of fields().filter((each) => keyOf(each) in saved)) {
    const value = saved[keyOf(field)];
    if (field.type === "checkbox") field.checked = value;
    else if (field.type !== "select-one" || [...field.options].some((option) => option.value === value)) field.value = value;
  }
}

/** Fill in the parameters of a video; the seed is left open, since it is for another photo. */
export function use(parameters) {
  if (![...byId("family").options].some((option) => option.value === parameters.family)) return;
  byId("family").value = parameters.family;
  byId("model").value = "";
  showParts();
  const size = `${parameters.width}x${parameters.height}`;
  const known = [...own(".shape")[0].options].some((option) => option.value === size);
  own(".shape")[0].value = known ? size : "other";
  for (const field of own("[name][data-default]").filter((each) => each.name in parameters)) {
    const value = parameters[field.name];
    field.value = field.name === "seed" ? "" : value === true ? "yes" : value === false ? "no" : value ?? "";
  }
  own("[data-checks] input").forEach((box) => { box.checked = parameters.formats.includes(box.value); });
  form.dispatchEvent(new Event("change"));
}

function showParts() {
  form.querySelectorAll(".family").forEach((part) => {
    part.querySelectorAll(".side").forEach((side) => { side.hidden = part.querySelector(".shape").value !== "other"; });
  });
  byId("at-field").hidden = byId("start").value !== "at";
  form.querySelectorAll(".family").forEach((part) => { part.hidden = part.dataset.family !== byId("family").value; });
  if (Object.keys(models).length) offerModels();
}

/** Offer the models of the chosen family where several run; the one that was chosen stays if it does. */
function offerModels() {
  const select = byId("model");
  const found = Object.keys(models).filter((name) => [null, family().dataset.family].includes(models[name])).sort();
  const names = found.length > 1 ? found : [];
  byId("model-field").hidden = !names.length;
  if ([...select.options].map((option) => option.value).join("\n") === ["", ...names].join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(new Option("any", ""), ...names.map((name) => new Option(name, name)));
  select.value = names.includes(chosen) ? chosen : "";
  form.dispatchEvent(new Event("change"));
}

/** Offer the families of the models that run, the first one if the chosen one does not; without workers nothing changes. */
export function offer(state) {
  const names = state.families;
  for (const option of [...byId("model").options].filter(({ value }) => value)) {
    setText(option, names.length ? option.value : `${option.value} (no worker runs it)`);
  }
  if (!names.length) return;
  ({ models } = state);
  offerModels();
  const select = byId("family");
  const isGone = !names.includes(select.value);
  for (const option of select.options) option.hidden = option.disabled = !names.includes(option.value);
  byId("family-field").hidden = names.length < 2;
  if (!isGone) return;
  [select.value] = names;
  select.dispatchEvent(new Event("change", { bubbles: true }));
  setText(byId("add-problem"), `The workers make videos with ${select.selectedOptions[0].text}; these are its settings.`);
}

/** Call `onChange` whenever a setting changes. */
export function start(onChange) {
  restore(JSON.parse(sessionStorage.getItem("settings") ?? "{}"));
  showParts();
  presets.start(all, (settings) => {
    restore(settings);
    form.dispatchEvent(new Event("change"));
  });
  form.addEventListener("input", () => {
    save();
    onChange();
  });
  form.addEventListener("change", () => {
    showParts();
    save();
    onChange();
  });
  form.querySelectorAll(".reset").forEach((button) => button.addEventListener("click", () => {
    const part = button.closest(".family");
    part.querySelectorAll("[name]").forEach((field) => { field.value = field.dataset.default; });
    part.querySelector(".shape").value = part.querySelector(".shape").dataset.default;
    showParts();
    part.querySelectorAll("[data-checks]").forEach((group) => {
      const chosen = group.dataset.default.split(" ");
      group.querySelectorAll("input").forEach((box) => { box.checked = chosen.includes(box.value); });
    });
    save();
    onChange();
  }));
}
