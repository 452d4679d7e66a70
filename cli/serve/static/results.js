// The section Results: a grid that loads as it is scrolled, is searched and grouped, and takes the verdicts.
import * as address from "./address.js";
import { newCard, showMark } from "./card.js";
import { compare } from "./compare.js";
import { byId, ranges, request, run, setText, sumOf, tryOn } from "./dom.js";
import { count } from "./format.js";
import { headingOf, keyOf } from "./groups.js";
import * as reader from "./reader.js";
import { finish, toast } from "./toast.js";
import { againWithNewSeed, open } from "./viewer.js";
import { isMine } from "./whose.js";

const MAX_COMPARED = 4;
const TYPED_MS = 300;
const list = byId("cards");
const problem = byId("results-problem");

//: Cards by job id, newest first: result, root, parts, media.
let cards = new Map();
let next = null;
let isLoading = false;
let first = Promise.resolve(); // the load of the first page
let generation = 0;
//: What the server has said last: the tokens of the newest results and of the verdicts.
let latest = null;
let verdicts = null;
//: The videos that another page has deleted; their cards stay until the reader is done.
let gone = [];
//: Whether newer results wait behind the button until the reader is done.
let isBehind = false;
//: The videos that are deleted as soon as nobody wants to take it back.
const going = new Set();

//: The selected results by id, also such as have no card yet; `isAll` if all that match were asked for.
const selected = new Map();
let isAll = false;
const picked = () => [...selected.values()];
const inOrder = () => [...list.querySelectorAll(".card")].map((root) => cards.get(root.dataset.id));
const cardOf = (element) => cards.get(element?.closest?.("#cards .card")?.dataset.id) ?? null;
const isWorking = () => reader.isWorking() || selected.size > 0;

// Pictures are loaded shortly before they are seen, and videos let go when they are far away again.
const near = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const media = cards.get(entry.target.dataset.id)?.media;
    if (entry.isIntersecting) media?.load();
    else media?.unload();
  }
}, { rootMargin: "600px" });

export function start() {
  const change = (id, name, show) => byId(id).addEventListener("change", () => {
    address.put({ [name]: id === "show" && byId(id).value === "open" ? "" : byId(id).value });
    show();
  });
  change("show", "show", reload);
  change("group", "grouped", arrange);
  let typed = 0;
  byId("search").addEventListener("input", () => {
    clearTimeout(typed);
    typed = setTimeout(() => { address.put({ search: byId("search").value.trim() }); reload(); }, TYPED_MS);
  });
  addEventListener("popstate", follow);
  byId("new-results").addEventListener("click", async () => {
    await update(true);
    byId("results").scrollIntoView();
    list.querySelector(".frame")?.focus({ preventScroll: true });
  });
  const onClick = (id, work) => byId(id).addEventListener("click", (event) => run(event.target, problem, work));
  byId("pick-results").addEventListener("change", (event) => {
    run(null, problem, () => (event.target.checked ? pickAll() : pickNone()));
  });
  onClick("keep-results", () => mark(picked(), "keep"));
  onClick("reject-results", () => mark(picked(), "reject"));
  onClick("upscale-results", () => upscale(finished(picked())));
  onClick("compare-results", () => compare(inOrder().map((card) => card.result).filter((result) => selected.has(result.id)), mark));
  onClick("retry-results", () => retry(unfinished(picked())));
  onClick("delete-results", () => erase(picked()));
  onClick("zip-results", () => {
    byId("zip-ids").value = finished(picked()).map((result) => result.id).join(",");
    byId("zip-form").submit();
  });
  ranges(list, "[data-part=pick]");
  reader.follow({ cardOf, neighbor: (card, step) => neighbor(card.result.id, step), mark: markAndGo });
  new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) more();
  }, { rootMargin: "800px" }).observe(byId("results-end"));
  for (const [id, name, usual] of [["show", "show", "open"], ["group", "grouped", ""]]) {
    byId(id).value = address.get(name) || usual;
    if (byId(id).selectedIndex < 0) byId(id).value = usual;
  }
  byId("search").value = address.get("search");
  first = reload();
  follow();
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
  open(result, {
    neighbor: (step) => (cards.has(id) ? neighbor(id, step)?.parts.open : null),
    mark: (verdict) => mark([cards.get(id)?.result ?? result], verdict),
    erase: () => erase([result]),
  });
}

const finished = (some) => some.filter((result) => result.status === "finished");
const unfinished = (some) => some.filter((result) => result.status !== "finished");

function pageOf(before, more = {}) {
  const search = byId("search").value.trim();
  const asked = new URLSearchParams({ show: byId("show").value, ...(search && { search }), ...(isMine() && { whose: "mine" }), ...(before && { before }), ...more });
  return request("GET", `/page/results?${asked}`);
}

