// The dialog that plays two to four videos in sync.
import { byId, run, setText } from "./dom.js";
import { label, value } from "./format.js";
import { contentOf, isCalm, pictureOf } from "./media.js";

//: Largest difference between two videos, as a share of their length.
const MAX_DRIFT = 0.04;
const dialog = byId("compare");
let videos = [];
let isPlaying = false;
let frame = 0;

export function start() {
  dialog.querySelector("[data-close]").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    cancelAnimationFrame(frame);
    isPlaying = false;
    byId("compared").replaceChildren();
  });
  byId("compare-play").addEventListener("click", () => play(!isPlaying));
  dialog.addEventListener("keydown", (event) => {
    if (event.key !== " " || event.target.matches("button")) return;
    play(!isPlaying);
    event.preventDefault();
  });
  byId("compare-position").addEventListener("input", (event) => {
    play(false);
    const share = event.target.value / 1000;
    videos.forEach((video) => { if (video.duration) video.currentTime = share * video.duration; });
  });
}

/** Play results side by side; `mark(results, verdict)` keeps or rejects. */
export function compare(results, mark) {
  const names = Object.keys(Object.assign({}, ...results.map((result) => result.parameters)));
  const differing = names.filter((name) => new Set(results.map((result) => JSON.stringify(result.parameters[name]))).size > 1);
  videos = [];
  byId("compared").replaceChildren(...results.map((result) => {
    const figure = document.createElement("figure");
    const media = document.createElement(result.kind === "mp4" ? "video" : "img");
    if (result.kind === "mp4") {
      Object.assign(media, { muted: true, loop: true, playsInline: true, preload: "auto", src: contentOf(result) });
      videos.push(media);
    } else {
      media.alt = result.name;
      media.src = result.kind === "png" ? pictureOf(result.id) : contentOf(result);
    }
    media.setAttribute("aria-label", result.name);
    const caption = document.createElement("figcaption");
    caption.className = "hint";
    const words = differing.map((name) => `${label(name)} ${value(result.parameters[name])}`);
    setText(caption, [result.name, ...words].join(" · "));
    figure.append(media, caption, verdictsOf(result, mark));
    return figure;
  }));
  dialog.showModal();
  play(!isCalm());
}

/** The buttons that keep and reject one of the videos. */
function verdictsOf(result, mark) {
  const buttons = document.createElement("p");
  buttons.className = "buttons";
  const show = () => [...buttons.children].forEach((button) => { button.ariaPressed = String(result.mark === button.value); });
  for (const [verdict, word] of [["keep", "Keep"], ["reject", "Reject"]]) {
    const button = Object.assign(document.createElement("button"), { type: "button", value: verdict, textContent: word });
    button.setAttribute("aria-label", `${word} ${result.name}, seed ${result.seed}`);
    button.addEventListener("click", () => run(button, byId("compare-problem"), async () => {
      const sentence = await mark([result], verdict);
      show();
      return sentence;
    }));
    buttons.append(button);
  }
  show();
  return buttons;
}

function play(isWanted) {
  isPlaying = isWanted && videos.length > 0;
  setText(byId("compare-play"), isPlaying ? "Pause" : "Play");
  byId("compare-play").disabled = !videos.length;
  cancelAnimationFrame(frame);
  videos.forEach((video) => (isPlaying ? video.play().catch(() => {}) : video.pause()));
  if (isPlaying) frame = requestAnimationFrame(follow);
}

/** Keep the others at the place of the first, by their share of the whole: they may differ in length. */
function follow() {
  const [first, ...others] = videos;
  if (first.duration) {
    const share = first.currentTime / first.duration;
    byId("compare-position").value = Math.round(share * 1000);
    for (const video of others) {
      if (!video.duration) continue;
      video.playbackRate = Math.min(16, Math.max(0.0625, video.duration / first.duration));
      const drift = Math.abs(video.currentTime / video.duration - share);
      if (drift > MAX_DRIFT && drift < 1 - MAX_DRIFT && !video.seeking) video.currentTime = share * video.duration;
    }
  }
  frame = requestAnimationFrame(follow);
}
