// The groups of the grid: the videos of a photo, of a day, or of a run.
import { clock, count } from "./format.js";

//: Milliseconds without a finished video that end a run.
const GAP_MS = 60 * 60 * 1000;

const endOf = (result) => new Date(result.ended_at ?? 0);

/** The key of the group of a result; `last` is the result before it with its key, in the order of the grid. */
export function keyOf(kind, result, last) {
  if (kind === "photo") return result.photo;
  if (kind === "day") return endOf(result).toDateString();
  if (kind === "run") return last && endOf(last.result) - endOf(result) < GAP_MS ? last.key : String(endOf(result).getTime());
  return "";
}

/** The heading of a group; while `isOpen`, the last one may have more videos. */
export function headingOf(list, kind, key, results, isOpen) {
  const heading = list.querySelector(`.group-heading[data-key="${CSS.escape(key)}"]`) ?? document.createElement("li");
  heading.className = "group-heading";
  heading.dataset.key = key;
  const title = heading.firstElementChild ?? heading.appendChild(document.createElement("h3"));
  const [first, last] = [endOf(results.at(-1)), endOf(results[0])];
  const name = {
    photo: () => results[0].photo_name,
    day: () => last.toLocaleDateString([], { weekday: "long", day: "numeric", month: "long", year: "numeric" }),
    run: () => `${clock(first)} to ${clock(last)}`,
  }[kind]();
  const text = `${name}: ${count(results.length, "video")}${isOpen && kind !== "photo" ? " so far" : ""}`;
  if (title.textContent !== text) title.textContent = text;
  return heading;
}
