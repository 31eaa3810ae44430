// Run: one answer while it comes, written into its message of the conversation. It knows neither
// elements nor storage: `changed()` is called after each event, `isOver` at the end.
import { Failure, stream } from "./server.js";

export class Run {
  isOver = false;
  progress = null; // of the prompt: {total, processed}, until the answer begins
  #abort = new AbortController();

  constructor(message) {
    this.message = message;
  }

  /** Reads the answer to `body`; a failure becomes message.error, and its status is given. */
  async read(body, changed) {
    const { message } = this;
    let status = 200;
    try {
      for await (const payload of stream("v1/chat/completions", body, this.#abort.signal)) {
        this.#take(payload);
        changed();
      }
    } catch (error) {
      if (error.name === "AbortError") message.finish = "stopped";
      else message.error = error.message;
      if (error instanceof Failure) status = error.status;
    }
    message.finish ||= message.error ? "error" : "stop";
    this.isOver = true;
    this.progress = null;
    changed();
    return status;
  }

  stop() {
    this.#abort.abort();
  }

  #take(payload) {
    const { message } = this;
    if (payload.prompt_progress) this.progress = payload.prompt_progress;
    if (payload.timings) message.timings = payload.timings;
    const choice = payload.choices?.find((each) => each.index === 0);
    if (!choice) return;
    const delta = choice.delta ?? {};
    if (delta.content) message.content += delta.content;
    const reasoning = delta.reasoning_content;
    if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
    for (const part of delta.tool_calls ?? []) joinCall((message.calls ??= []), part);
    if (delta.content || reasoning || delta.tool_calls) this.progress = null;
    if (choice.finish_reason) message.finish = choice.finish_reason;
  }
}

function joinCall(calls, part) {
  const call = (calls[part.index] ??= { id: "", name: "", arguments: "" });
  call.id ||= part.id ?? "";
  call.name += part.function?.name ?? "";
  call.arguments += part.function?.arguments ?? "";
}

/** The messages of a request: what was said, without what the page notes beside it. */
export function requestMessages(system, messages) {
  const asked = system.trim() ? [{ role: "system", content: system }] : [];
  for (const message of messages) {
    if (message.role === "assistant" && !message.content && !message.calls) continue; // it failed
    asked.push(requestMessage(message));
  }
  return asked;
}

function requestMessage({ role, content, reasoning, calls }) {
  const message = { role, content };
  if (reasoning) message.reasoning_content = reasoning;
  if (calls) {
    message.tool_calls = calls.map(({ id, name, arguments: text }) => ({
      id,
      type: "function",
      function: { name, arguments: text },
    }));
  }
  return message;
}
