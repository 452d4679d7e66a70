// Settings that are saved in this browser under a name.
import { byId } from "./dom.js";

const select = byId("preset");
const saved = () => JSON.parse(localStorage.getItem("presets") ?? "{}");

/** `collect` returns all settings of the form, and `apply` fills them in. */
export function start(collect, apply) {
  list("");
  select.addEventListener("change", (event) => {
    event.stopPropagation(); // it is no setting itself
    byId("delete-preset").hidden = !select.value;
    if (select.value) apply(saved()[select.value]);
  });
  byId("save-preset").addEventListener("click", () => {
    const name = prompt("Save these settings as:", select.value)?.trim();
    if (name) put({ ...saved(), [name]: collect() }, name);
  });
  byId("delete-preset").addEventListener("click", () => {
    const { [select.value]: _gone, ...others } = saved();
    put(others, "");
  });
}

function put(presets, name) {
  localStorage.setItem("presets", JSON.stringify(presets));
  list(name);
}

function list(name) {
  select.replaceChildren(new Option("none", ""), ...Object.keys(saved()).sort().map((each) => new Option(each, each)));
  select.value = name;
  byId("delete-preset").hidden = !name;
}
