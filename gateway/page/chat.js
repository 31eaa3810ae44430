// Chat: the conversation that is open, and the answers that come, also to others. One at a time
// for each of them. Nothing is drawn more than once an animation frame.
import { announce } from "./announce.js";
import { byId } from "./dom.js";
import { followEnd } from "./follow.js";
import { MessageView } from "./message.js";
import { Run, requestMessages } from "./run.js";
import { openSettings, sampling, systemPrompt } from "./settings.js";
import { load, save } from "./store.js";

const SAVE_MILLISECONDS = 2000; // while an answer comes
const DRAWING_SHARE = 4; // drawing takes at most one part of so many of the time
const DRAWN_AT_ONCE = 10; // messages, when a conversation is opened; the others follow in pieces
const PIECE_MILLISECONDS = 8;
const INTERRUPTED = "The page was closed before the answer was complete.";

export class Chat {
  #conversation = fresh();
  #wanted = ""; // id that was to be opened last
  #views = [];
  #runs = new Map(); // conversation id -> Run
  #isDue = false; // a frame has been asked for
  #toEnd = followEnd(byId("scroll"), byId("messages"));
  #saved; // called with an id after a conversation was saved

  constructor(saved) {
    this.#saved = saved;
    this.#listen();
  }

  get id() {
    return this.#conversation.id;
  }

  get isBusy() {
    return this.#runs.has(this.id);
  }

  get isStarted() {
    return this.#conversation.messages.length > 0;
  }

  /** False: there is no such conversation. "": a new one. */
  async open(id) {
    this.#wanted = id;
    if (id ? id === this.id : !this.isStarted) return true;
    const found = id ? (this.#runs.get(id)?.conversation ?? (await load(id))) : fresh();
    if (this.#wanted !== id) return true; // another was asked for meanwhile
    if (!found) return false;
    this.#conversation = found;
    for (const message of found.messages) {
      const isCutOff = message.role === "assistant" && !message.finish && !this.isBusy;
      if (isCutOff) [message.finish, message.error] = ["error", INTERRUPTED];
    }
    this.#show();
    return true;
  }

  /** Another tab has changed it. */
  async refresh(id) {
    const found = id === this.id && !this.isBusy ? await load(id) : null;
    if (!found || id !== this.id || this.isBusy) return;
    this.#conversation = found;
    this.#show();
  }

  /** It was removed: what still comes is not wanted. */
  forget(id) {
    this.#runs.get(id)?.stop();
    this.#runs.delete(id);
  }

  async send(text) {
    if (!text.trim() || this.isBusy) return;
    const { messages } = this.#conversation;
    if (!messages.length) this.#conversation.title = titleOf(text);
    messages.push({ role: "user", content: text });
    await this.#answer();
  }

  stop() {
    this.#runs.get(this.id)?.stop();
  }

  /** Another answer to the last question. */
  async retry() {
    const { messages } = this.#conversation;
    if (this.isBusy) return;
    while (messages.at(-1)?.role === "assistant") messages.pop();
    await this.#answer();
  }

  /** The last question anew. */
  async edit(text) {
    const { messages } = this.#conversation;
    if (this.isBusy) return;
    messages.length = messages.findLastIndex((message) => message.role === "user");
    await this.send(text);
  }

  // --- an answer ------------------------------------------------------------------------

  async #answer() {
    const conversation = this.#conversation;
    const messages = requestMessages(systemPrompt(), conversation.messages);
    const body = { ...sampling(), messages, stream: true, return_progress: true };
    const message = { role: "assistant", content: "", finish: "" };
    conversation.messages.push(message);
    const run = new Run(message);
    run.conversation = conversation;
    this.#runs.set(conversation.id, run);
    this.#show();
    byId("text").focus();
    announce("Waiting for the answer.");
    const isWanted = () => this.#runs.get(conversation.id) === run; // it was not removed
    this.#keep(conversation);
    let savedAt = Date.now();
    const status = await run.read(body, () => {
      this.#draw();
      if (!isWanted() || Date.now() - savedAt < SAVE_MILLISECONDS) return;
      savedAt = Date.now();
      this.#keep(conversation);
    });
    if (!isWanted()) return;
    this.#runs.delete(conversation.id);
    this.#keep(conversation);
    this.#finish(run, status);
  }

  async #keep(conversation) {
    let trouble = "";
    try {
      const isKept = await save(conversation);
      if (!isKept) trouble = "This browser keeps no conversations: they end with this tab.";
      this.#saved(conversation.id);
    } catch (error) {
      trouble = `The conversation cannot be kept: ${error.message}`;
    }
    byId("trouble").textContent = trouble;
  }

