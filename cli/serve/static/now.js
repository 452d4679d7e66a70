// The section Now: figures, warnings, ranks, and the videos that are made or wait.
import { act, byId, copy, request, run, setText } from "./dom.js";
import { bytes, clock, count, duration, inSeconds } from "./format.js";
import { pictureOf } from "./media.js";

//: Rows by job id.
const rows = new Map();
const problem = byId("now-problem");
//: The ids of the selected videos, also of such as have no row; `isAll` if all were asked for.
const selected = new Set();
let isAll = false;
const picked = () => [...selected];
let isPaused = false;
let numWaiting = 0;
let numAll = 0;

export function start() {
  byId("pause").addEventListener("click", (event) => {
    run(event.target, problem, () => act(isPaused ? "resume" : "pause"));
  });
  byId("pick-rows").addEventListener("change", (event) => {
    run(null, problem, () => pick(event.target.checked));
  });
  byId("front-rows").addEventListener("click", (event) => {
    // The last that is moved is the first in the queue.
    run(event.target, problem, () => act("front", movable().reverse()));
  });
  byId("cancel-rows").addEventListener("click", (event) => cancel(event.target, picked()));
  byId("cancel-all").addEventListener("click", (event) => {
    if (confirm(`Cancel all ${count(numWaiting, "video")} that wait? Those in progress are finished.`)) {
      run(event.target, problem, () => act("cancel-waiting"));
    }
  });
}

/** The selected videos that can be moved to the front, in the order of the queue. */
const movable = () => [...byId("rows").children].map((root) => root.dataset.id)
  .filter((id) => selected.has(id) && rows.get(id).status === "queued");

/** Select all videos, also those that are not shown, or none. */
async function pick(isWanted) {
  const { ids } = isWanted ? await request("GET", "/page/waiting") : { ids: [] };
  selected.clear();
  ids.forEach((id) => selected.add(id));
  isAll = isWanted;
  rows.forEach((row, id) => { row.parts.pick.checked = selected.has(id); });
  showPicked();
}

function cancel(button, ids) {
  if (ids.length > 1 && !confirm(`Cancel ${count(ids.length, "video")}?`)) return;
  run(button, problem, async () => {
    const sentence = await act("cancel", ids);
    ids.forEach((id) => selected.delete(id));
    showPicked();
    return sentence;
  });
}

export function show(state) {
  isPaused = state.paused;
  numWaiting = state.counts.queued + state.counts.scheduled + state.counts.deferred;
  numAll = numWaiting + state.counts.started;
  showFigures(state);
  showWarnings(state.warnings);
  showGroups(state.groups);
  showRows(state.rows);
  setText(byId("rows-more"), state.num_more ? `And ${count(state.num_more, "more video")} that wait.` :
    state.rows.length ? "" : "Nothing is waiting.");
  byId("row-bulk").hidden = !state.rows.length;
  byId("cancel-all").hidden = numWaiting < 2;
  byId("pause").hidden = false;
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
  if (state.eta_s !== null) set("end", clock(inSeconds(state.eta_s)), `in ${duration(state.eta_s)}`);
  else set("end", queued + started ? "not known" : "nothing to do", state.eta_reason);
  if (state.videos_per_hour) set("pace", `${paceOf(state.videos_per_hour)} / hour`, `one every ${short(3600 / state.videos_per_hour)}`);
  else set("pace", "not known yet");
  const others = [scheduled && `${scheduled.toLocaleString()} for later`, deferred && `${deferred.toLocaleString()} after others`];
  set("waiting", count(queued, "video"), others.filter(Boolean).join(", "));
  set("hour", count(state.finished_last_hour, "video"), state.failed_last_hour ? `${state.failed_last_hour.toLocaleString()} failed` : "");
  if (state.disk === null) set("disk", "not here", "the storage is remote");
  else if (!state.disk.total) set("disk", "not known");
  else set("disk", `${bytes(state.disk.free)} free`, `of ${bytes(state.disk.total)}`);
}

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
    const pace = group.pace_s ? `one video every ${short(group.pace_s)}` : "";
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
  found.forEach((job, index) => {
    const row = rows.get(job.id) ?? newRow(job);
    update(row, job);
    // Elements that are in their place are not moved, so that they keep the focus.
    if (list.children[index] !== row.root) list.insertBefore(row.root, list.children[index] ?? null);
  });
  showPicked();
}

function newRow(job) {
  const row = { id: job.id, ...copy("row-template") };
  row.root.dataset.id = job.id;
  row.parts.pick.checked = selected.has(job.id);
  setText(row.parts.name, job.name);
  row.parts.photo.src = pictureOf(job.id);
  row.parts.photo.addEventListener("error", () => { row.parts.photo.removeAttribute("src"); });
  row.parts.pick.setAttribute("aria-label", `Select ${job.name}`);
  row.parts.bar.setAttribute("aria-label", `Progress of ${job.name}`);
  row.parts.front.setAttribute("aria-label", `Move ${job.name} to the front`);
  row.parts.cancel.setAttribute("aria-label", `Cancel ${job.name}`);
  row.parts.pick.addEventListener("change", () => {
    if (row.parts.pick.checked) selected.add(job.id);
    else selected.delete(job.id);
    isAll = isAll && row.parts.pick.checked;
    showPicked();
  });
  row.parts.front.addEventListener("click", (event) => run(event.target, problem, () => act("front", [job.id])));
  row.parts.cancel.addEventListener("click", (event) => cancel(event.target, [job.id]));
  rows.set(job.id, row);
  return row;
}

function update(row, job) {
  row.status = job.status;
  setText(row.parts.state, job.state);
  row.parts.bar.hidden = job.status !== "started";
  row.parts.bar.max = Math.max(1, job.steps);
  row.parts.bar.value = job.step;
  row.parts.front.hidden = job.status !== "queued";
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
