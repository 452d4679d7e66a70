// The section Results: a grid that loads as it is scrolled, plays on hover and focus, and takes the verdicts.
import * as address from "./address.js";
import { compare } from "./compare.js";
import { act, byId, copy, request, run, setText, sumOf, tryOn } from "./dom.js";
import { clock, count } from "./format.js";
import { isCalm, mediaOf } from "./media.js";
import { againWithNewSeed, open } from "./viewer.js";

const MAX_COMPARED = 4;
const list = byId("cards");
const problem = byId("results-problem");

//: Cards by job id, newest first: result, root, parts, media.
let cards = new Map();
let next = null;
let isLoading = false;
let generation = 0;
let latest = null;
//: The card that plays and takes the keys: the one that was pointed at or focused last.
let current = null;
//: Whether the pointer counts: after a step of the keyboard, cards that scroll below a resting pointer do not.
let isPointing = false;
//: What the reader has pointed at, focused or typed into last.
let place = null;
//: Whether newer results wait behind the button until the reader is done.
let isBehind = false;

//: The selected results by id, also such as have no card yet; `isAll` if all that match were asked for.
const selected = new Map();
let isAll = false;
const picked = () => [...selected.values()];
const inOrder = () => [...list.querySelectorAll(".card")].map((root) => cards.get(root.dataset.id));

// Pictures are loaded shortly before they are seen, and videos let go when they are far away again.
const near = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const media = cards.get(entry.target.dataset.id)?.media;
    if (entry.isIntersecting) media?.load();
    else media?.unload();
  }
}, { rootMargin: "600px" });

export function start() {
  byId("show").addEventListener("change", () => { address.put({ show: byId("show").value === "open" ? "" : byId("show").value }); reload(); });
  byId("by-photo").addEventListener("change", () => { address.put({ grouped: byId("by-photo").checked ? "yes" : "" }); arrange(); });
  addEventListener("popstate", follow);
  byId("new-results").addEventListener("click", async () => {
    await update(true);
    byId("results").scrollIntoView();
    list.querySelector(".frame")?.focus({ preventScroll: true });
  });
  byId("pick-results").addEventListener("change", (event) => {
    run(null, problem, () => (event.target.checked ? pickAll() : pickNone()));
  });
  byId("keep-results").addEventListener("click", (event) => run(event.target, problem, () => mark(picked(), "keep")));
  byId("reject-results").addEventListener("click", (event) => run(event.target, problem, () => mark(picked(), "reject")));
  byId("compare-results").addEventListener("click", () => compare(inOrder().map((card) => card.result).filter((result) => selected.has(result.id))));
  byId("retry-results").addEventListener("click", (event) => run(event.target, problem, () => retry(unfinished(picked()))));
  byId("zip-results").addEventListener("click", () => {
    byId("zip-ids").value = finished(picked()).map((result) => result.id).join(",");
    byId("zip-form").submit();
  });
  document.addEventListener("keydown", onKey);
  followReader();
  new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) more();
  }, { rootMargin: "800px" }).observe(byId("results-end"));
  setFilter(address.get("show"));
  byId("by-photo").checked = address.get("grouped") === "yes";
  reload();
  follow();
}

function setFilter(name) {
  const isKnown = [...byId("show").options].some((option) => option.value === name);
  byId("show").value = isKnown ? name : "open";
}

/** Show what the address says: at the start, and after the browser's Back and Forward. */
async function follow() {
  const id = address.get("video");
  const viewer = byId("viewer");
  if (!id && viewer.open) viewer.close();
  if (!id || viewer.open) return;
  try {
    const result = cards.get(id)?.result ?? await request("GET", `/page/results/${encodeURIComponent(id)}`);
    if (address.get("video") === id) show(result);
  } catch (error) {
    setText(problem, error.message);
    address.put({ video: "" });
  }
}

/** Open a result in the viewer. */
function show(result) {
  const { id } = result;
  open(result, { neighbor: (step) => (cards.has(id) ? neighbor(id, step) : null), mark: (verdict) => mark([cards.get(id)?.result ?? result], verdict) });
}

const finished = (some) => some.filter((result) => result.status === "finished");
const unfinished = (some) => some.filter((result) => result.status !== "finished");

