// Markdown of a model as elements, drawn again and again while it grows: blocks that can change no
// more stay as they are, so that a long answer costs no more a frame than a short one.
import { colourCode, frameCode } from "./code.js";
import { el } from "./dom.js";
import { safe } from "./safe.js";
import { Marked } from "./vendor/marked.js";

const OPEN_BLOCKS = 2; // at the end: what comes may change them
const REFERENCE = /^ {0,3}\[[^\]]+\]:/m; // a link's address, perhaps of a link long before it
const PLAIN_TAG = /^<\/?(?:br|sub|sup|kbd|mark|small|[bius]|em|strong)\s*\/?>$/i;

const markdown = new Marked({
  gfm: true,
  renderer: {
    html({ text, block }) {
      if (PLAIN_TAG.test(text.trim())) return text;
      return block ? `<p>${escaped(text)}</p>` : escaped(text); // shown, not obeyed
    },
    heading({ tokens, depth }) {
      const level = Math.min(depth + 2, 6); // below the page's own
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
    image({ href, text }) {
      return `<a href="${escaped(href)}">${escaped(text || href)}</a>`; // nothing is loaded
    },
    checkbox({ checked }) {
      return checked ? "☑ " : "☐ ";
    },
  },
});

/** The Markdown shown in `element`. */
export class Markdown {
  #element;
  #settled = 0; // characters of the text whose blocks are drawn for good
  #open = []; // [source, element] of the others
  #numFinal = 0; // blocks that update() has given

  constructor(element) {
    this.#element = element;
  }

  /** Draws `text`, which begins with what was drawn before. Gives the blocks that are final now. */
  update(text, isOver = false) {
    const source = text.replace(/\r\n?/g, "\n");
    if (isOver && REFERENCE.test(source)) this.#clear();
    const before = this.#settled ? this.#numFinal : 0;
    const tokens = markdown.lexer(source.slice(this.#settled));
    const numFinal = isOver ? tokens.length : numSettled(tokens);
    const blocks = tokens.map((token) => this.#block(token));
    this.#place(blocks);
    this.#settled += tokens.slice(0, numFinal).reduce((sum, token) => sum + token.raw.length, 0);
    const open = blocks.slice(numFinal);
    this.#open = open.map((block, i) => [tokens[numFinal + i].raw, block]);
    const finals = blocks.slice(0, numFinal).filter(Boolean);
    for (const block of finals) colourCode(block).catch(console.error);
    const added = finals.slice(Math.max(0, this.#numFinal - before));
    this.#numFinal = before + finals.length;
    return added;
  }

  /** The element of a token: the one of the last time, if its source is the same. */
  #block(token) {
    const drawn = this.#open.findIndex(([source]) => source === token.raw);
    if (drawn >= 0) return this.#open.splice(drawn, 1)[0][1];
    if (token.type === "space") return null;
    const block = el("div", { class: "block" }, safe(markdown.parser([token])));
    frameCode(block);
    for (const table of block.querySelectorAll("table")) {
      const region = { tabindex: 0, role: "region", "aria-label": "Table" };
      const frame = el("div", { class: "table", ...region });
      table.replaceWith(frame);
      frame.append(table);
    }
    return block;
  }

  /** In their order at the end; what is there already is not touched, since it may be selected. */
  #place(blocks) {
    for (const [, block] of this.#open) block?.remove();
    const shown = blocks.filter(Boolean);
    const first = shown.find((block) => block.parentNode === this.#element);
    let next = first ?? null;
    for (const block of shown) {
      if (block === next) next = next.nextSibling;
      else this.#element.insertBefore(block, next);
    }
  }

  #clear() {
    this.#element.replaceChildren();
    this.#settled = 0;
    this.#open = [];
  }
}

function numSettled(tokens) {
  let open = 0;
  for (let i = tokens.length; i > 0; i--) {
    if (tokens[i - 1].type !== "space" && ++open === OPEN_BLOCKS) return i - 1;
  }
  return 0;
}

function escaped(text) {
  const entities = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  return text.replace(/[&<>"']/g, (character) => entities[character]);
}
