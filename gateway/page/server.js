// The server's API: JSON answers and streams of events, with the key that the user gave.
// It knows no element of the page.
import { recall, remember } from "./dom.js";

const KEY = "voltapile.key";

/** What went wrong, as people read it. status 0: there was no answer at all. */
export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export function givenKey() {
  return recall(globalThis.sessionStorage, KEY);
}

export function keepKey(key) {
  remember(globalThis.sessionStorage, KEY, key.trim());
}

/** A JSON answer; statuses in `also` are no failures. */
export async function ask(path, also = []) {
  const response = await send(path, {});
  if (!response.ok && !also.includes(response.status)) throw await refusal(response);
  return response.json();
}

/** The payloads of a stream of events. Throws Failure; AbortError when `signal` says so. */
export async function* stream(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const options = { method: "POST", headers, body: JSON.stringify(body), signal };
  const response = await send(path, options);
  if (!response.ok) throw await refusal(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const payload = JSON.parse(data);
    if (payload.error) throw new Failure(payload.error.message || "the server reports an error");
    yield payload;
  }
  throw new Failure("The connection was lost before the answer was complete.");
}

async function send(path, options) {
  const key = givenKey();
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  try {
    return await fetch(new URL(path, document.baseURI), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server cannot be reached.");
  }
}

async function refusal(response) {
  const text = await response.text().catch(() => "");
  let message = text;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // A proxy's page, perhaps: its status says more.
    message = `${response.status} ${response.statusText}`;
  }
  const wait = response.headers.get("Retry-After");
  if (wait) message += ` (try again in ${wait} s)`;
  return new Failure(message, response.status);
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await read(reader);
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The connection was lost before the answer was complete.");
  }
}
