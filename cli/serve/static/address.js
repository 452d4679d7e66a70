// What the address of the page says: the filter, the grouping, and the video that is open.

/** The value of a name in the address, or "". */
export const get = (name) => new URLSearchParams(location.search).get(name) ?? "";

/** Put values into the address, in a new entry of the history if `isNew`; empty ones are left out. */
export function put(values, isNew = false) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(values)) {
    if (value) query.set(name, value);
    else query.delete(name);
  }
  const url = `${location.pathname}${query.size ? `?${query}` : ""}${location.hash}`;
  if (isNew) history.pushState({ isOurs: true }, "", url);
  else history.replaceState(history.state, "", url);
}