function pageOf(before, more = {}) {
  const asked = new URLSearchParams({ show: byId("show").value, ...(before && { before }), ...more });
  return request("GET", `/page/results?${asked}`);
}

/** Select all results that match, also those that are not loaded. */
async function pickAll() {
  const mine = generation;
  for (let before = ""; before !== null && mine === generation;) {
    const page = await pageOf(before, { brief: "yes" });
    page.results.forEach((result) => selected.set(result.id, cards.get(result.id)?.result ?? result));
    before = page.next;
  }
  if (mine !== generation) pickNone();
  isAll = selected.size > 0;
  cards.forEach((card) => { card.parts.pick.checked = selected.has(card.result.id); });
  showPicked();
}

function pickNone() {
  selected.clear();
  isAll = false;
  cards.forEach((card) => { card.parts.pick.checked = false; });
  showPicked();
}

/** Load the first page again. */
export async function reload() {
  generation += 1;
  isLoading = false;
  next = "";
  choose(null);
  cards = new Map();
  list.replaceChildren();
  pickNone();
  showBehind(0);
  await more();
}

/** Load the next page, and one more as long as the end of the list is in sight. */
async function more() {
  if (isLoading || next === null) return;
  isLoading = true;
  const mine = generation;
  try {
    const page = await pageOf(next);
    if (mine !== generation) return;
    setText(problem, "");
    page.results.forEach((result) => { if (!cards.has(result.id)) cards.set(result.id, newCard(result)); });
    next = page.next;
    arrange();
  } catch (error) {
    if (mine !== generation) return;
    setText(problem, error.message);
    next = next || ""; // a scroll or the connection's return tries again
  }
  isLoading = false;
  const end = byId("results-end");
  setText(end, next !== null ? "Loading…" : cards.size ? "" : byId("show").value === "open" ? "No videos yet. They appear here as they are finished." : "None.");
  if (next && end.getBoundingClientRect().top < innerHeight + 800) setTimeout(more, 0);
}

/** Whether the reader works in the grid, or is scrolled down: nothing may move then. */
function isWorking() {
  return list.matches(":hover") || list.contains(document.activeElement) || selected.size > 0
    || Boolean(document.querySelector("dialog[open]")) || (cards.size > 0 && list.getBoundingClientRect().top < 0 && !place?.closest?.("#add, #now"));
}

function showBehind(number) {
  isBehind = number > 0;
  byId("new-results").hidden = !isBehind;
  setText(byId("new-results"), `${number.toLocaleString()} new`);
}

/** Add what has ended since, as soon as the reader is not busy; `token` changes when a job ends. */
export async function refresh(token) {
  const isFirst = latest === null;
  const isSame = latest === token;
  latest = token;
  if (!isFirst && (!isSame || (isBehind && !isWorking()))) await update(false);
}

/** Ask for the newest results, and show them; while the reader works, and did not ask, show only how many they are. */
async function update(isAsked) {
  const mine = generation;
  try {
    const page = await pageOf("");
    if (mine !== generation) return;
    const fresh = page.results.filter((result) => cards.get(result.id)?.result.ended_at !== result.ended_at);
    const isHeld = !isAsked && isWorking();
    showBehind(isHeld ? fresh.length : 0);
    if (!fresh.length || isHeld) return;
    const isWhole = page.next?.startsWith("older:") ?? true;
    if (fresh.length === page.results.length && !isWhole && cards.size) { // there may be more between
      await reload();
      return;
    }
    const before = cards;
    cards = new Map();
    for (const result of fresh) {
      if (current && before.get(result.id) === current) choose(null);
      before.get(result.id)?.root.remove();
      before.delete(result.id);
      cards.set(result.id, newCard(result));
    }
    before.forEach((card, id) => cards.set(id, card));
    arrange();
    setText(byId("results-end"), next === null ? "" : "Loading…");
  } catch {
    latest = ""; // the next state tries again
  }
}

/** Go on after a lost connection, at the same place. */
export function recover() {
  setText(problem, "");
  if (cards.size) {
    const token = latest;
    latest = "";
    refresh(token);
  } else reload();
}

