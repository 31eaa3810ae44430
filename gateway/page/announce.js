// What a screen reader says beside what has the focus: whole paragraphs, never single tokens.
import { byId, el } from "./dom.js";

const MOST_LINES = 30; // said long ago

export function announce(text) {
  const region = byId("announcer");
  region.append(el("p", {}, text));
  while (region.childElementCount > MOST_LINES) region.firstElementChild.remove();
}

/** Blocks of an answer; code is only named, since nobody listens to it. */
export function announceBlocks(blocks) {
  for (const block of blocks) {
    const code = block.querySelector("pre");
    const lines = code ? code.textContent.trimEnd().split("\n").length : 0;
    const text = code ? `Code, ${lines} lines.` : block.textContent.trim();
    if (text) announce(text);
  }
}
