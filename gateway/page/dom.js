// Elements without HTML: what a model, a server or a person wrote is only ever text here.

/** el("a", {href, class, onclick}, "text", child): a property that is a function listens. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

export function byId(id) {
  return document.getElementById(id);
}

export function button(text, onclick, properties = {}) {
  return el("button", { type: "button", onclick, ...properties }, text);
}

/** Storage that may be forbidden or full: the page then works without it. */
export function remember(storage, key, value) {
  try {
    if (value) storage.setItem(key, value);
    else storage.removeItem(key);
    return true;
  } catch {
    return false;
  }
}

export function recall(storage, key) {
  try {
    return storage.getItem(key) ?? "";
  } catch {
    return "";
  }
}
