// The one connection of the page: receives the state each second, shows when it is lost, and connects again.
import { byId, setText } from "./dom.js";
import { clock } from "./format.js";

// The server sends the state each second.
const SILENT_MS = 6000;
const RETRY_MS = 1500;
const BACK_MS = 3000;

let source = null;
let silence = 0;
let lostAt = null;
let retry = 0;
//: Whether the page was hidden, without a connection.
let wasHidden = false;
//: Whether the server runs but cannot reach Redis.
let isOut = false;

/** Call `onState` with each state, and `onBack` when the connection works again. */
export function connect(onState, onBack) {
  const open = () => {
    clearTimeout(retry);
    if (source) source.close();
    source = new EventSource("/page/events");
    let state = {}; // the first event has all of it, and the others what has changed
    source.addEventListener("state", (event) => {
      heard();
      const changed = JSON.parse(event.data);
      state = changed.outage ? changed : { ...state, ...changed, outage: "" };
      const isBack = isOut && !state.outage;
      show(state.outage);
      onState(state);
      if (isBack || wasHidden) onBack();
      wasHidden = false;
      if (document.hidden) leave();
    });
    source.onerror = () => {
      // The browser itself tries again only while the answer was good.
      lost();
      source.close();
      again(RETRY_MS);
    };
    listen();
  };
  const again = (after_ms) => {
    clearTimeout(retry);
    retry = setTimeout(async () => {
      try {
        const answer = await fetch("/page/alive");
        if (answer.status === 401) location.reload();
        if (!answer.ok) throw new Error();
        open();
      } catch {
        lost();
        again(RETRY_MS);
      }
    }, after_ms);
  };
  const listen = () => {
    clearTimeout(silence);
    silence = setTimeout(() => {
      lost();
      source.close();
      again(0);
    }, SILENT_MS);
  };
  const heard = () => {
    listen();
    if (lostAt === null) return;
    lostAt = null;
    document.body.classList.remove("is-stale");
    setText(byId("connection"), "Connected again.");
    byId("connection").className = "connection is-back";
    setTimeout(() => { if (lostAt === null && byId("connection").classList.contains("is-back")) hide(); }, BACK_MS);
    onBack();
  };
  addEventListener("online", () => { if (lostAt !== null) again(0); });
  // A page that leaves gives its connection back at once, and so does a hidden one: a browser has six for each server.
  const leave = () => {
    clearTimeout(silence);
    clearTimeout(retry);
    source.close();
    wasHidden = true;
  };
  addEventListener("pagehide", leave);
  addEventListener("pageshow", (event) => { if (event.persisted && !document.hidden) open(); });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) open();
    // One that has lost its connection tries on, since uploads wait for it.
    else if (lostAt === null && !isOut) leave();
  });
  open();
}

function lost() {
  if (lostAt === null) lostAt = new Date();
  clearTimeout(silence);
  document.body.classList.add("is-stale");
  byId("connection").className = "connection is-lost";
  setText(byId("connection"), `The connection to svdq is lost since ${clock(lostAt)}. Trying again…`);
}

function show(outage) {
  isOut = Boolean(outage);
  if (outage) {
    document.body.classList.add("is-stale");
    byId("connection").className = "connection is-lost";
    setText(byId("connection"), outage);
  } else if (byId("connection").classList.contains("is-lost")) {
    document.body.classList.remove("is-stale");
    hide();
  }
}

function hide() {
  byId("connection").className = "connection";
  setText(byId("connection"), "");
}
