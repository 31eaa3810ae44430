// Chat: the conversation that is open, and the answers that come, also to others. One at a time
// for each of them. Nothing is drawn more than once an animation frame.
import { announce } from "./announce.js";
import { byId } from "./dom.js";
import { followEnd } from "./follow.js";
import { MessageView } from "./message.js";
import { Run, requestMessages } from "./run.js";
import { openSettings, sampling, systemPrompt } from "./settings.js";
import { load, save } from "./store.js";
import { comesElsewhere, tell } from "./tabs.js";

const SAVE_MILLISECONDS = 2000; // while an answer comes
const DRAWING_SHARE = 4; // drawing takes at most one part of so many of the time
const DRAWN_AT_ONCE = 10; // messages, when a conversation is opened; the others follow in pieces
const PIECE_MILLISECONDS = 8;
const WATCH_MILLISECONDS = 3000; // between two questions whether another tab still has an answer
const INTERRUPTED = "The page was closed before the answer was complete.";
const PASSING = "This browser keeps no conversations: they end with this tab.";
const REMOVED = "Another tab has deleted this conversation. It is kept again if you write on.";

export class Chat {
  #conversation = fresh();
  #wanted = ""; // id that was to be opened last
  #views = [];
  #runs = new Map(); // conversation id -> Run
  #elsewhere = new Set(); // ids of conversations in which an answer comes to another tab
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
    return this.#runs.has(this.id) || this.#elsewhere.has(this.id);
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
    byId("trouble").textContent = "";
    this.#conversation = found;
    if (!this.#runs.has(id)) this.#watch();
    this.#show();
    return true;
  }

  /** What another tab tells of a conversation; see tabs.js. */
  async hear(id, what) {
    if (what === "asks" && this.#runs.has(id)) tell(id, "comes");
    if (what === "stop") this.#runs.get(id)?.stop();
    if (what === "removed") this.#lose(id);
    if (what === "saved") await this.#refresh(id);
  }

  /** It was removed: what still comes is not wanted. */
  forget(id) {
    this.#runs.get(id)?.stop();
    this.#runs.delete(id);
  }

  /** Another tab has removed it. What is shown stays, and is kept again if somebody writes on. */
  #lose(id) {
    this.forget(id);
    this.#elsewhere.delete(id);
    if (id !== this.id) return;
    byId("trouble").textContent = REMOVED;
    this.#setActions();
    this.#showBusy();
  }

  async #refresh(id) {
    const found = this.#isWatching(id) ? await load(id) : null;
    if (!found || !this.#isWatching(id)) return;
    const isSame = (message, i) => sameMessage(message, this.#conversation.messages[i]);
    const shown = this.#conversation.messages;
    found.messages = found.messages.map((each, i) => (isSame(each, i) ? shown[i] : each));
    this.#conversation = found;
    this.#watch();
    this.#show();
  }

  /** It is shown, and what comes to it comes to other tabs. */
  #isWatching(id) {
    return id === this.id && !this.#runs.has(id);
  }

  /** While an answer is not complete: whether it still comes to another tab. */
  async #watch() {
    const { id } = this;
    if (!isUnfinished(this.#conversation)) this.#elsewhere.delete(id);
    else if (!this.#elsewhere.has(id)) {
      this.#elsewhere.add(id);
      while (this.#elsewhere.has(id) && (await comesElsewhere(id))) await pause();
      if (!this.#elsewhere.delete(id) || !this.#isWatching(id)) return;
      const message = this.#conversation.messages.at(-1);
      [message.finish, message.error] = ["error", INTERRUPTED];
      this.#views.at(-1)?.update();
      this.#setActions();
      this.#showBusy();
    }
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
    if (this.#elsewhere.has(this.id)) tell(this.id, "stop");
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
    this.#keep(conversation, true);
    let savedAt = Date.now();
    const status = await run.read(body, () => {
      this.#draw();
      if (!isWanted() || Date.now() - savedAt < SAVE_MILLISECONDS) return;
      savedAt = Date.now();
      this.#keep(conversation);
    });
    const wasWanted = isWanted();
    if (wasWanted) {
      this.#runs.delete(conversation.id);
      this.#keep(conversation);
    }
    if (conversation === this.#conversation) {
      this.#paint(run);
      this.#setActions();
      this.#showBusy();
    }
    if (wasWanted) tellEnd(message, status);
  }

  /** isAnew: also if it has been removed meanwhile. */
  async #keep(conversation, isAnew = false) {
    let trouble = "";
    try {
      const kept = await save(conversation, isAnew);
      if (kept === "removed") return this.#lose(conversation.id);
      if (kept === "passing") trouble = PASSING;
      this.#saved(conversation.id);
    } catch (error) {
      trouble = `The conversation cannot be kept: ${error.message}`;
    }
    byId("trouble").textContent = trouble;
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
    const view = this.#views.findLast(({ message }) => message === run.message);
    view?.update({ isOver, progress, aloud: true });
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

function tellEnd({ error }, status) {
  announce(error ? `The answer failed: ${error}` : "The answer is complete.");
  if (status === 401) openSettings(error);
}

function pause() {
  return new Promise((resolve) => setTimeout(resolve, WATCH_MILLISECONDS));
}

function isUnfinished({ messages }) {
  const last = messages.at(-1);
  return last?.role === "assistant" && !last.finish;
}

function sameMessage(one, other) {
  return JSON.stringify(one) === JSON.stringify(other);
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
