// Whose videos the page shows: one's own, or everybody's, where there are several owners.
const selects = [...document.querySelectorAll("select.whose")];
const fields = [...document.querySelectorAll(".whose-field")];
const { owner, whose } = document.querySelector("main").dataset;
let changed = () => {};

/** Whether there are several owners. */
const areSeveral = () => !fields[0].hidden;
export const isMine = () => areSeveral() && selects[0].value === "mine";
/** Whether a video is shown; one without an owner is everybody's. */
export const isShown = (job) => !isMine() || ["", owner].includes(job.owner);
/** The owner of a video where that is worth a word. */
export const ownerOf = (job) => (areSeveral() && !isMine() ? job.owner : "");

/** Call `onChange` when other videos are to be shown. */
export function start(onChange) {
  changed = onChange;
  const set = (value) => selects.forEach((select) => { select.value = value; });
  set(localStorage.getItem("whose") ?? whose);
  selects.forEach((select) => select.addEventListener("change", () => {
    localStorage.setItem("whose", select.value);
    set(select.value);
    changed();
  }));
}

export function refresh(state) {
  if (state.several_owners === areSeveral()) return;
  fields.forEach((field) => { field.hidden = !state.several_owners; });
  changed();
}
