// The page: what the stream says goes into the store, and what changed there is drawn, once a frame at most.
import { Curves } from "./curves.js";
import { byId, copyButton, el, say, setTone } from "./dom.js";
import { Events } from "./events.js";
import { date, duration, number, plain, symbolOf, version } from "./format.js";
import { kept } from "./kept.js";
import { Links } from "./links.js";
import { Nodes } from "./nodes.js";
import { Rollouts } from "./rollouts.js";
import { Steering } from "./steering.js";
import { Store } from "./store.js";
import { connect } from "./stream.js";
import { Tiles } from "./tiles.js";
import { Timeline } from "./timeline.js";
import { Versions } from "./versions.js";

const store = new Store();
const tiles = new Tiles(store);
const curves = new Curves(store);
const timeline = new Timeline(store);
const nodes = new Nodes(store);
const links = new Links(store);
const versions = new Versions(store);
const rollouts = new Rollouts(store);
const events = new Events(store);
const steering = new Steering(store);
const facts = new Map();
let away = ""; // What is wrong with the connection, in words; "" while the learner answers
let joined = false; // Whether a sampler was ever here: its line to join is told on top before

function draw() {
  const changed = new Set(store.changed);
  store.changed.clear();
  if (changed.has("run")) restarted();
  if (changed.has("digest")) {
    header(store.digest);
    nodes.draw();
    links.draw();
    versions.draw();
    steering.draw();
  }
  if (changed.has("digest") || changed.has("steps")) tiles.draw(changed);
  if (changed.has("steps")) {
    curves.draw();
    rollouts.stepped();
  }
  if (changed.has("events")) events.draw();
}

/** A snapshot came: of the first connection, of one that missed too much, or of a learner that began again. */
function restarted() {
  tell("connected", "");
  byId("main").classList.remove("fresh"); // Until now there was nothing to see, and the first figures move much
  timeline.restart();
  events.restart();
  rollouts.restart();
  byId("file-summary").hidden = store.live; // It is written at the end
  say(byId("run"), plain(store.name, 80) || "echo-node");
  const body = byId("config-table").tBodies[0];
  const text = (value) => (value !== null && typeof value === "object" ? JSON.stringify(value) : String(value));
  const rows = Object.entries(store.config).slice(0, 500);
  body.replaceChildren(...rows.map(([key, value]) => el("tr", {}, el("th", { scope: "row" }, plain(key, 80)), el("td", {}, plain(text(value), 1000)))));
}

function header(digest) {
  const known = plain(digest.state, 30);
  const { symbol, tone } = away ? { symbol: "◌", tone: "warn" } : symbolOf(digest.state);
  const word = away ? `last known: ${known}` : known;
  const state = byId("state");
  setTone(state, tone);
  say(state.querySelector(".symbol"), symbol);
  say(state.querySelector(".word"), word);
  say(byId("model"), [digest.model, digest.task].filter(Boolean).map((each) => plain(each, 120)).join(" · ") || "\u00a0");
  const waits = digest.waits_for && !digest.bottleneck ? `waiting for ${digest.waits_for}` : (digest.bottleneck ?? "");
  const told = digest.state && waits.startsWith(digest.state) ? waits.slice(digest.state.length).replace(/^[:, ]+/, "") : waits;
  say(byId("bottleneck"), away || plain(told, 300) || "\u00a0");
  const progress = byId("progress");
  progress.max = Math.max(1, digest.steps || 1);
  progress.value = digest.step ?? 0;
  say(byId("steps"), `step ${number(digest.step)} of ${number(digest.steps)}`);
  say(byId("alarm"), [digest.fault, digest.alarm].filter(Boolean).map((each) => `! ${plain(each, 300)}`).join(" "));
  fact("version", version(digest.version));
  if (store.live) fact("time left", away ? "-" : duration(digest.time_left_s));
  fact("running for", duration(Math.max(0, (digest.at ?? 0) - (digest.began ?? digest.at ?? 0))));
  fact("since", date(digest.began));
  if (kept !== null) fact("written", date(kept.written));
  if (store.torn > 0) fact("damaged lines", `${number(store.torn)}, passed over`);
  if (digest.target !== null && digest.target !== undefined) fact("target", number(digest.target));
  if (digest.swarm) fact("swarm", plain(digest.swarm, 200).slice(0, 16));
  say(byId("join-line"), plain(digest.join || "echo-node join ADDRESS", 500));
  lonely(digest);
  const title = `${symbol} ${word} · step ${number(digest.step)} · ${plain(store.name, 40) || "echo-node"}`;
  if (document.title !== title) document.title = title;
}

/** Before the first sampler there is one thing to do, and little to show. */
function lonely({ join, nodes: { columns = [], rows = [] } = {} }) {
  joined ||= rows.some((row) => row[columns.indexOf("role")] === "sampler");
  const alone = store.live && !joined && Boolean(join);
  byId("alone").hidden = !alone;
  document.body.classList.toggle("lonely", alone);
  say(byId("alone-line"), plain(join, 500));
}

function fact(name, value) {
  let shown = facts.get(name);
  if (shown === undefined) {
    shown = el("dd");
    facts.set(name, shown);
    byId("facts").append(el("div", {}, el("dt", {}, name), shown));
  }
  say(shown, value);
}

const CONNECTIONS = {
  connecting: ["◔", "connecting", ""], connected: ["●", "connected", "good"], reconnecting: ["◌", "reconnecting", "warn"],
  refused: ["⊘", "not allowed", "bad"],
};

function tell(state, detail) {
  const isKept = state === "connected" && !store.live && store.snapshots > 0;
  const [symbol, word, tone] = isKept ? ["✓", kept === null ? "kept run" : "report", ""] : CONNECTIONS[state];
  const shown = byId("connection");
  setTone(shown, tone);
  say(shown.querySelector(".symbol"), symbol);
  say(shown.querySelector(".word"), word);
  const wrong = state === "reconnecting" || state === "refused" ? detail : "";
  if (wrong === away) return;
  away = wrong;
  document.body.classList.toggle("away", away !== "");
  if (store.digest !== null) header(store.digest);
}

for (const line of ["join-line", "alone-line"]) byId(line).after(copyButton(byId(line)));
// The server has put the token into a cookie; in the address it would be seen over a shoulder, and in a bookmark.
if (new URLSearchParams(location.search).has("token")) history.replaceState(null, "", location.pathname + location.hash);
if (kept === null) connect(store, draw, tell);
else {
  document.body.classList.add("report");
  store.apply("snapshot", kept.snapshot);
  draw();
}
