// What the reader points at or has focused: the one card that plays, is framed, and takes the keys.
import { byId } from "./dom.js";
import { isCalm } from "./media.js";

const list = byId("cards");
const TYPING = "textarea, input:not([type=checkbox])";

let cardOf = () => null;
//: The card that plays and takes the keys: the one that was pointed at or focused last.
let current = null;
//: Whether the pointer counts: after a step of the keyboard, cards that scroll below a resting pointer do not.
let isPointing = false;
//: What the reader has pointed at, focused or typed into last.
let place = null;

export const isCurrent = (card) => card === current;

/** Whether the reader works in the grid, or is scrolled down: nothing may move then. */
export function isWorking() {
  // Where the last tap was, a touch screen hovers on.
  return (list.matches(":hover") && matchMedia("(hover: hover)").matches) || list.contains(document.activeElement) || Boolean(document.querySelector("dialog[open]"))
    || (list.children.length > 0 && list.getBoundingClientRect().top < 0 && !place?.closest?.("#add, #now"));
}

/** Play this card and no other, unless the reader prefers less motion. */
export function choose(card) {
  if (card === current) return;
  current?.root.classList.remove("is-current");
  current?.media?.stop();
  current = card;
  card?.root.classList.add("is-current");
  if (!isCalm()) card?.media?.play();
}

/** Go to a card; a resting pointer does not count any more. */
export function goTo(card) {
  isPointing = false;
  card.parts.open.focus();
  choose(card);
}

const pointed = () => (isPointing ? cardOf(list.querySelector(".card:hover")) : null);

/**
 * Keep `current` at the card that was pointed at or focused last, and hand it the keys.
 * `doing` has `cardOf(element)`, `neighbor(card, step)` and `mark(card, verdict)`, which may go to the next card.
 */
export function follow(doing) {
  ({ cardOf } = doing);
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
  document.addEventListener("keydown", (event) => onKey(event, doing));
}

/** K, R and Space on the current card, arrows on the focused one. */
function onKey(event, doing) {
  const { target } = event;
  if (event.key === "Tab") isPointing = false;
  if (!current || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  // A list takes letters, too, but not while the reader points at a video.
  if (target.matches(TYPING) || (target.matches("select") && current !== pointed())) return;
  const verdict = { k: "keep", r: "reject" }[event.key.toLowerCase()];
  if (verdict) {
    doing.mark(current, verdict);
    event.preventDefault();
  }
  const card = cardOf(target);
  if (event.key === " " && (target === document.body || target === card?.parts.open)) {
    current.media?.toggle();
    event.preventDefault();
  }
  if (target !== card?.parts.open) return;
  const columns = getComputedStyle(list).gridTemplateColumns.split(" ").length;
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
  const other = step && doing.neighbor(card, step);
  if (other) {
    goTo(other);
    event.preventDefault();
  }
}
