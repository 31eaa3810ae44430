// MessageView: one message of a conversation as elements, drawn again when it has changed.
// It knows no conversation; what its buttons do is given.
import { announceBlocks } from "./announce.js";
import { copyFrom } from "./code.js";
import { button, el } from "./dom.js";
import { Markdown } from "./markdown.js";

const FINISHES = {
  length: "The answer was cut at the token limit.",
  stopped: "You stopped the answer.",
};

export class MessageView {
  message;
  #actions = {}; // {retry(), edit(text)}; those that are missing have no button
  #parts = {};
  #markdown;

  constructor(message) {
    this.message = message;
    const isUser = message.role === "user";
    this.element = el("li", { class: `message ${isUser ? "user" : "assistant"}` });
    this.element.append(el("h2", {}, isUser ? "You" : "Answer"));
    if (isUser) this.#showUser();
    else this.#makeAnswer();
  }

  /** Draws an answer as it is now; progress: of its prompt; aloud: new paragraphs are said. */
  update({ isOver = true, progress = null, aloud = false } = {}) {
    if (this.message.role === "user") return; // drawn when it was made
    const { content, reasoning, calls, error, finish } = this.message;
    const parts = this.#parts;
    this.element.setAttribute("aria-busy", String(!isOver));
    showReasoning(parts.reasoning, reasoning, !isOver && !content);
    const blocks = this.#markdown.update(content, isOver);
    if (aloud) announceBlocks(blocks);
    showCalls(parts.calls, calls ?? []);
    showText(parts.wait, isOver || content || reasoning || calls ? "" : waitText(progress));
    showText(parts.note, error ? "" : (FINISHES[finish] ?? ""));
    showText(parts.error, error ?? "");
    if (isOver) this.#finish();
  }

  /** The last messages have some. */
  setActions(actions) {
    const isSame = ["retry", "edit"].every((name) => !actions[name] === !this.#actions[name]);
    this.#actions = actions;
    if (!isSame) this.#showButtons();
  }

  #showUser() {
    this.#parts.content = el("div", { class: "content" }, this.message.content);
    this.#parts.buttons = el("div", { class: "buttons" });
    this.element.append(this.#parts.content, this.#parts.buttons);
    this.#showButtons();
  }

  #makeAnswer() {
    const parts = (this.#parts = {
      reasoning: el("details", { class: "reasoning", hidden: true }, el("summary"), el("div")),
      wait: el("p", { class: "wait", hidden: true }),
      content: el("div", { class: "content" }),
      calls: el("div", { class: "calls" }),
      note: el("p", { class: "note", hidden: true }),
      error: el("p", { class: "error", hidden: true }),
      stats: el("p", { class: "stats", hidden: true }),
      buttons: el("div", { class: "buttons" }),
    });
    this.#markdown = new Markdown(parts.content);
    this.element.append(...Object.values(parts));
  }

  #finish() {
    showText(this.#parts.stats, statsText(this.message.timings));
    this.#showButtons();
  }

  #showButtons() {
    const { retry, edit } = this.#actions;
    const { content, error } = this.message;
    const shown = [];
    if (content) {
      const label = { "aria-label": "Copy the message" };
      const copy = button("Copy", () => copyFrom(copy, content), label);
      shown.push(copy);
    }
    if (edit) shown.push(button("Edit", () => this.#edit(edit)));
    if (retry) shown.push(button(error ? "Try again" : "Regenerate", retry));
    this.#parts.buttons.replaceChildren(...shown);
  }

  #edit(edit) {
    const area = el("textarea", { "aria-label": "Your message", rows: 4 });
    area.value = this.message.content;
    const cancel = () => {
      form.replaceWith(this.#parts.content);
      this.#parts.buttons.hidden = false;
      this.#parts.buttons.querySelector("button:last-of-type")?.focus();
    };
    const submit = (event) => {
      event.preventDefault();
      if (area.value.trim()) edit(area.value);
    };
    const onkeydown = (event) => {
      if (event.key === "Escape") cancel();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event);
    };
    const buttons = el("div", { class: "buttons" }, button("Cancel", cancel),
      el("button", { type: "submit", class: "main" }, "Send again"));
    const form = el("form", { class: "edit", onsubmit: submit, onkeydown }, area, buttons);
    this.#parts.content.replaceWith(form);
    this.#parts.buttons.hidden = true;
    area.focus();
  }
}

function showText(element, text) {
  if (element.textContent !== text) element.textContent = text;
  element.hidden = !text;
}

function showReasoning(details, text, isGoingOn) {
  details.hidden = !text;
  if (!text) return;
  const [summary, body] = details.children;
  showText(summary, isGoingOn ? "Reasoning …" : "Reasoning");
  const shown = body.firstChild;
  if (!shown) body.append(text);
  else if (shown.length < text.length) shown.appendData(text.slice(shown.length));
}

function showCalls(element, calls) {
  for (const [i, call] of calls.entries()) {
    if (!call) continue; // its fragments come later
    const shown = element.children[i] ??
      element.appendChild(el("details", { open: true }, el("summary"), el("pre", { tabindex: 0 })));
    showText(shown.children[0], `Tool call: ${call.name}`);
    showText(shown.children[1], prettyJson(call.arguments));
  }
}

function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not whole yet
  }
}

function waitText(progress) {
  if (!progress) return "Waiting for the server …";
  const { processed, total } = progress;
  return processed
    ? `Reading the prompt: ${processed} of ${total} tokens …`
    : `Waiting for a place; the prompt has ${total} tokens …`;
}

function statsText(timings) {
  if (!timings) return "";
  const { prompt_n, cache_n, predicted_n, predicted_per_second, prompt_ms } = timings;
  const speed = predicted_per_second ? ` at ${predicted_per_second.toFixed(1)} tokens/s` : "";
  const cached = cache_n ? `, ${cache_n} of them cached` : "";
  return `${predicted_n} tokens${speed}; prompt of ${prompt_n + cache_n}${cached}, ` +
    `first token after ${(prompt_ms / 1000).toFixed(2)} s`;
}
