// The sections as tabs, where there is room for one of them only.
import { byId } from "./dom.js";

const links = [...document.querySelectorAll(".top nav a")];

/** Show a section: `add`, `now` or `results`. */
export function show(name) {
  document.body.dataset.tab = name;
  for (const link of links) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

export function start() {
  const named = links.find((link) => link.hash === location.hash);
  show(named ? named.hash.slice(1) : "add");
  for (const link of [...links, document.querySelector(".skip")]) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      show(link.hash.slice(1));
      history.replaceState(history.state, "", link.hash);
      byId(link.hash.slice(1)).scrollIntoView();
      byId(link.hash.slice(1)).focus({ preventScroll: true });
    });
  }
}
