// Collects photos that are dropped, pasted or chosen, with the files of dropped folders.
import { byId } from "./dom.js";

const suffixes = new Set(byId("photos").dataset.suffixes.split(" "));

const systemFolders = new Set(byId("photos").dataset.systemFolders.split("/"));

/** Whether a file or folder is left out, as by `svdq submit FOLDER`: it is hidden, or a system's folder. */
const isLeftOut = (name) => name.startsWith(".") || systemFolders.has(name.toLowerCase());

/** Whether a file may have the prompt of the photo beside it. */
export const isText = (name) => name.toLowerCase().endsWith(".txt");

/** Whether a file of a folder counts as a photo. */
function isPhoto(name) {
  return !isLeftOut(name) && suffixes.has(name.slice(name.lastIndexOf(".")).toLowerCase());
}

/**
 * Return `photos`, each {file, folder, source}, `texts` and the number of other files: `folder` is below the folder that
 * was dropped, and `source` the path from it on.
 */
export async function ofDrop(transfer) {
  // The items are gone after the event, so all entries are asked for first.
  const entries = [...transfer.items].filter((item) => item.kind === "file")
    .map((item) => item.webkitGetAsEntry?.() ?? item.getAsFile()).filter(Boolean);
  const found = { photos: [], texts: [], numOthers: 0 };
  for (const entry of entries) {
    if (entry instanceof File) found.photos.push({ file: entry, folder: "" });
    else if (entry.isFile) await addFile(entry, "", "", found);
    else await addFolder(entry, "", found);
  }
  return found;
}

/** The same for a chosen folder. */
export function ofFolder(files) {
  const found = { photos: [], texts: [], numOthers: 0 };
  for (const file of files) {
    const parts = file.webkitRelativePath.split("/");
    if (isText(file.name) && !parts.some(isLeftOut)) found.texts.push({ file, folder: parts.slice(1, -1).join("/") });
    else if (isPhoto(file.name) && !parts.some(isLeftOut)) {
      found.photos.push({ file, folder: parts.slice(1, -1).join("/"), source: file.webkitRelativePath });
    } else found.numOthers += 1;
  }
  return found;
}

/** Add a file; one that cannot be read counts as another file, as does a folder below. */
async function addFile(entry, folder, source, found, list = found.photos) {
  try {
    const file = await new Promise((resolve, reject) => { entry.file(resolve, reject); });
    list.push({ file, folder, source });
  } catch {
    found.numOthers += 1;
  }
}

async function addFolder(folder, below, found) {
  const reader = folder.createReader();
  for (;;) {
    // A reader gives a hundred entries at a time, and none at the end.
    let entries = [];
    try {
      entries = await new Promise((resolve, reject) => { reader.readEntries(resolve, reject); });
    } catch {
      found.numOthers += 1;
    }
    if (!entries.length) return;
    for (const entry of entries) {
      if (entry.isDirectory && !isLeftOut(entry.name)) {
        await addFolder(entry, below ? `${below}/${entry.name}` : entry.name, found);
      } else if (entry.isFile && isPhoto(entry.name)) {
        await addFile(entry, below, entry.fullPath.slice(1), found);
      } else if (entry.isFile && isText(entry.name) && !isLeftOut(entry.name)) {
        await addFile(entry, below, "", found, found.texts);
      } else found.numOthers += 1;
    }
  }
}
