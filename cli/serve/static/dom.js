// Small helpers for elements and requests.

export const byId = (id) => document.getElementById(id);

/** Copy a <template>; returns the element and its parts by their data-part. */
export function copy(templateId) {
  const root = byId(templateId).content.firstElementChild.cloneNode(true);
  const parts = {};
  root.querySelectorAll("[data-part]").forEach((part) => { parts[part.dataset.part] = part; });
  return { root, parts };
}

/** Set a text only if it differs, so that screen readers and selections are left alone. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** An error whose message is a sentence for the user; `status` is 0 when the server cannot be reached. */
export class RequestError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const UNREACHABLE = "svdq cannot be reached.";

/** Forget that the server could not be reached, wherever it says so. */
export function forgetOutage() {
  document.querySelectorAll(".problem, .status").forEach((place) => { if (place.textContent === UNREACHABLE) setText(place, ""); });
}

export function sentenceOf(status, text) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `svdq answered with the error ${status}.`;
  }
}

/** Send a request, with a JSON body if one is given, and return the JSON answer. */
export async function request(method, url, body, options = {}) {
  const headers = { Accept: "application/json" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(url, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError(UNREACHABLE, 0);
  }
  if (response.status === 401) location.reload(); // the cookie has expired: show the way in
  if (!response.ok) throw new RequestError(sentenceOf(response.status, await response.text()), response.status);
  return response.json();
}

//: Jobs in one request.
const AT_ONCE = 5000;
//: Browsers keep requests of at most 64 kB alive when their page is left.
const KEPT_ALIVE = 1000;

/** Do an action on jobs, also when the page is left; returns sentences about those it could not be done on, by id. */
export async function tryOn(action, ids) {
  const problems = {};
  for (let begin = 0; begin === 0 || begin < ids.length; begin += AT_ONCE) {
    Object.assign(problems, (await request("POST", "/page/actions", { action, ids: ids.slice(begin, begin + AT_ONCE) }, { keepalive: ids.length < KEPT_ALIVE })).problems);
  }
  return problems;
}

/** The first of such sentences and the number of others; "" for none. */
export function sumOf(problems) {
  const [first, ...others] = Object.values(problems);
  if (!first) return "";
  return others.length ? `${first} (and ${others.length.toLocaleString()} more)` : first;
}

/** Do an action on jobs; returns a sentence about those it could not be done on, or "". */
export const act = async (action, ids = []) => sumOf(await tryOn(action, ids));

/** Have a click with Shift on a checkbox do to all from the last clicked one on what it does to itself. */
export function ranges(container, selector) {
  let last = null;
  container.addEventListener("click", (event) => {
    const box = event.target;
    if (!box.matches(selector)) return;
    const all = [...container.querySelectorAll(selector)];
    const [from, to] = [all.indexOf(last), all.indexOf(box)].sort((one, other) => one - other);
    last = box;
    if (!event.shiftKey || from < 0) return;
    for (const other of all.slice(from, to + 1).filter((each) => each.checked !== box.checked)) {
      other.checked = box.checked;
      other.dispatchEvent(new Event("change"));
    }
  });
}

/** Run an action of a button, once at a time, and show what went wrong. A disabled button would lose the focus. */
export async function run(button, problem, work) {
  if (button?.ariaBusy === "true") return;
  setText(problem, "");
  if (button) button.ariaBusy = "true";
  try {
    setText(problem, (await work()) || "");
  } catch (error) {
    setText(problem, error.message);
  } finally {
    if (button) button.ariaBusy = "false";
  }
}
