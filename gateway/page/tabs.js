// Tabs: what the pages of one browser tell each other of conversations. They share the storage, and
// each knows only the answers that come to itself.

const ANSWER_MILLISECONDS = 700; // by then a tab has told that an answer comes to it
const channel = new BroadcastChannel("voltapile");

/** what: "saved", "removed", "asks" whether an answer comes to anybody, "comes", "stop" it. */
export function tell(id, what) {
  channel.postMessage({ id, what });
}

export function onTold(hear) {
  channel.addEventListener("message", ({ data }) => hear(data.id, data.what));
}

/** Whether an answer comes to another tab. */
export function comesElsewhere(id) {
  return new Promise((resolve) => {
    const end = (found) => {
      clearTimeout(timer);
      channel.removeEventListener("message", hear);
      resolve(found);
    };
    const hear = ({ data }) => data.id === id && data.what === "comes" && end(true);
    const timer = setTimeout(() => end(false), ANSWER_MILLISECONDS);
    channel.addEventListener("message", hear);
    tell(id, "asks");
  });
}
