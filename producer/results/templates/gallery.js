"use strict";
(function () {
  const cards = Array.from(document.querySelectorAll(".card"));
  const search = document.getElementById("search");
  const state = document.getElementById("state");
  const count = document.getElementById("count");
  const stillness = window.matchMedia("(prefers-reduced-motion: reduce)");

  // A browser holds only so many videos: those near the window are loaded, and let go when they are far away again.
  const near = new IntersectionObserver(function (entries) {
    entries.forEach(function (entry) {
      const video = entry.target;
      if (entry.isIntersecting && !video.hasAttribute("src")) {
        video.preload = "metadata";
        video.src = video.dataset.src + "#t=0.001";
      } else if (!entry.isIntersecting && video.hasAttribute("src")) {
        video.removeAttribute("src");
        video.load();
      }
    });
  }, { rootMargin: "800px" });
  document.querySelectorAll("video").forEach(function (video) { near.observe(video); });

  function play(media) {
    if (media.tagName === "VIDEO") {
      if (!media.hasAttribute("src")) { media.src = media.dataset.src; }
      media.play().catch(function () {});
    } else {
      if (!media.dataset.still) { media.dataset.still = media.src; }
      media.src = media.dataset.src;
    }
  }

  function stop(media) {
    if (media.tagName === "VIDEO") {
      media.pause();
      media.currentTime = 0.001;
    } else if (media.dataset.still) {
      media.src = media.dataset.still;
    }
  }

  document.querySelectorAll(".frame").forEach(function (frame) {
    const media = frame.querySelector("[data-src]");
    if (!media) { return; }
    ["mouseenter", "focus"].forEach(function (name) {
      frame.addEventListener(name, function () { if (!stillness.matches) { play(media); } });
    });
    ["mouseleave", "blur"].forEach(function (name) { frame.addEventListener(name, function () { stop(media); }); });
    if (frame.tagName === "BUTTON") { frame.addEventListener("click", function () { play(media); }); }
    frame.addEventListener("keydown", function (event) {
      if (event.key === "Escape") { stop(media); }
    });
  });

  // The videos of a photo beside each other, the oldest first, below the photo's path; photos by folder and name.
  const list = document.querySelector(".cards");
  const order = document.getElementById("order");
  const photos = new Map();
  cards.forEach(function (card) {
    const key = card.dataset.image || card.dataset.source;
    if (!photos.has(key)) { photos.set(key, { source: card.dataset.source, cards: [], heading: null }); }
    photos.get(key).cards.unshift(card);
  });
  const groups = Array.from(photos.values()).sort(function (one, other) {
    return one.source.localeCompare(other.source, undefined, { numeric: true });
  });

  function arrange() {
    groups.forEach(function (group) { if (group.heading) { group.heading.remove(); } });
    if (!order.value) {
      list.append.apply(list, cards);
    } else {
      groups.forEach(function (group) {
        if (!group.heading) {
          group.heading = document.createElement("li");
          group.heading.className = "photo";
          group.heading.appendChild(document.createElement("h2")).textContent = group.source;
        }
        list.append.apply(list, [group.heading].concat(group.cards));
      });
    }
    filter();
  }

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    cards.forEach(function (card) {
      const fits = (!state.value || card.dataset.state === state.value) &&
        words.every(function (word) { return card.dataset.search.includes(word); });
      card.hidden = !fits;
      shown += fits ? 1 : 0;
    });
    groups.forEach(function (group) {
      if (group.heading) { group.heading.hidden = group.cards.every(function (card) { return card.hidden; }); }
    });
    count.value = shown === cards.length ? cards.length + " shown" : shown + " of " + cards.length + " shown";
  }
  search.form.addEventListener("submit", function (event) { event.preventDefault(); });
  search.addEventListener("input", filter);
  state.addEventListener("change", filter);
  order.addEventListener("change", arrange);
  document.querySelector(".tools").hidden = false;
  filter();
})();
