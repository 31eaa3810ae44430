// The list of conversations beside the chat: open, delete, export. It knows no messages.
import { button, byId, el } from "./dom.js";
import { everything, listed, load, remove } from "./store.js";

export async function showList(current) {
  const rows = await listed();
  byId("conversations").replaceChildren(...rows.map((row) => item(row, row.id === current)));
  byId("export").disabled = !rows.length;
}

/** The open conversation, or all where none is open, as a file. */
export async function exportJson(current) {
  const chosen = current && (await load(current));
  const content = { voltapile: 1, conversations: chosen ? [chosen] : await everything() };
  const blob = new Blob([JSON.stringify(content, null, 2)], { type: "application/json" });
  const url = URL.createObjectURL(blob);
  const day = new Date().toISOString().slice(0, 10);
  el("a", { href: url, download: `voltapile-${day}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

function item({ id, title }, isCurrent) {
  const link = el("a", { href: `#c/${id}`, "aria-current": isCurrent ? "page" : null }, title);
  const deleting = button("×", () => askAndRemove(id, title), {
    class: "delete",
    title: "Delete",
    "aria-label": `Delete ${title}`,
  });
  return el("li", {}, link, deleting);
}

async function askAndRemove(id, title) {
  if (!confirm(`Delete "${title}"? It is kept nowhere else.`)) return;
  await remove(id);
  dispatchEvent(new CustomEvent("conversation-removed", { detail: id }));
  byId("new").focus(); // the button that had the focus is gone
}
