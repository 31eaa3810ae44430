// Conversations, kept in this browser's IndexedDB; in memory alone where it has none for us.
// Their titles lie apart, so that the list needs not read what was said. Other tabs are told.

const WHOLE = "conversations";
const TITLES = "titles"; // {id, title, changed}
const memory = { [WHOLE]: new Map(), [TITLES]: new Map() };
const tabs = new BroadcastChannel("voltapile");
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

/** False: it is kept until the tab is closed. */
export async function save(conversation) {
  conversation.changed = Date.now();
  const { id, title, changed } = conversation;
  await change((store, name) => store.put(name === WHOLE ? conversation : { id, title, changed }));
  tabs.postMessage(id);
  return Boolean(await database());
}

export async function remove(id) {
  await change((store) => store.delete(id));
  tabs.postMessage(id);
}

/** `tell(id)` when another tab has saved or removed a conversation. */
export function onOtherTab(tell) {
  tabs.onmessage = (event) => tell(event.data);
}

async function all(name) {
  const found = await database();
  if (found) return done(found.transaction(name).objectStore(name).getAll());
  return [...memory[name].values()].map((each) => structuredClone(each));
}

/** `write(store, name)` to both, at once. */
async function change(write) {
  const found = await database();
  if (!found) return [WHOLE, TITLES].forEach((name) => write(inMemory(memory[name]), name));
  const transaction = found.transaction([WHOLE, TITLES], "readwrite");
  for (const name of [WHOLE, TITLES]) write(transaction.objectStore(name), name);
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
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