function newCard(result) {
  const card = { result, ...copy("card-template"), media: null };
  const { root, parts } = card;
  root.dataset.id = result.id;
  setText(parts.name, result.name);
  parts.pick.setAttribute("aria-label", `Select ${result.name}`);
  parts.pick.checked = selected.has(result.id);
  if (parts.pick.checked) selected.set(result.id, result);
  parts.pick.addEventListener("change", () => {
    if (parts.pick.checked) selected.set(result.id, result);
    else selected.delete(result.id);
    isAll = isAll && parts.pick.checked;
    showPicked();
  });
  if (result.status === "finished" && result.is_there) {
    card.media = mediaOf(result);
    parts.open.append(card.media.element);
    parts.open.setAttribute("aria-label", `Open ${result.name}, seed ${result.seed}`);
    near.observe(root);
  } else {
    parts.open.textContent = { finished: "Its files were removed", failed: "Failed" }[result.status] ?? "Canceled";
    parts.open.setAttribute("aria-label", `Open ${result.name}: ${parts.open.textContent}`);
  }
  if (result.error) {
    parts.error.hidden = false;
    setText(parts.error, result.error);
  }
  parts.open.addEventListener("click", () => show(result));
  parts.keep.addEventListener("click", (event) => run(event.target, problem, () => mark([result], "keep")));
  parts.reject.addEventListener("click", (event) => run(event.target, problem, () => mark([result], "reject")));
  parts.keep.hidden = parts.reject.hidden = result.status !== "finished";
  const isFinished = result.status === "finished";
  if (!isFinished) setText(parts.again, "Try again");
  parts.again.setAttribute("aria-label", isFinished ? `Make ${result.name} again with another seed` : `Try ${result.name} again`);
  parts.again.addEventListener("click", (event) => run(event.target, problem, async () => {
    if (!isFinished) return retry([result]);
    setText(parts.mark, await againWithNewSeed(result));
    return "";
  }));
  showMark(card);
  return card;
}

function showMark(card) {
  const { result, root, parts } = card;
  root.classList.toggle("is-keep", result.mark === "keep");
  root.classList.toggle("is-reject", result.mark === "reject");
  setText(parts.mark, { keep: "Kept", reject: "Rejected" }[result.mark] ?? "");
  parts.keep.ariaPressed = String(result.mark === "keep");
  parts.reject.ariaPressed = String(result.mark === "reject");
  const about = [result.ended_at && clock(new Date(result.ended_at)), result.seed !== null && `seed ${result.seed}`, result.size, result.notice];
  setText(parts.about, about.filter(Boolean).join(" · "));
}

/** Keep or reject; the same verdict again takes it back if all have it. */
async function mark(some, verdict) {
  const marked = finished(some);
  if (!marked.length) return "";
  const isBack = marked.every((result) => result.mark === verdict);
  const sentence = await act(isBack ? "unmark" : verdict, marked.map((result) => result.id));
  marked.forEach((result) => {
    result.mark = isBack ? "" : verdict;
    const card = cards.get(result.id);
    if (!card) return;
    card.result.mark = result.mark; // it may be another object, of a newer answer
    showMark(card);
  });
  return sentence;
}

/** Queue failed and canceled videos again. */
async function retry(some) {
  const problems = await tryOn("retry", some.map((result) => result.id));
  some.filter((result) => !problems[result.id]).forEach(remove);
  return sumOf(problems);
}

function neighbor(id, step) {
  const all = inOrder();
  const place = all.findIndex((card) => card.result.id === id);
  return all[place + step]?.parts.open ?? null;
}

function remove({ id }) {
  const card = cards.get(id);
  selected.delete(id);
  if (!card) return;
  const other = neighbor(id, 1) ?? neighbor(id, -1) ?? byId("show");
  if (card === current) choose(null);
  card.root.remove();
  cards.delete(id);
  other.focus();
  showPicked();
}

