// The elements that show a finished video: <video> for mp4, <img> for gif, webp and frames.

/** The address of a finished video; frames come as a zip. */
export const contentOf = (result) => `/page/content/${result.id}?format=${result.kind}`;
/** The address of its first frame or, before it is finished, of its photo. */
export const pictureOf = (id) => `/page/picture/${id}`;

/** The address of how a video in flight looks so far, when `step` steps are done. */
export const soFarOf = (id, step) => `/page/preview/${id}?step=${step}`;
/** The address of its photo, as the video shows it. */
export const photoOf = (id) => `/page/photo/${id}`;

/** Whether the reader prefers less motion. */
export const isCalm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

const MAX_LOADED = 4;
//: What is loaded of videos, the one that was played last at the end.
let loaded = [];

/** An element for a result that loads nothing yet; `load`, `play`, `toggle` and `stop` do. */
export function mediaOf(result) {
  if (result.kind === "mp4") {
    const video = document.createElement("video");
    Object.assign(video, { muted: true, loop: true, playsInline: true, preload: "none" });
    const media = {
      element: video,
      load: () => { if (!video.poster) video.poster = pictureOf(result.id); },
      unload: () => {
        loaded = loaded.filter((each) => each !== media);
        if (video.hasAttribute("src")) { video.removeAttribute("src"); video.load(); }
      },
      play: () => {
        if (!video.hasAttribute("src")) video.src = contentOf(result);
        loaded = [...loaded.filter((each) => each !== media), media];
        if (loaded.length > MAX_LOADED) loaded[0].unload();
        video.play().catch(() => {}); // interrupted by a pause
      },
      toggle() { if (video.paused) this.play(); else video.pause(); },
      stop: () => { video.pause(); if (video.readyState) video.currentTime = 0; },
    };
    return media;
  }
  const image = document.createElement("img");
  image.alt = "";
  const moves = result.kind === "gif" || result.kind === "webp";
  const still = () => { if (image.getAttribute("src") !== pictureOf(result.id)) image.src = pictureOf(result.id); };
  return {
    element: image,
    load: still,
    unload: () => {},
    play: () => { if (moves && image.getAttribute("src") !== contentOf(result)) image.src = contentOf(result); },
    toggle() { if (image.getAttribute("src") === contentOf(result)) still(); else this.play(); },
    stop: still,
  };
}
