// Conversations, kept in this browser's IndexedDB; in memory alone where it has none for us.
// Their titles lie apart, so that the list needs not read what was said. Other tabs are told.
import { tell } from "./tabs.js";

const WHOLE = "conversations";
const TITLES = "titles"; // {id, title, changed}
const memory = { [WHOLE]: new Map(), [TITLES]: new Map() };
let opening;

/** What the list shows, the newest first. */
export async function listed() {
  const rows = await all(TITLES);
  return rows.sort((a, b) => b.changed - a.changed);
}

export function everything() {
  return all(WHOLE);
}

export async function load(id) {
  const found = await database();
  if (found) return done(found.transaction(WHOLE).objectStore(WHOLE).get(id));
  return structuredClone(memory[WHOLE].get(id));
}

/** isAnew: also if it was removed. "kept", "removed", or "passing": until the tab is closed. */
export async function save(conversation, isAnew) {
  conversation.changed = Date.now();
  const { id, title, changed } = conversation;
  const row = { [WHOLE]: conversation, [TITLES]: { id, title, changed } };
  const isThere = await change((store, name) => store.put(row[name]), isAnew ? "" : id);
  if (!isThere) return "removed";
  tell(id, "saved");
  return (await database()) ? "kept" : "passing";
}

export async function remove(id) {
  await change((store) => store.delete(id));
  tell(id, "removed");
}

async function all(name) {
  const found = await database();
  if (found) return done(found.transaction(name).objectStore(name).getAll());
  return [...memory[name].values()].map((each) => structuredClone(each));
}

/** `write(store, name)` to both, at once. False: not at all, as `id` is given and not there. */
async function change(write, id = "") {
  const found = await database();
  if (!found) {
    if (id && !memory[TITLES].has(id)) return false;
    for (const name of [WHOLE, TITLES]) write(inMemory(memory[name]), name);
    return true;
  }
  const transaction = found.transaction([WHOLE, TITLES], "readwrite");
  if (id && !(await done(transaction.objectStore(TITLES).count(id)))) return false;
  for (const name of [WHOLE, TITLES]) write(transaction.objectStore(name), name);
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(true);
    transaction.onabort = () => reject(transaction.error);
  });
}

function inMemory(map) {
  return {
    put: (value) => map.set(value.id, structuredClone(value)),
    delete: (id) => map.delete(id),
  };
}

function database() {
  opening ??= open().catch(() => null);
  return opening;
}

async function open() {
  const request = indexedDB.open("voltapile", 1);
  request.onupgradeneeded = () => {
    for (const name of [WHOLE, TITLES]) request.result.createObjectStore(name, { keyPath: "id" });
  };
  return done(request);
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
