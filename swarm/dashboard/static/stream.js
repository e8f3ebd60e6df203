// The stream of server-sent events, and one drawing for all that came between two frames.

const QUIET_MS = 45_000; // A live learner says something every second or so; after this long the connection is dead,
// though the browser may not have noticed (a machine that slept, a cable that was pulled).
const SLOWEST_MS = 15_000; // Between two attempts
const HELD = 200; // Messages that may wait for a frame; a hidden tab gets no frames
const KINDS = ["snapshot", "digest", "steps", "events"];

/**
 * Connects, and calls `draw()` once a frame after `store` took what came. `tell(state, detail)` gets "connecting",
 * "connected", "reconnecting" or "refused". The browser itself reconnects with Last-Event-ID after a lost connection;
 * this makes a new one where the browser gives up (an answer that is no stream) or cannot know.
 */
export function connect(store, draw, tell) {
  let [source, attempt, heard, frame] = [null, 0, performance.now(), 0];
  let queue = [];
  let retry = 0;

  const drain = () => {
    const taken = queue;
    queue = [];
    for (const [kind, text] of taken) {
      try {
        store.apply(kind, JSON.parse(text));
      } catch (error) {
        console.warn(`A message of kind ${kind} was left out: ${error}`);
      }
    }
  };

  const update = () => {
    frame = 0;
    drain();
    draw();
  };

  const schedule = () => {
    if (frame === 0) frame = requestAnimationFrame(update);
  };

  const open = () => {
    source?.close();
    clearTimeout(retry);
    source = new EventSource("api/stream");
    heard = performance.now();
    source.addEventListener("open", () => {
      attempt = 0;
      heard = performance.now();
      if (store.snapshots > 0) tell("connected", ""); // A kept run has nothing new to say
    });
    source.addEventListener("error", () => {
      tell("reconnecting", "the learner does not answer; what you see is the last it said");
      if (source.readyState === EventSource.CLOSED) again();
    });
    for (const kind of KINDS) {
      source.addEventListener(kind, (message) => {
        heard = performance.now();
        tell("connected", "");
        queue.push([kind, message.data]);
        if (document.hidden && queue.length > HELD) drain();
        schedule();
      });
    }
  };

  const again = async () => {
    const wait = Math.min(SLOWEST_MS, 500 * 2 ** attempt) * (0.75 + Math.random() / 2);
    attempt += 1;
    clearTimeout(retry);
    retry = setTimeout(open, wait);
    // EventSource does not tell the status of an answer, and 401 has another remedy than a learner that is away.
    const answer = await fetch("api/events?count=1&before=1", { credentials: "same-origin" }).catch(() => null);
    if (answer?.status === 401) tell("refused", "open the address with the token that echo-node lead printed");
  };

  setInterval(() => {
    if (store.live && source.readyState === EventSource.OPEN && performance.now() - heard > QUIET_MS) {
      tell("reconnecting", "nothing came for 45 s");
      open();
    }
  }, 5_000);
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) schedule();
  });
  tell("connecting", "");
  open();
  return { schedule };
}