/** Select all results that match, also those that are not loaded. */
async function pickAll() {
  const mine = generation;
  for (let before = ""; before !== null && mine === generation;) {
    const page = await pageOf(before, { brief: "yes" });
    page.results.filter((result) => !going.has(result.id)).forEach((result) => selected.set(result.id, cards.get(result.id)?.result ?? result));
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
  reader.choose(null);
  cards = new Map();
  list.replaceChildren();
  pickNone();
  showBehind(0);
  showProgress();
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
    page.results.forEach((result) => { if (!cards.has(result.id) && !going.has(result.id)) addCard(result); });
    next = page.next;
    arrange();
  } catch (error) {
    if (mine !== generation) return;
    setText(problem, error.message);
    next = next || ""; // a scroll or the connection's return tries again
  }
  isLoading = false;
  showEnd();
  if (next && byId("results-end").getBoundingClientRect().top < innerHeight + 800 && list.checkVisibility()) setTimeout(more, 0);
}

function showEnd() {
  const isAny = byId("show").value === "open" && !byId("search").value.trim();
  setText(byId("results-end"), next !== null ? "Loading…" : cards.size ? `${count(cards.size, "video")}.` :
    isAny ? "No videos yet. They appear here as they are finished." : "None.");
}

/** Show how many of the finished videos have a verdict. */
async function showProgress() {
  try {
    const { total, reviewed } = await request("GET", `/page/progress${isMine() ? "?whose=mine" : ""}`);
    setText(byId("reviewed"), total ? `${reviewed.toLocaleString()} of ${total.toLocaleString()} reviewed` : "");
  } catch {
    // The next change asks again.
  }
}

function showBehind(number) {
  isBehind = number > 0;
  byId("new-results").hidden = !isBehind;
  setText(byId("new-results"), `${number.toLocaleString()} new`);
}

/** Add what has ended since, as soon as the reader is not busy, and show verdicts of other pages. */
export async function refresh(state) {
  const isFirst = latest === null;
  const isSame = latest === state.latest;
  const isJudged = verdicts !== null && verdicts !== state.verdicts;
  latest = state.latest;
  verdicts = state.verdicts;
  if (isFirst) await first; // what ended after that and before this state is in neither
  if (isJudged) await showVerdicts();
  if (gone.length && !isWorking()) gone.splice(0).forEach((id) => remove({ id }));
  if (isJudged || (!isFirst && !isSame)) showProgress();
  if (!isSame || (isBehind && !isWorking())) await update(false);
}

async function showVerdicts() {
  try {
    const ids = [...cards.keys()].slice(0, 10_000);
    const answer = await request("POST", "/page/verdicts", { ids });
    gone = ids.filter((id) => !(id in answer.verdicts));
    for (const [id, mark] of Object.entries(answer.verdicts)) {
      const card = cards.get(id);
      if (!card || card.result.mark === mark) continue;
      card.result.mark = mark;
      showMark(card);
    }
  } catch {
    verdicts = null; // the next change asks again
  }
}

/** Ask for the newest results, and show them; while the reader works, and did not ask, show only how many they are. */
async function update(isAsked) {
  const mine = generation;
  try {
    const page = await pageOf("");
    if (mine !== generation) return;
    const fresh = page.results.filter((result) => cards.get(result.id)?.result.ended_at !== result.ended_at && !going.has(result.id));
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
      if (before.has(result.id) && reader.isCurrent(before.get(result.id))) reader.choose(null);
      before.get(result.id)?.root.remove();
      before.delete(result.id);
      addCard(result);
    }
    before.forEach((card, id) => cards.set(id, card));
    arrange();
    showEnd();
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
    refresh({ latest: token, verdicts: -1 });
  } else reload();
}

function addCard(result) {
  const card = newCard(result, { open: show, mark, pick, again });
  card.parts.pick.checked = selected.has(result.id);
  if (card.parts.pick.checked) selected.set(result.id, result);
  if (card.media) near.observe(card.root);
  cards.set(result.id, card);
}

function pick(result, isPicked) {
  if (isPicked) selected.set(result.id, result);
  else selected.delete(result.id);
  isAll = isAll && isPicked;
  showPicked();
}

async function again(result) {
  if (result.status !== "finished") return retry([result]);
  toast(await againWithNewSeed(result));
  return "";
}

const WORDS = { keep: "kept", reject: "rejected" };
const nameOf = (some) => (some.length === 1 && some[0].name ? `"${some[0].name}"` : count(some.length, "video"));

