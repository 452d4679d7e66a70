// The section Now: figures, warnings, ranks, and the videos that are made or wait.
import { act, byId, copy, ranges, request, run, setText } from "./dom.js";
import { bytes, clock, count, duration, inSeconds } from "./format.js";
import { pictureOf, soFarOf } from "./media.js";
import { isDragging, startOrder } from "./order.js";
import { finish, toast } from "./toast.js";
import { isMine, isShown, ownerOf } from "./whose.js";

//: How long the list of the server may still have a video that was canceled.
const GONE_MS = 5000;

//: Rows by job id.
const rows = new Map();
const problem = byId("now-problem");
//: The ids of the selected videos, also of such as have no row; `isAll` if all were asked for.
const selected = new Set();
let isAll = false;
let inFlight = [];
const picked = () => [...selected];
//: The videos that are canceled as soon as nobody wants to take it back.
const going = new Set();
let shown = null;
let isPaused = false;
let numWaiting = 0;
let numAll = 0;

export function start() {
  byId("pause").addEventListener("click", (event) => (isPaused ? run(event.target, problem, resume) : pause(event.target, "pause", "Pause all workers?")));
  byId("free").addEventListener("click", (event) => pause(event.target, "free", "Stop all workers to free the GPU?"));
  byId("pick-rows").addEventListener("change", (event) => {
    run(null, problem, () => pick(event.target.checked));
  });
  byId("front-rows").addEventListener("click", (event) => {
    // The last that is moved is the first in the queue.
    run(event.target, problem, () => act("front", movable().reverse()));
  });
  byId("cancel-rows").addEventListener("click", () => cancel(picked()));
  byId("cancel-all").addEventListener("click", (event) => {
    const everybody = !isMine();
    const words = everybody ? `all ${count(numWaiting, "video")}` : "all of your videos";
    if (confirm(`Cancel ${words} that wait? Those in progress are finished.`)) {
      run(event.target, problem, () => request("POST", "/page/actions", { action: "cancel-waiting", everybody }).then(() => ""));
    }
  });
  ranges(byId("rows"), "[data-part=pick]");
  startOrder(byId("rows"), problem);
}

async function resume() {
  await finish(); // what was canceled must not begin now
  return act("resume");
}

/** Pause, or free the GPU; where videos of others wait, after a question. */
function pause(button, action, question) {
  run(button, problem, async () => {
    await finish();
    const { waiting } = await request("GET", "/page/others");
    const isMeant = !waiting || confirm(`${question} ${count(waiting, "video")} of other people ${waiting === 1 ? "waits" : "wait"}, too.`);
    return isMeant ? act(action) : "";
  });
}

/** The selected videos that can be moved to the front, in the order of the queue. */
const movable = () => [...byId("rows").children].map((root) => root.dataset.id)
  .filter((id) => selected.has(id) && rows.get(id).status === "queued");

/** Select all videos, also those that are not shown, or none. */
async function pick(isWanted) {
  const { ids } = isWanted ? await request("GET", `/page/waiting${isMine() ? "?whose=mine" : ""}`) : { ids: [] };
  selected.clear();
  ids.filter((id) => !going.has(id)).forEach((id) => selected.add(id));
  isAll = isWanted;
  rows.forEach((row, id) => { row.parts.pick.checked = selected.has(id); });
  showPicked();
}

/** Hide videos, and cancel them when the time to take it back is over. */
function cancel(ids) {
  const words = ids.length === 1 && rows.has(ids[0]) ? `"${rows.get(ids[0]).parts.name.textContent}" is canceled.` : `${count(ids.length, "video")} canceled.`;
  const change = (isGone) => {
    ids.forEach((id) => (isGone ? going.add(id) && selected.delete(id) : going.delete(id)));
    show(shown);
  };
  toast(words, {
    undo: () => change(false),
    commit: () => run(null, problem, async () => {
      try {
        return await act("cancel", ids);
      } finally {
        setTimeout(() => change(false), GONE_MS); // the next states have them no more, or they were too late
      }
    }),
  });
  change(true);
}

export function showAgain() {
  if (shown) show(shown);
}

