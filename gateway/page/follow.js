// Keeps the end of what grows in sight, unless a person has scrolled up to read.

const NEAR_END = 60; // pixels

/** `area` scrolls over `content`. Gives a function that goes to the end and stays there. */
export function followEnd(area, content) {
  let follows = true;
  const toEnd = () => (area.scrollTop = area.scrollHeight);
  area.addEventListener("scroll", () => {
    follows = area.scrollHeight - area.scrollTop - area.clientHeight < NEAR_END;
  });
  const observer = new ResizeObserver(() => follows && toEnd());
  observer.observe(area);
  observer.observe(content);
  return () => {
    follows = true;
    toEnd();
  };
}