/** Keep or reject; the same verdict again takes it back if all have it. */
async function mark(some, verdict) {
  const marked = finished(some);
  if (!marked.length) return "";
  const before = new Map(marked.map((result) => [result.id, result.mark]));
  const isBack = marked.every((result) => result.mark === verdict);
  const problems = await give(marked, isBack ? "" : verdict);
  if (!isBack && marked.some((result) => !problems[result.id])) {
    toast(`${nameOf(marked)} ${WORDS[verdict]}.`, {
      undo: () => run(null, problem, async () => {
        for (const word of new Set(before.values())) await give(marked.filter((result) => before.get(result.id) === word), word);
        const card = cards.get(marked[0].id);
        if (card && !document.querySelector("dialog[open]")) reader.goTo(card);
        return "";
      }),
    });
  } else finish();
  return sumOf(problems);
}

/** Give videos a verdict; returns sentences about those that are gone, by id. */
async function give(some, verdict) {
  const problems = await tryOn(verdict || "unmark", some.map((result) => result.id));
  for (const result of some.filter((each) => !problems[each.id])) {
    result.mark = verdict;
    const card = cards.get(result.id);
    if (!card) continue;
    card.result.mark = verdict; // it may be another object, of a newer answer
    showMark(card);
  }
  showPicked();
  return problems;
}

/** Mark a card by a key, unless it has this verdict, and go to the next one at once. */
function markAndGo(card, verdict) {
  if (card.result.mark !== verdict) run(null, problem, () => mark([card.result], verdict));
  const other = neighbor(card.result.id, 1);
  if (other) reader.goTo(other);
}

/** Remove videos with their files, when the time to take it back is over. */
function erase(some) {
  const ids = some.map((result) => result.id);
  ids.forEach((id) => going.add(id));
  some.forEach(remove);
  toast(`${nameOf(some)} deleted.`, {
    undo: () => { ids.forEach((id) => going.delete(id)); reload(); },
    commit: () => run(null, problem, async () => {
      const problems = await tryOn("delete", ids);
      ids.forEach((id) => going.delete(id));
      if (Object.keys(problems).length) await reload();
      return sumOf(problems);
    }),
  });
  return "";
}

/** Queue failed and canceled videos again. */
async function retry(some) {
  const problems = await tryOn("retry", some.map((result) => result.id));
  some.filter((result) => !problems[result.id]).forEach(remove);
  return sumOf(problems);
}

/** Queue kept videos to be upscaled. */
async function upscale(some) {
  const problems = await tryOn("upscale", some.map((result) => result.id));
  const queued = some.filter((result) => !problems[result.id]);
  if (queued.length) toast(`${nameOf(queued)} queued to be upscaled.`);
  return sumOf(problems);
}

function neighbor(id, step) {
  const all = inOrder();
  const place = all.findIndex((card) => card.result.id === id);
  return all[place + step] ?? null;
}

function remove({ id }) {
  const card = cards.get(id);
  selected.delete(id);
  if (card) {
    const hasFocus = card.root.contains(document.activeElement);
    const other = neighbor(id, 1) ?? neighbor(id, -1);
    if (reader.isCurrent(card)) reader.choose(null);
    card.root.remove();
    cards.delete(id);
    if (hasFocus) (other?.parts.open ?? byId("show")).focus();
  }
  showPicked();
  showEnd();
}

/** Put the cards in order: newest first, or in groups with headings. */
function arrange() {
  const kind = byId("group").value;
  const groups = new Map();
  let last = null;
  for (const card of cards.values()) {
    const key = keyOf(kind, card.result, last);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(card);
    last = { key, result: card.result };
  }
  const wanted = [...groups].flatMap(([key, some]) => [
    ...(kind ? [headingOf(list, kind, key, some.map((card) => card.result), next !== null)] : []), ...some.map((card) => card.root),
  ]);
  list.querySelectorAll(".group-heading").forEach((heading) => { if (!wanted.includes(heading)) heading.remove(); });
  const focused = list.contains(document.activeElement) ? document.activeElement : null;
  wanted.forEach((root, index) => {
    if (list.children[index] !== root) list.insertBefore(root, list.children[index] ?? null);
  });
  if (focused && document.activeElement !== focused) focused.focus({ preventScroll: true });
  showPicked();
}

function showPicked() {
  const some = picked();
  const done = finished(some);
  const all = byId("pick-results");
  all.checked = some.length > 0 && (isAll || (next === null && some.length === cards.size));
  all.indeterminate = some.length > 0 && !all.checked;
  setText(byId("num-picked-results"), some.length ? `${some.length.toLocaleString()} selected` : "Select all");
  for (const id of ["keep-results", "reject-results", "zip-results"]) byId(id).disabled = !done.length;
  byId("upscale-results").disabled = !done.length || done.some((result) => result.mark !== "keep");
  byId("delete-results").disabled = !some.length;
  byId("retry-results").hidden = !unfinished(some).length;
  const playable = done.filter((result) => cards.get(result.id)?.media);
  byId("compare-results").disabled = playable.length !== some.length || playable.length < 2 || playable.length > MAX_COMPARED;
}
