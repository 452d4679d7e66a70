// Small pictures of chosen photos, made in the browser, with the part that a crop removes in the dark.

//: A crop that removes at most this share of a side is not worth a word; as the server's.
const WORTH_A_WORD = 0.2;

const photos = new WeakMap();
let last = Promise.resolve();

// A photo is decoded when it is seen, one at a time: hundreds may be chosen.
const seen = new IntersectionObserver((entries) => {
  for (const { target } of entries.filter((entry) => entry.isIntersecting)) {
    seen.unobserve(target);
    last = last.then(() => decode(photos.get(target)));
  }
}, { rootMargin: "200px" });

/** Make the thumbnail of a photo when it is seen; call `onSize` when `photo.size` and `photo.bitmap` are known, or `onBad`. */
export function watch(photo, onSize, onBad) {
  photos.set(photo.root, { photo, onSize, onBad });
  seen.observe(photo.root);
}

async function decode({ photo, onSize, onBad }) {
  const { canvas } = photo.parts;
  try {
    const whole = await createImageBitmap(photo.file);
    photo.size = [whole.width, whole.height];
    const scale = Math.min(canvas.width / whole.width, canvas.height / whole.height);
    const [resizeWidth, resizeHeight] = photo.size.map((side) => Math.max(1, Math.round(side * scale)));
    photo.bitmap = await createImageBitmap(whole, { resizeWidth, resizeHeight, resizeQuality: "medium" });
    whole.close();
  } catch {
    onBad(); // or a format that this browser cannot show, such as HEIC
    return;
  }
  onSize(photo);
}

/** The shares of the width and height that a crop to `target`, [width, height], keeps; both 1 without one. */
function kept(photo, target) {
  if (!photo.size || !target) return [1, 1];
  const scale = Math.max(target[0] / photo.size[0], target[1] / photo.size[1]);
  return target.map((side, index) => side / (photo.size[index] * scale));
}

/** Draw a photo and what is cropped. */
export function draw(photo, target) {
  const { canvas } = photo.parts;
  const { bitmap } = photo;
  if (!bitmap) return;
  const context = canvas.getContext("2d");
  const [left, top] = [(canvas.width - bitmap.width) / 2, (canvas.height - bitmap.height) / 2];
  const [keptWidth, keptHeight] = kept(photo, target);
  const inner = [left + bitmap.width * (1 - keptWidth) / 2, top + bitmap.height * (1 - keptHeight) / 2, bitmap.width * keptWidth, bitmap.height * keptHeight];
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, left, top);
  if (keptWidth === 1 && keptHeight === 1) return;
  context.fillStyle = "#000b";
  context.beginPath();
  context.rect(left, top, bitmap.width, bitmap.height);
  context.rect(...inner);
  context.fill("evenodd");
}

/** Say what a crop removes, such as "crop removes 62% of the height"; "" if that is little. */
export function cropOf(photo, target) {
  const removed = kept(photo, target).map((share) => 1 - share);
  const most = Math.max(...removed);
  return most > WORTH_A_WORD ? `crop removes ${Math.round(most * 100)}% of the ${removed[0] === most ? "width" : "height"}` : "";
}