export function show(state) {
  shown = state;
  isPaused = state.paused;
  numWaiting = state.counts.queued + state.counts.scheduled + state.counts.deferred;
  numAll = numWaiting + state.counts.started;
  showFigures(state);
  showWarnings(state.warnings);
  showGroups(state.groups);
  const own = state.rows.filter(isShown);
  if (!isDragging()) showRows(own.filter((job) => !going.has(job.id))); // else others would move below the pointer
  setText(byId("rows-more"), state.num_more ? `And ${count(state.num_more, "more video")} that wait${isMine() ? ", of everybody" : ""}.` :
    own.length ? "" : isMine() ? "None of your videos is waiting." : "Nothing is waiting.");
  byId("row-bulk").hidden = !own.length;
  byId("cancel-all").hidden = numWaiting < 2;
  byId("pause").hidden = false;
  byId("free").hidden = state.freed;
  setText(byId("pause"), isPaused ? "Resume" : "Pause");
  byId("num-left").hidden = !numAll;
  setText(byId("num-left"), numAll.toLocaleString());
  document.title = numAll ? `${numAll.toLocaleString()} left · svdq` : "svdq";
}

function showFigures(state) {
  const set = (name, text, more = "") => {
    setText(byId(`figure-${name}`), text);
    setText(byId(`figure-${name}-more`), more);
  };
  const { queued, scheduled, deferred, started } = state.counts;
  if (state.eta_s !== null) set("end", clock(inSeconds(state.eta_s)), `in ${duration(state.eta_s)}${state.eta_reason && " by published times"}`);
  else {
    const isAtWork = state.groups.some((group) => group.ranks.some((rank) => rank.step)); // on what was just canceled
    set("end", queued + started ? "not known" : isAtWork ? "almost done" : "nothing to do", state.eta_reason);
  }
  if (state.videos_per_hour) set("pace", `${paceOf(state.videos_per_hour)} / hour`, paceWords(state.groups));
  else set("pace", "not known yet");
  const others = [scheduled && `${scheduled.toLocaleString()} for later`, deferred && `${deferred.toLocaleString()} after others`];
  set("waiting", count(queued, "video"), others.filter(Boolean).join(", "));
  set("hour", count(state.finished_last_hour, "video"), state.failed_last_hour ? `${state.failed_last_hour.toLocaleString()} failed` : "");
  if (state.disk === null) set("disk", "not here", "the storage is remote");
  else if (!state.disk.total) set("disk", "not known");
  else set("disk", `${bytes(state.disk.free)} free`, `of ${bytes(state.disk.total)}`);
}

/** Which videos the pace is of. */
const paceWords = (groups) => [...new Set(groups.map((group) => group.pace_of).filter(Boolean))].map((of) => `of ${of}`).join("; ");
const short = (seconds) => (seconds < 10 ? `${seconds.toFixed(1)} s` : duration(seconds));
const paceOf = (number) => (number >= 10 ? Math.round(number).toLocaleString() : number.toFixed(1));

function showWarnings(sentences) {
  const list = byId("warnings");
  if ([...list.children].map((item) => item.textContent).join("\n") === sentences.join("\n")) return;
  list.replaceChildren(...sentences.map((sentence) => {
    const item = document.createElement("li");
    item.textContent = sentence;
    return item;
  }));
}

function showGroups(groups) {
  const box = byId("groups");
  while (box.children.length > groups.length) box.lastElementChild.remove();
  while (box.children.length < groups.length) box.append(copy("group-template").root);
  groups.forEach((group, index) => {
    const section = box.children[index];
    const part = (name) => section.querySelector(`[data-part="${name}"]`);
    setText(part("title"), `${group.host}: ${group.model}`);
    const pace = group.pace_s ? `one video every ${short(group.pace_s)} (${group.pace_of})` : "";
    setText(part("about"), [group.notice, pace, group.is_draining && "takes no more videos"].filter(Boolean).join(" · "));
    const list = part("ranks");
    while (list.children.length > group.ranks.length) list.lastElementChild.remove();
    while (list.children.length < group.ranks.length) list.append(copy("rank-template").root);
    group.ranks.forEach((rank, number) => {
      const item = list.children[number];
      const slot = (name) => item.querySelector(`[data-part="${name}"]`);
      setText(slot("name"), rank.name);
      setText(slot("job"), rank.job);
      setText(slot("step"), rank.step);
      setText(slot("busy"), rank.busy === null ? "" : `${rank.busy} %`);
      slot("bar").value = rank.busy ?? 0;
    });
  });
}

