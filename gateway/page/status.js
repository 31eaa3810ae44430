// StatusView: what the server does now, asked every second while it is looked at.
import { el } from "./dom.js";
import { ask } from "./server.js";

const MILLISECONDS = 1000;
const PURPOSES = {
  weights: "Weights", kv: "KV cache", state: "State", scratch: "Scratch", slots: "Slots",
  checkpoints: "Checkpoints", communication: "Ranks", staging: "Staging", draft: "Draft",
  shared: "Shared", reserve: "Reserve",
};
const TIERS = {
  vram: "in VRAM", pinned: "in host memory that GPUs read", host: "in host memory",
  mapped: "in the mapped file",
};
const STATES = { waiting: "waiting", prompt: "reading the prompt", answer: "answering" };

export class StatusView {
  #element;
  #isShown = false;
  #timer = 0;
  #before = null; // {time, counters} of the last answer

  constructor(element) {
    this.#element = element;
  }

  /** Asks from now on, or no more. */
  run(isShown) {
    clearTimeout(this.#timer);
    this.#isShown = isShown;
    if (isShown) this.#look();
    else this.#before = null;
  }

  async #look() {
    if (!document.hidden) await this.#draw();
    clearTimeout(this.#timer);
    if (this.#isShown) this.#timer = setTimeout(() => this.#look(), MILLISECONDS);
  }

  async #draw() {
    try {
      const status = await ask("status");
      this.#element.replaceChildren(...this.#parts(status));
    } catch (error) {
      const failed = el("p", { class: "error" }, error.message);
      this.#element.replaceChildren(el("h2", {}, "Status"), failed);
    }
  }

  #parts(status) {
    const speeds = this.#speeds(status.counters);
    return [
      el("h2", {}, "Status"),
      facts(status, speeds),
      ...section("Requests", requests(status.requests)),
      ...section("Ranks", ranks(status.ranks)),
      ...section("Memory as planned", memory(status)),
    ];
  }

  /** Tokens a second since the last answer. */
  #speeds(counters) {
    const now = { time: performance.now(), counters };
    const before = this.#before ?? now;
    this.#before = now;
    const seconds = (now.time - before.time) / 1000;
    const rate = (name) =>
      seconds ? Math.max(0, counters[name] - before.counters[name]) / seconds : 0;
    return { generated: rate("generated_tokens"), steps: rate("steps") };
  }
}

function facts(status, speeds) {
  const { counters } = status;
  const used = counters.pages_total - counters.pages_free;
  const rows = {
    Model: `${status.model} (${status.architecture})`,
    State: stateText(status),
    Backend: `${status.backend}; ranks: ${status.ranks.length}, mode ${status.mode}`,
    Context: `${number(status.context)} tokens a request, ${status.slots} requests at once`,
    Generating: `${speeds.generated.toFixed(1)} tokens/s, ${speeds.steps.toFixed(1)} steps/s`,
    Requests: `${counters.running} running, ${counters.waiting} waiting, ` +
      `${number(counters.requests)} in all`,
    Tokens: `${number(counters.generated_tokens)} generated; ` +
      `${number(counters.prompt_tokens)} of prompts, ${number(counters.cached_tokens)} cached`,
    "Cache pages": `${number(used)} of ${number(counters.pages_total)} in use`,
    Restarts: number(counters.restarts),
  };
  const pairs = Object.entries(rows);
  return el("dl", {}, ...pairs.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]));
}

function requests(rows) {
  if (!rows.length) return el("p", {}, "None now.");
  const cells = rows.map((each) => [
    String(each.id),
    STATES[each.state],
    bar(each.processed_tokens, each.prompt_tokens, `Prompt of request ${each.id}`),
    `${number(each.generated_tokens)} of at most ${number(each.most_tokens)}`,
    each.tokens_per_second ? each.tokens_per_second.toFixed(1) : "",
    `${each.prompt_seconds.toFixed(1)} s`,
  ]);
  const heads = ["Number", "State", "Prompt", "Generated", "Tokens/s", "To the first token"];
  return table("Requests", heads, cells);
}

function ranks(rows) {
  const cells = rows.map((each) => [
    String(each.rank),
    each.device,
    String(each.node),
    String(each.cpus),
    String(each.threads),
    layersText(each),
    each.stage === "ready" ? "ready" : `${each.stage} ${Math.round(each.fraction * 100)} %`,
    size(sum(each.allocated)),
  ]);
  const heads = ["Rank", "Device", "Node", "CPUs", "Threads", "Computes", "State", "Allocated"];
  return table("Ranks", heads, cells);
}

function memory(status) {
  const given = new Set(status.memory.flatMap((row) => Object.keys(row.bytes)));
  const isUsed = (name) => status.memory.some((row) => row.bytes[name]);
  const names = [...new Set([...Object.keys(PURPOSES), ...given])].filter(isUsed);
  const heads = ["Place", ...names.map((name) => PURPOSES[name] ?? name), "Together"];
  const cells = status.memory.map((row) => [
    row.name,
    ...names.map((name) => size(row.bytes[name])),
    size(sum(row.bytes)),
  ]);
  const tiers = Object.entries(status.weights);
  const weights = tiers.map(([tier, bytes]) => `${size(bytes)} ${TIERS[tier] ?? tier}`);
  const text = weights.length ? `Weights: ${weights.join(", ")}.` : "";
  return el("div", {}, table("Memory", heads, cells), el("p", {}, text));
}

function layersText({ layers, is_part: isPart }) {
  if (!layers.length) return "no layers";
  const part = isPart ? "a part of " : "";
  return `${part}layers ${layers[0]}–${layers.at(-1)}`;
}

function stateText({ status, stage, fraction, reason }) {
  if (status === "ok") return "ready";
  if (status === "failed") return `failed: ${reason}`;
  return `${status}: ${stage} ${Math.round(fraction * 100)} %${reason && ` (${reason})`}`;
}

function section(title, content) {
  return [el("h3", {}, title), content];
}

function table(label, heads, rows) {
  const head = el("tr", {}, ...heads.map((text) => el("th", { scope: "col" }, text)));
  const body = rows.map(([first, ...others]) =>
    el("tr", {}, el("th", { scope: "row" }, first), ...others.map((cell) => el("td", {}, cell))));
  const whole = el("table", {}, el("thead", {}, head), el("tbody", {}, ...body));
  return el("div", { class: "table", tabindex: 0, role: "region", "aria-label": label }, whole);
}

function bar(value, max, label) {
  const text = `${number(value)} of ${number(max)}`;
  return el("span", {}, el("progress", { value, max, "aria-label": label }), ` ${text}`);
}

function sum(bytes) {
  return Object.values(bytes).reduce((all, each) => all + each, 0);
}

function size(bytes) {
  if (!bytes) return "–";
  const [amount, unit] = bytes >= 2 ** 30 ? [bytes / 2 ** 30, "GiB"] : [bytes / 2 ** 20, "MiB"];
  return `${amount < 100 ? amount.toFixed(1) : Math.round(amount)} ${unit}`;
}

function number(value) {
  return value.toLocaleString("en");
}