  #finish(run, status) {
    const { conversation, message } = run;
    if (conversation === this.#conversation) {
      this.#paint(run);
      this.#setActions();
      this.#showBusy();
    }
    announce(message.error ? `The answer failed: ${message.error}` : "The answer is complete.");
    if (status === 401) openSettings(message.error);
  }

  // --- drawing --------------------------------------------------------------------------

  /** Makes the views those of the messages; what is there already stays. */
  #show() {
    const { messages } = this.#conversation;
    const isKept = (view, i) => view.message === messages[i];
    const firstOther = this.#views.findIndex((view, i) => !isKept(view, i));
    const numKept = firstOther < 0 ? this.#views.length : firstOther;
    for (const view of this.#views.splice(numKept)) view.element.remove();
    const added = messages.slice(numKept).map((message) => new MessageView(message));
    this.#views.push(...added);
    byId("messages").append(...added.map((view) => view.element));
    byId("empty").hidden = messages.length > 0;
    this.#setActions();
    this.#showBusy();
    this.#drawUpwards(added, DRAWN_AT_ONCE);
    this.#toEnd();
  }

  /** Draws the last so many of `views`, and later those before them, while they are shown. */
  #drawUpwards(views, count) {
    const run = this.#runs.get(this.id);
    const began = performance.now();
    let first = views.length;
    for (; first > 0 && (count > 0 || performance.now() - began < PIECE_MILLISECONDS); count--) {
      const { message } = views[--first];
      const isOver = Boolean(message.finish) && message !== run?.message;
      views[first].update({ isOver, progress: run?.progress });
    }
    const rest = views.slice(0, first);
    const isShown = () => this.#views.includes(rest.at(-1));
    if (rest.length) setTimeout(() => isShown() && this.#drawUpwards(rest, 0));
  }

  #draw() {
    if (this.#isDue) return;
    this.#isDue = true;
    requestAnimationFrame(() => {
      const began = performance.now();
      const run = this.#runs.get(this.id);
      if (run) this.#paint(run);
      const rest = (performance.now() - began) * (DRAWING_SHARE - 1);
      setTimeout(() => this.#next(run), rest);
    });
  }

  /** What has come while nothing was drawn is drawn now. */
  #next(run) {
    this.#isDue = false;
    if (run && this.#drawn !== sizeOf(run.message)) this.#draw();
  }

  #drawn = 0; // size of the message when it was drawn

  #paint(run) {
    const { isOver, progress } = run;
    this.#drawn = sizeOf(run.message);
    this.#views.at(-1)?.update({ isOver, progress, aloud: true });
  }

  #setActions() {
    const { messages } = this.#conversation;
    const last = messages.length - 1;
    const lastQuestion = messages.findLastIndex((message) => message.role === "user");
    const isFree = !this.isBusy;
    for (const [i, view] of this.#views.entries()) {
      const canRetry = isFree && i === last && messages[i].role === "assistant";
      const canEdit = isFree && i === lastQuestion;
      view.setActions({
        retry: canRetry && (() => this.retry()),
        edit: canEdit && ((text) => this.edit(text)),
      });
    }
  }

  #showBusy() {
    const hadFocus = document.activeElement === byId("stop");
    byId("send").hidden = this.isBusy;
    byId("stop").hidden = !this.isBusy;
    if (hadFocus && !this.isBusy) byId("text").focus();
  }

  // --- what people do -------------------------------------------------------------------

  #listen() {
    const area = byId("text");
    const submit = () => {
      if (this.isBusy || !area.value.trim()) return;
      const text = area.value;
      area.value = "";
      this.send(text);
    };
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      submit();
    });
    area.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      submit();
    });
    byId("stop").addEventListener("click", () => this.stop());
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !byId("settings").open) this.stop();
    });
  }
}

function fresh() {
  return { id: newId(), title: "New conversation", created: Date.now(), messages: [] };
}

/** crypto.randomUUID is there with HTTPS only. */
function newId() {
  return [...crypto.getRandomValues(new Uint8Array(8))]
    .map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

function sizeOf({ content, reasoning = "", calls = [] }) {
  const ofCalls = calls.reduce((sum, call) => sum + call.arguments.length, 0);
  return content.length + reasoning.length + ofCalls;
}