/** Put the cards in order: newest first, or those of a photo together. */
function arrange() {
  const isGrouped = byId("by-photo").checked;
  const wanted = [];
  if (isGrouped) {
    const groups = new Map();
    cards.forEach((card) => groups.set(card.result.photo, [...(groups.get(card.result.photo) ?? []), card]));
    groups.forEach((some, photo) => wanted.push(headingOf(photo, some), ...some.map((card) => card.root)));
  } else wanted.push(...[...cards.values()].map((card) => card.root));
  list.querySelectorAll(".photo-heading").forEach((heading) => { if (!wanted.includes(heading)) heading.remove(); });
  const focused = list.contains(document.activeElement) ? document.activeElement : null;
  wanted.forEach((root, index) => {
    if (list.children[index] !== root) list.insertBefore(root, list.children[index] ?? null);
  });
  if (focused && document.activeElement !== focused) focused.focus({ preventScroll: true });
  showPicked();
}

function headingOf(photo, some) {
  const heading = list.querySelector(`.photo-heading[data-photo="${CSS.escape(photo)}"]`) ?? document.createElement("li");
  heading.className = "photo-heading";
  heading.dataset.photo = photo;
  const title = heading.firstElementChild ?? heading.appendChild(document.createElement("h3"));
  setText(title, `${some[0].result.photo_name}: ${count(some.length, "video")}`);
  return heading;
}

function showPicked() {
  const some = picked();
  const done = finished(some);
  const all = byId("pick-results");
  all.checked = some.length > 0 && (isAll || (next === null && some.length === cards.size));
  all.indeterminate = some.length > 0 && !all.checked;
  setText(byId("num-picked-results"), some.length ? `${some.length.toLocaleString()} selected` : "Select all");
  for (const id of ["keep-results", "reject-results", "zip-results"]) byId(id).disabled = !done.length;
  byId("retry-results").hidden = !unfinished(some).length;
  const playable = done.filter((result) => cards.get(result.id)?.media);
  byId("compare-results").disabled = playable.length !== some.length || playable.length < 2 || playable.length > MAX_COMPARED;
}

const cardOf = (element) => cards.get(element?.closest?.("#cards .card")?.dataset.id) ?? null;

/** Keep `current` at the card that was pointed at or focused last. */
function followReader() {
  for (const name of ["pointerdown", "mousemove", "wheel", "focusin", "keydown"]) {
    addEventListener(name, (event) => { place = event.target; }, { passive: true, capture: true });
  }
  const point = (event) => { if (isPointing) choose(cardOf(event.target) ?? cardOf(document.activeElement)); };
  for (const name of ["mousemove", "wheel", "mousedown"]) {
    addEventListener(name, (event) => { isPointing = true; if (name !== "wheel") point(event); }, { passive: true });
  }
  addEventListener("mouseover", point);
  document.documentElement.addEventListener("mouseleave", () => choose(cardOf(document.activeElement)));
  list.addEventListener("focusin", (event) => choose(cardOf(event.target)));
  list.addEventListener("focusout", (event) => { if (cardOf(event.target) === current && !cardOf(event.relatedTarget)) choose(pointed()); });
}

const pointed = () => (isPointing ? cardOf(list.querySelector(".card:hover")) : null);

/** Play this card and no other, unless the reader prefers less motion. */
function choose(card) {
  if (card === current) return;
  current?.root.classList.remove("is-current");
  current?.media?.stop();
  current = card;
  card?.root.classList.add("is-current");
  if (!isCalm()) card?.media?.play();
}

const TYPING = "textarea, input:not([type=checkbox])";

/** K and R on the current card, arrows on the focused one. */
function onKey(event) {
  const { target } = event;
  if (event.key === "Tab") isPointing = false;
  if (!current || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  // A list takes letters, too, but not while the reader points at a video.
  if (target.matches(TYPING) || (target.matches("select") && current !== pointed())) return;
  const verdict = { k: "keep", r: "reject" }[event.key.toLowerCase()];
  if (verdict) {
    const card = current;
    run(null, problem, () => mark([card.result], verdict));
    event.preventDefault();
  }
  const card = cardOf(target);
  if (target !== card?.parts.open) return;
  const columns = getComputedStyle(list).gridTemplateColumns.split(" ").length;
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
  const other = step && neighbor(card.result.id, step);
  if (other) {
    isPointing = false;
    other.focus();
    event.preventDefault();
  }
}
