// The element of one result in the grid.
import { byId, copy, run, setText } from "./dom.js";
import { clock } from "./format.js";
import { mediaOf } from "./media.js";
import { ownerOf } from "./whose.js";

const problem = byId("results-problem");
const ENDS = { finished: "Its files were removed", failed: "Failed" };

/**
 * Make the card of a result: {result, root, parts, media}.
 * `doing` has what its buttons do: `open`, `mark(results, verdict)`, `pick(result, isPicked)`, `again(result)`.
 */
export function newCard(result, doing) {
  const card = { result, ...copy("card-template"), media: null };
  const { root, parts } = card;
  const isFinished = result.status === "finished";
  root.dataset.id = result.id;
  root.classList.toggle("is-unfinished", !isFinished);
  setText(parts.name, result.name);
  setText(parts.prompt, result.prompt ?? "");
  parts.pick.setAttribute("aria-label", `Select ${result.name}`);
  parts.pick.addEventListener("change", () => doing.pick(card.result, parts.pick.checked));
  if (isFinished && result.is_there) {
    card.media = mediaOf(result);
    parts.open.append(card.media.element);
    parts.open.setAttribute("aria-label", `Open ${result.name}, seed ${result.seed}`);
  } else {
    parts.open.textContent = ENDS[result.status] ?? "Canceled";
    parts.open.setAttribute("aria-label", `Open ${result.name}: ${parts.open.textContent}`);
  }
  if (result.error) {
    parts.error.hidden = false;
    setText(parts.error, result.error);
  }
  parts.open.addEventListener("click", () => doing.open(card.result));
  for (const verdict of ["keep", "reject"]) {
    parts[verdict].hidden = !isFinished;
    parts[verdict].setAttribute("aria-label", `${verdict === "keep" ? "Keep" : "Reject"} ${result.name}`);
    parts[verdict].addEventListener("click", (event) => run(event.target, problem, () => doing.mark([card.result], verdict)));
  }
  if (!isFinished) setText(parts.again, "Try again");
  parts.again.setAttribute("aria-label", isFinished ? `Again: ${result.name}, with another seed` : `Try again: ${result.name}`);
  parts.again.addEventListener("click", (event) => run(event.target, problem, () => doing.again(card.result)));
  const about = [ownerOf(result), result.ended_at && clock(new Date(result.ended_at)), result.seed !== null && `seed ${result.seed}`, result.size, result.notice];
  setText(parts.about, about.filter(Boolean).join(" · "));
  showMark(card);
  return card;
}

/** Show the verdict about a card. */
export function showMark({ result, root, parts }) {
  root.classList.toggle("is-keep", result.mark === "keep");
  root.classList.toggle("is-reject", result.mark === "reject");
  setText(parts.mark, { keep: "Kept", reject: "Rejected" }[result.mark] ?? "");
  parts.keep.ariaPressed = String(result.mark === "keep");
  parts.reject.ariaPressed = String(result.mark === "reject");
}
