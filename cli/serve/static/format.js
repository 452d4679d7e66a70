// Formats numbers, times and states in the words of the page.

const clockFormat = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit" });
const secondsFormat = new Intl.DateTimeFormat([], { timeStyle: "medium" });
const dayFormat = new Intl.DateTimeFormat([], { weekday: "short", day: "numeric", month: "short" });

export function count(number, thing) {
  return number === 1 ? `1 ${thing}` : `${number.toLocaleString()} ${thing}s`;
}

/** Seconds in the largest unit, hours with minutes: 5 s, 3 min, 2 h 10 min. */
export function duration(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 90) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 && minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
}

/** A time of day, with the date if it is not today. */
export function clock(moment, now = new Date(), hasSeconds = false) {
  const time = (hasSeconds ? secondsFormat : clockFormat).format(moment);
  return moment.toDateString() === now.toDateString() ? time : `${dayFormat.format(moment)}, ${time}`;
}

/** The moment some seconds from now. */
export function inSeconds(seconds) {
  return new Date(Date.now() + seconds * 1000);
}

export function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (number >= 1000 && unit < units.length - 1) {
    number /= 1000;
    unit += 1;
  }
  return `${number >= 10 || unit === 0 ? Math.round(number) : number.toFixed(1)} ${units[unit]}`;
}

/** Words for the name of a parameter: the label of its field in the form, or the name without underscores. */
export function label(name) {
  const found = document.querySelector(`#add [data-label="${CSS.escape(name)}"]`);
  const words = name.replaceAll("_", " ");
  return found ? found.textContent : words.charAt(0).toUpperCase() + words.slice(1);
}

export function value(given) {
  if (given === null || given === "") return "default";
  return Array.isArray(given) ? given.join(", ") : String(given);
}
