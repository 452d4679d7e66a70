// How the results look: the size of their pictures, with details or without, over the whole width or not.
import { byId } from "./dom.js";

const STYLES = { details: "has-details", wide: "is-wide" };

//: Two columns on a phone.
const SMALL = "9";

export function start() {
  const size = byId("thumb-size");
  const showSize = () => byId("cards").style.setProperty("--thumb", `${size.value}rem`);
  size.value = localStorage.getItem("thumb-size") ?? (matchMedia("(max-width: 42rem)").matches ? SMALL : size.value);
  size.addEventListener("input", () => { localStorage.setItem("thumb-size", size.value); showSize(); });
  showSize();
  for (const [id, style] of Object.entries(STYLES)) {
    const box = byId(id);
    const show = () => document.body.classList.toggle(style, box.checked);
    box.checked = localStorage.getItem(id) === "yes";
    box.addEventListener("change", () => { localStorage.setItem(id, box.checked ? "yes" : ""); show(); });
    show();
  }
}