function showRows(found) {
  const ids = new Set(found.map((job) => job.id));
  for (const [id, row] of rows) {
    if (!ids.has(id)) {
      if (row.root.contains(document.activeElement)) byId("now").focus({ preventScroll: true });
      row.root.remove();
      rows.delete(id);
      selected.delete(id);
    }
  }
  const list = byId("rows");
  inFlight = found.filter((job) => job.status === "started");
  // The variations of a photo stand side by side.
  const places = new Map(inFlight.map((job, index) => [job.photo, index]).reverse());
  inFlight.sort((one, other) => places.get(one.photo) - places.get(other.photo));
  [...inFlight, ...found.filter((job) => job.status !== "started")].forEach((job, index) => {
    const row = rows.get(job.id) ?? newRow(job);
    update(row, job);
    // Elements that are in their place are not moved, so that they keep the focus.
    if (list.children[index] !== row.root) list.insertBefore(row.root, list.children[index] ?? null);
  });
  showPicked();
}

/** The other videos of the photo of one in flight that are in flight or in the queue. */
const siblings = (id) => {
  const photo = inFlight.find((job) => job.id === id)?.photo;
  const isOther = (job) => job.photo === photo && job.id !== id && ["started", "queued"].includes(job.status);
  return photo ? shown.rows.filter((job) => isOther(job) && !going.has(job.id)).map((job) => job.id) : [];
};

function newRow(job) {
  const row = { id: job.id, ...copy("row-template") };
  row.root.dataset.id = job.id;
  row.parts.pick.checked = selected.has(job.id);
  setText(row.parts.name, job.name);
  row.parts.photo.src = pictureOf(job.id);
  row.parts.photo.addEventListener("error", () => { row.parts.photo.removeAttribute("src"); });
  row.parts.pick.setAttribute("aria-label", `Select ${job.name}`);
  row.parts.bar.setAttribute("aria-label", `Progress of ${job.name}`);
  row.parts.front.setAttribute("aria-label", `Move to front: ${job.name}`);
  row.parts.cancel.setAttribute("aria-label", `Cancel ${job.name}`);
  row.parts.pick.addEventListener("change", () => {
    if (row.parts.pick.checked) selected.add(job.id);
    else selected.delete(job.id);
    isAll = isAll && row.parts.pick.checked;
    showPicked();
  });
  row.parts.front.addEventListener("click", (event) => run(event.target, problem, () => act("front", [job.id])));
  row.parts.cancel.addEventListener("click", () => cancel([job.id]));
  row.parts.only.addEventListener("click", () => cancel(siblings(job.id)));
  row.parts.handle.setAttribute("aria-label", `Move ${job.name}; arrow keys up and down`);
  rows.set(job.id, row);
  return row;
}

function update(row, job) {
  row.status = job.status;
  row.parts.bar.hidden = job.status !== "started";
  row.parts.bar.max = Math.max(1, job.steps);
  row.parts.bar.value = job.step;
  row.parts.front.hidden = row.parts.handle.hidden = job.status !== "queued";
  row.root.draggable = job.status === "queued";
  row.root.classList.toggle("is-started", job.status === "started");
  const others = siblings(job.id).length;
  setText(row.parts.state, [ownerOf(job), job.state, others && `seed ${job.seed}`].filter(Boolean).join(" · "));
  row.parts.only.hidden = !others;
  row.parts.only.setAttribute("aria-label", `Keep this one: ${job.name}; cancels ${count(others, "other")}`);
  if (job.picture && row.picture !== job.picture) {
    row.picture = job.picture;
    row.parts.photo.src = soFarOf(job.id, job.picture);
  }
  let eta = "";
  if (job.scheduled_at) eta = `starts ${clock(new Date(job.scheduled_at))}`;
  else if (job.eta_s !== null) eta = job.status === "started" ? `in ${duration(job.eta_s)}` : `about ${clock(inSeconds(job.eta_s))}`;
  setText(row.parts.eta, eta);
}

function showPicked() {
  const number = selected.size;
  isAll = isAll && number > 0;
  const all = byId("pick-rows");
  all.checked = number > 0 && (isAll || number >= numAll);
  all.indeterminate = number > 0 && !all.checked;
  setText(byId("num-picked-rows"), number ? `${number.toLocaleString()} selected` : "Select all");
  byId("cancel-rows").disabled = !number;
  byId("front-rows").disabled = isAll || !movable().length;
}
