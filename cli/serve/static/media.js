// The elements that show a finished video: <video> for mp4, <img> for gif, webp and frames.

export const contentOf = (id) => `/v1/videos/${id}/content`;
export const stillOf = (id) => `/page/still/${id}`;

const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** An element for a result that loads nothing yet; `load`, `play` and `stop` do. */
export function mediaOf(result) {
  if (result.kind === "mp4") {
    const video = document.createElement("video");
    Object.assign(video, { muted: true, loop: true, playsInline: true, preload: "none" });
    return {
      element: video,
      load: () => { if (!video.poster) video.poster = stillOf(result.id); },
      unload: () => { if (video.hasAttribute("src")) { video.removeAttribute("src"); video.load(); } },
      play: () => {
        if (!video.hasAttribute("src")) video.src = contentOf(result.id);
        video.play().catch(() => {}); // interrupted by a pause
      },
      stop: () => { video.pause(); if (video.readyState) video.currentTime = 0; },
    };
  }
  const image = document.createElement("img");
  image.alt = "";
  const moves = result.kind === "gif" || result.kind === "webp";
  const still = () => { if (image.getAttribute("src") !== stillOf(result.id)) image.src = stillOf(result.id); };
  return {
    element: image,
    load: still,
    unload: () => {},
    play: () => { if (moves) image.src = contentOf(result.id); },
    stop: still,
  };
}

/** Play on hover and focus, unless the reader prefers less motion. */
export function playOn(target, media) {
  for (const name of ["mouseenter", "focus"]) target.addEventListener(name, () => { if (!calm.matches) media.play(); });
  for (const name of ["mouseleave", "blur"]) target.addEventListener(name, () => { if (document.activeElement !== target || name === "blur") media.stop(); });
}
