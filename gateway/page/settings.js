// Settings: system prompt and sampling, as the next request takes them. What is not set is the
// server's default, from /props. Kept in localStorage; the API key is kept by server.js.
import { byId, el, recall, remember } from "./dom.js";
import { givenKey, keepKey } from "./server.js";

const KEY = "voltapile.settings";
const FIELDS = [
  ["temperature", "Temperature", { min: 0, max: 100, step: "any" }],
  ["top_k", "Top k", { min: -1, step: 1 }],
  ["top_p", "Top p", { min: 0.001, max: 1, step: "any" }],
  ["min_p", "Min p", { min: 0, max: 1, step: "any" }],
  ["repeat_penalty", "Repeat penalty", { min: 0.001, max: 100, step: "any" }],
  ["repeat_last_n", "Repeat last n", { min: -1, step: 1 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: "any" }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: "any" }],
  ["max_tokens", "Most tokens (-1: all)", { min: -1, step: 1 }],
  ["seed", "Seed (-1: random)", { min: -1, step: 1 }],
];

let defaults = {};
let values = stored();

/** params: of default_generation_settings in /props. */
export function takeDefaults(params) {
  defaults = Object.fromEntries(FIELDS.map(([name]) => [name, params[name]]));
  for (const [name] of FIELDS) byId(`set-${name}`).placeholder = rounded(defaults[name]);
}

export function systemPrompt() {
  return values.system ?? "";
}

/** The fields of a request. */
export function sampling() {
  const fields = {};
  for (const [name] of FIELDS) {
    const value = values[name] ? Number(values[name]) : defaults[name];
    if (value != null) fields[name] = value;
  }
  if (values.thinking) fields.enable_thinking = values.thinking === "on";
  return { ...fields, ...(values.extra ? JSON.parse(values.extra) : {}) };
}

/** changed(): after each save. */
export function makeSettings(changed) {
  const dialog = byId("settings");
  const form = dialog.querySelector("form");
  const inputs = FIELDS.map(([name, title, bounds]) =>
    el("label", {}, title, el("input", { id: `set-${name}`, name, type: "number", ...bounds })));
  byId("fields").append(...inputs);
  byId("open-settings").addEventListener("click", () => openSettings());
  byId("reset").addEventListener("click", () => fill(form, { key: form.elements.key.value }));
  byId("cancel").addEventListener("click", () => dialog.close());
  form.addEventListener("submit", (event) => {
    const given = Object.fromEntries(new FormData(form));
    const wrong = complaint(given.extra);
    byId("settings-error").textContent = wrong;
    if (wrong) return event.preventDefault();
    const { key, ...others } = given;
    keepKey(key);
    values = others;
    remember(localStorage, KEY, JSON.stringify(values));
    changed();
  });
}

/** reason: why the page asks, where it is about the key. */
export function openSettings(reason = "") {
  const dialog = byId("settings");
  const form = dialog.querySelector("form");
  if (!dialog.open) {
    fill(form, { ...values, key: givenKey() });
    dialog.showModal();
  }
  byId("settings-error").textContent = reason;
  if (reason) form.elements.key.focus();
}

function fill(form, given) {
  for (const input of form.elements) if (input.name) input.value = given[input.name] ?? "";
}

function complaint(extra) {
  if (!extra.trim()) return "";
  try {
    const value = JSON.parse(extra);
    return value && typeof value === "object" && !Array.isArray(value)
      ? "" : "The further fields must be a JSON object.";
  } catch (error) {
    return `The further fields are not JSON: ${error.message}`;
  }
}

function stored() {
  try {
    return JSON.parse(recall(localStorage, KEY)) ?? {};
  } catch {
    return {};
  }
}

/** 0.949999988079071 is a float32's 0.95. */
function rounded(value) {
  return value == null ? "" : String(Number(Number(value).toPrecision(6)));
}
