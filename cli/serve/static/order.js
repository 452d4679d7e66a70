// The order of the queue: rows are dragged, or moved by the arrow keys on their handle.
import { request, run } from "./dom.js";

let dragged = null;
/** Whether a row is dragged now. */
export const isDragging = () => Boolean(dragged?.isConnected);

/** Have the rows of a list be moved; only those that are draggable wait in the queue. */
export function startOrder(list, problem) {
  const rowOf = (event) => event.target.closest?.("[draggable=true]");
  /** Place a row before another one, or at the end of those in the list. */
  const place = (row, before) => run(null, problem, async () => {
    const last = [...list.querySelectorAll("[draggable=true]")].at(-1);
    if (row === before || row.nextElementSibling === before || (!before && row === last)) return "";
    // Nothing is placed behind a video, so the last one changes places with the row.
    const pairs = before ? [[row, before]] : [[row, last], [last, row]];
    list.insertBefore(row, before ?? null);
    for (const [moved, target] of pairs) {
      const answer = await request("POST", "/page/actions", { action: "place", ids: [moved.dataset.id], before: target.dataset.id });
      const [sentence] = Object.values(answer.problems);
      if (sentence) return sentence;
    }
    return "";
  });
  list.addEventListener("dragstart", (event) => {
    dragged = rowOf(event);
    if (dragged) event.dataTransfer.effectAllowed = "move";
  });
  list.addEventListener("dragover", (event) => {
    const row = rowOf(event);
    list.querySelectorAll(".is-target").forEach((each) => each.classList.remove("is-target"));
    if (!dragged || !row) return;
    event.preventDefault();
    row.classList.add("is-target");
  });
  list.addEventListener("dragend", () => {
    dragged = null;
    list.querySelectorAll(".is-target").forEach((each) => each.classList.remove("is-target"));
  });
  list.addEventListener("drop", (event) => {
    const row = rowOf(event);
    if (!dragged || !row) return;
    event.preventDefault();
    const box = row.getBoundingClientRect();
    place(dragged, event.clientY < box.top + box.height / 2 ? row : row.nextElementSibling);
  });
  list.addEventListener("keydown", async (event) => {
    const row = rowOf(event);
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!step || !row || !event.target.matches("[data-part=handle]")) return;
    event.preventDefault();
    const other = step < 0 ? row.previousElementSibling : row.nextElementSibling;
    if (!other?.matches("[draggable=true]")) return;
    await (step < 0 ? place(row, other) : place(other, row));
    event.target.focus();
  });
}
