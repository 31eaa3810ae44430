// HTML as elements, with everything taken out that could run, load or look like the page itself.
// The page makes elements from HTML nowhere else.
import "./vendor/purify.js";

const ALLOWED = {
  ALLOWED_TAGS: [
    "p", "br", "hr", "h3", "h4", "h5", "h6", "strong", "em", "b", "i", "u", "s", "del", "mark",
    "small", "sub", "sup", "kbd", "code", "pre", "span", "blockquote", "ul", "ol", "li", "a",
    "table", "thead", "tbody", "tr", "th", "td",
  ],
  ALLOWED_ATTR: ["href", "title", "align", "start", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** A fragment. */
export function safe(html) {
  const fragment = globalThis.DOMPurify.sanitize(html, ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank"; // the conversation stays where it is
    link.rel = "noopener noreferrer";
  }
  return fragment;
}
