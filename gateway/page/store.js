// Conversations, kept in this browser's IndexedDB; in memory alone where it has none for us.
// Other tabs are told, so that their lists stay true.

const STORE = "conversations";
const memory = new Map();
const tabs = new BroadcastChannel("voltapile");
let opening;

/** What the list shows, the newest first: {id, title, changed}. */
export async function listed() {
  const all = await everything();
  const rows = all.map(({ id, title, changed }) => ({ id, title, changed }));
  return rows.sort((a, b) => b.changed - a.changed);
}

export async function everything() {
  const store = await database("readonly");
  return store ? done(store.getAll()) : [...memory.values()].map((each) => structuredClone(each));
}

export async function load(id) {
  const store = await database("readonly");
  return store ? done(store.get(id)) : structuredClone(memory.get(id));
}

export async function save(conversation) {
  conversation.changed = Date.now();
  const store = await database("readwrite");
  if (store) await done(store.put(conversation));
  else memory.set(conversation.id, structuredClone(conversation));
  tabs.postMessage(conversation.id);
}

export async function remove(id) {
  const store = await database("readwrite");
  if (store) await done(store.delete(id));
  else memory.delete(id);
  tabs.postMessage(id);
}

/** `tell(id)` when another tab has saved or removed a conversation. */
export function onOtherTab(tell) {
  tabs.onmessage = (event) => tell(event.data);
}

async function database(mode) {
  opening ??= open().catch(() => null);
  const found = await opening;
  return found && found.transaction(STORE, mode).objectStore(STORE);
}

function open() {
  const request = indexedDB.open("voltapile", 1);
  request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
  return done(request);
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
