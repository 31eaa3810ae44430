// The colours that were chosen, before anything is drawn. "" means as the system says.
"use strict";
try {
  const chosen = localStorage.getItem("voltapile.theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch {
  // A browser that keeps nothing: the system's colours.
}
