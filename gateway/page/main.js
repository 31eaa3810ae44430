// The page: which view is shown, whether the server can be asked, and who hears of what.
import { Chat } from "./chat.js";
import { exportJson, showList } from "./conversations.js";
import { byId, recall, remember } from "./dom.js";
import { Failure, ask } from "./server.js";
import { makeSettings, openSettings, takeDefaults } from "./settings.js";
import { StatusView } from "./status.js";
import { onTold } from "./tabs.js";

const LOADING_MILLISECONDS = 1000; // between two questions while the model is loading
const THEME = "voltapile.theme"; // theme.js reads it, too
const HEALTH_MILLISECONDS = 10_000;

const chat = new Chat(chatSaved);
const status = new StatusView(byId("status"));

makeSettings(greet);
addEventListener("hashchange", route);
addEventListener("conversation-removed", ({ detail }) => forget(detail));
onTold(async (id, what) => {
  await chat.hear(id, what);
  if (what === "saved" || what === "removed") await showList(chat.id);
});
byId("new").addEventListener("click", begin);
byId("export").addEventListener("click", () => exportJson(chat.isStarted ? chat.id : ""));
byId("menu").addEventListener("click", () => showMenu(byId("menu").ariaExpanded !== "true"));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("text").focus();
});
makeThemes();
await route();
watchHealth();

/** #status, #c/ID of a conversation, or anything else for a new one. */
async function route() {
  const { hash } = location;
  const isStatus = hash === "#status";
  byId("chat").hidden = isStatus;
  byId("status").hidden = !isStatus;
  markCurrent("to-chat", !isStatus);
  markCurrent("to-status", isStatus);
  status.run(isStatus);
  showMenu(false);
  if (!isStatus && !(await chat.open(hash.startsWith("#c/") ? hash.slice(3) : ""))) return begin();
  await showCurrent();
}

function markCurrent(id, isCurrent) {
  if (isCurrent) byId(id).setAttribute("aria-current", "page");
  else byId(id).removeAttribute("aria-current");
}

async function showCurrent() {
  byId("to-chat").href = chat.isStarted ? `#c/${chat.id}` : "#new";
  await showList(chat.id);
}

async function begin() {
  history.pushState(null, "", "#new");
  await route();
  byId("text").focus();
}

function chatSaved(id) {
  const isNew = id === chat.id && !location.hash.startsWith("#c/") && location.hash !== "#status";
  if (isNew) history.replaceState(null, "", `#c/${id}`);
  showCurrent();
}

async function forget(id) {
  chat.forget(id);
  if (id === chat.id) await begin();
  else await showList(chat.id);
}

function showMenu(isOpen) {
  byId("menu").ariaExpanded = String(isOpen);
  byId("sidebar").classList.toggle("open", isOpen);
}

function makeThemes() {
  const select = byId("theme");
  select.value = recall(localStorage, THEME);
  select.addEventListener("change", () => {
    document.documentElement.dataset.theme = select.value;
    remember(localStorage, THEME, select.value);
  });
}

/** The model's name and the server's defaults; whoever answers now may be another server. */
async function greet() {
  try {
    const props = await ask("props");
    takeDefaults(props.default_generation_settings.params);
    byId("model").textContent = props.model_alias;
    document.title = `${props.model_alias} · Voltapile`;
  } catch (error) {
    if (error instanceof Failure && error.status === 401) openSettings(error.message);
    else showBanner(error.message);
  }
}

/** isNew: the server could not be reached, or not yet. */
async function watchHealth(isNew = true) {
  let text = "";
  let isReached = true;
  try {
    const health = await ask("health", [503]);
    text = health.status === "ok" ? "" : loadingText(health);
  } catch (error) {
    text = error.message;
    isReached = false;
  }
  showBanner(text);
  if (isNew && isReached) greet();
  const pause = text ? LOADING_MILLISECONDS : HEALTH_MILLISECONDS;
  setTimeout(() => watchHealth(!isReached), pause);
}

function loadingText({ status, stage, fraction, reason }) {
  if (status === "failed") return `The model cannot be served: ${reason}`;
  const why = reason ? ` (${reason})` : "";
  return `The model is loading: ${stage}, ${Math.round(fraction * 100)} %${why}`;
}

function showBanner(text) {
  const banner = byId("banner");
  if (banner.textContent !== text) banner.textContent = text;
  banner.hidden = !text;
}
