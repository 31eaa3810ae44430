// Blocks of code: a line with the language and a button that copies, and colours for those
// languages that are here. A language is loaded when an answer first uses it.
import { button, el } from "./dom.js";
import { safe } from "./safe.js";
import highlighter from "./vendor/highlight.js";

const MOST_CHARACTERS = 100_000; // longer code stays as it is
const LANGUAGES = {
  bash: "bash", sh: "bash", shell: "bash", zsh: "bash", console: "bash",
  c: "c", h: "c", cpp: "cpp", "c++": "cpp", cc: "cpp", hpp: "cpp", cuda: "cpp", cu: "cpp",
  css: "css", diff: "diff", patch: "diff", go: "go", golang: "go", java: "java",
  javascript: "javascript", js: "javascript", jsx: "javascript", mjs: "javascript",
  json: "json", jsonc: "json", markdown: "markdown", md: "markdown",
  python: "python", py: "python", rust: "rust", rs: "rust", sql: "sql",
  typescript: "typescript", ts: "typescript", tsx: "typescript",
  html: "xml", xml: "xml", svg: "xml", yaml: "yaml", yml: "yaml",
};

/** Puts a frame around each block of code below `root`. */
export function frameCode(root) {
  for (const code of root.querySelectorAll("pre > code")) {
    const name = languageOf(code);
    const copy = button("Copy", () => copyFrom(copy, code.textContent), {
      "aria-label": `Copy the code${name && ` (${name})`}`,
    });
    const pre = code.parentElement;
    const frame = el("div", { class: "code" }, el("div", { class: "bar" }, name, copy));
    pre.replaceWith(frame);
    pre.tabIndex = 0; // so that keys can scroll it
    frame.append(pre);
  }
}

export async function colourCode(root) {
  for (const code of root.querySelectorAll("pre > code")) {
    const file = Object.hasOwn(LANGUAGES, languageOf(code)) && LANGUAGES[languageOf(code)];
    if (!file || code.textContent.length > MOST_CHARACTERS) continue;
    if (!highlighter.getLanguage(file)) {
      const { default: grammar } = await import(`./vendor/languages/${file}.js`);
      highlighter.registerLanguage(file, grammar);
    }
    const options = { language: file, ignoreIllegals: true };
    code.replaceChildren(safe(highlighter.highlight(code.textContent, options).value));
  }
}

/** Says on `button` whether the text is on the clipboard now. */
export async function copyFrom(button, text) {
  const before = button.textContent;
  button.textContent = (await copied(text)) ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = before), 1500);
}

function languageOf(code) {
  const name = [...code.classList].find((each) => each.startsWith("language-")) ?? "";
  return name.slice("language-".length).toLowerCase();
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedBySelection(text); // without HTTPS there is no navigator.clipboard
  }
}

function copiedBySelection(text) {
  const focused = document.activeElement;
  const area = el("textarea", { class: "hidden", readonly: true });
  area.value = text;
  document.body.append(area);
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return isDone;
}
