// The picture of the swarm: who sends to whom.
import { byId, colours, copyButton, el, fit, onResize, onSeen, onTheme, say, sizeOf } from "./dom.js";
import { called, counted, duration, number, plain, rate, symbolOf } from "./format.js";
import { parents, place } from "./layout.js";

const NAMED = 28; // Nodes that all get a label; of more only the learner and those pointed at
const CROWD = 300; // Nodes of which only the links of the one pointed at are drawn: all are a blur
const NEAR = 14; // Pixels from a node at which it is read
const SETTLE_MS = 10_000; // At least between two layouts of the same nodes: links come and go with each version

const FIELDS = ["node", "name", "role", "state", "engine", "version", "tokens_per_s", "last_seen_s", "why"];
const WIDTHS = 5; // Of lines, so that lines of one width are drawn at once: a thousand single strokes take 30 ms
const TONES = { good: "c2", warn: "c4", bad: "limit", "": "c5" };

export class Swarm {
  constructor(store, find) {
    this._store = store;
    this._canvas = byId("graph");
    this._nodes = new Map();
    this._places = new Map();
    this._sides = new Map();
    this._learner = null;
    this._read = null;
    this._key = "";
    this._placed = 0;
    this._seen = false;
    this._legend = "";
    this._listen(find);
    onSeen(this._canvas, (seen) => {
      this._seen = seen;
      if (seen) this.draw();
    });
    onResize(this._canvas, () => {
      this._key = "";
      this.draw();
    });
    onTheme(() => {
      this._legend = "";
      this.draw();
    });
    this._code = el("code");
    byId("graph-empty").append(
      el("p", {}, "No sampler has joined yet. On any machine with echo-node installed, run:"),
      el("p", { class: "line" }, this._code, copyButton(this._code)),
    );
  }

  draw() {
    const { digest } = this._store;
    if (digest === null) return;
    this._take(digest);
    const empty = this._nodes.size <= (this._learner === null ? 0 : 1) && this._store.live;
    byId("graph-empty").hidden = !empty;
    say(this._code, plain(digest.join || "echo-node join ADDRESS", 500));
    const links = digest.links ?? [];
    const sent = links.reduce((sum, [, , each]) => sum + (each ?? 0), 0);
    say(byId("swarm-said"), `${counted(this._nodes.size, "node")}, ${counted(links.length, "link")}, ${rate(sent)} in all${this._nodes.size > CROWD ? "; point at a node for its links" : ""}`);
    if (this._read !== null) this._tell();
    if (!this._seen || empty || sizeOf(this._canvas).width === 0) return;
    this._layout(links);
    this._paint(links);
  }

  _take(digest) {
    const columns = digest.nodes?.columns ?? [];
    const at = FIELDS.map((name) => [name, columns.indexOf(name)]);
    this._nodes = new Map();
    this._learner = digest.node ?? null;
    for (const row of digest.nodes?.rows ?? []) {
      const node = {};
      for (const [name, place] of at) node[name] = row[place];
      this._nodes.set(node.node, node);
      if (node.role === "learner") this._learner = node.node;
    }
    if (this._learner !== null && !this._nodes.has(this._learner)) {
      this._nodes.set(this._learner, { node: this._learner, name: "learner", role: "learner", state: digest.state, version: digest.version });
    }
    const states = [...new Set([...this._nodes.values()].filter((node) => node.role !== "learner").map((node) => node.state ?? "unknown"))].sort();
    if (states.join() === this._legend) return;
    this._legend = states.join();
    byId("graph-legend").replaceChildren(
      ...[["★", "c0", "learner"], ...states.map((state) => [symbolOf(state).symbol, TONES[symbolOf(state).tone], state])].map(([symbol, colour, word]) => {
        const sign = el("span", { class: "symbol", "aria-hidden": "true" }, symbol);
        sign.style.color = colours()[colour];
        return el("li", {}, sign, plain(word, 30));
      }),
    );
  }

  _layout(links) {
    const { width, height } = sizeOf(this._canvas);
    const key = [width, height, ...this._nodes.keys()].join();
    const wired = links.length > 0;
    const late = performance.now() - this._placed > SETTLE_MS && wired !== this._wired;
    if (key === this._key && !late) return;
    [this._key, this._placed, this._wired] = [key, performance.now(), wired];
    this._sides = new Map(); // Where labels are: they stay there as long as the nodes
    this._places = place(this._learner, this._nodes.keys(), parents(this._learner, this._nodes.keys(), links), width, height);
  }

  _paint(links) {
    const { context } = fit(this._canvas);
    const crowd = this._nodes.size > NAMED;
    const most = links.reduce((found, [, , each]) => Math.max(found, each ?? 0), 1);
    const lines = new Map();
    const mine = [];
    for (const [from, to, each] of links) {
      if (this._nodes.size > CROWD && from !== this._read && to !== this._read) continue;
      const ends = [this._places.get(from), this._places.get(to)];
      if (!ends[0] || !ends[1]) continue;
      const width = each > 0 ? Math.ceil(WIDTHS * Math.sqrt(each / most)) : 0;
      if (from === this._read || to === this._read) mine.push([ends, width]);
      else grouped(lines, width).push(ends);
    }
    context.lineCap = "round";
    context.strokeStyle = colours().c5;
    context.globalAlpha = links.length > 200 ? 0.3 : 0.5;
    for (const [width, ends] of lines) drawLines(context, ends, width, crowd);
    context.globalAlpha = 1;
    context.strokeStyle = colours().c1;
    for (const [ends, width] of mine) drawLines(context, [ends], width, crowd);
    this._dots(context);
    this._labels(context, links);
  }

  /** All dots of one sign, colour and size at once. */
  _dots(context) {
    const groups = new Map();
    const small = this._nodes.size > CROWD ? 3.4 : this._nodes.size > 60 ? 4.5 : 7;
    for (const node of this._nodes.values()) {
      const spot = this._places.get(node.node);
      if (!spot) continue;
      const size = { learner: 11, relay: Math.max(6, small) }[node.role] ?? small;
      const sign = node.role === "learner" ? "star" : node.role === "relay" && node.state === "active" ? "square" : node.state;
      const colour = node.role === "learner" ? "c0" : TONES[symbolOf(node.state).tone];
      grouped(groups, `${sign} ${colour} ${size}`, { sign, colour, size }).push(spot);
      if (node.node !== this._read) continue;
      context.strokeStyle = colours().ink;
      context.lineWidth = 1.6;
      context.beginPath();
      context.arc(spot[0], spot[1], size + 4, 0, 2 * Math.PI);
      context.stroke();
    }
    context.lineWidth = 1.6;
    for (const spots of groups.values()) {
      const { sign, colour, size } = spots.of;
      context.fillStyle = context.strokeStyle = colours()[colour];
      context.beginPath();
      for (const [x, y] of spots) trace(context, sign, x, y, size);
      context.setLineDash(sign === "silent" ? [2, 2] : []);
      if (OUTLINED.has(sign)) context.stroke();
      else context.fill();
    }
    context.setLineDash([]);
  }

  _labels(context, links) {
    const { width, height } = sizeOf(this._canvas);
    const all = this._nodes.size <= NAMED;
    context.font = "12px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const node of this._nodes.values()) {
      const spot = this._places.get(node.node);
      if (!spot || !(all || (node.role === "learner" && this._nodes.size <= CROWD) || node.node === this._read)) continue;
      const words = [nameOf(node).slice(0, 18), node.version].filter(Boolean).join(" · ");
      const wide = context.measureText(words).width;
      const side = this._sides.get(node.node) ?? (all ? this._side(node.node, links, wide) : SIDES[0]);
      this._sides.set(node.node, side);
      const x = Math.min(width - wide / 2 - 5, Math.max(wide / 2 + 5, spot[0] + side[0] * (wide / 2 + 13)));
      const y = Math.min(height - 12, Math.max(12, spot[1] + side[1] * (node.role === "learner" ? 22 : 18)));
      context.globalAlpha = 0.82;
      context.fillStyle = colours().paper;
      context.fillRect(x - wide / 2 - 3, y - 8, wide + 6, 16);
      context.globalAlpha = 1;
      context.fillStyle = colours().ink;
      context.fillText(words, x, y);
    }
    context.textAlign = "start";
  }

  /** The side of a node on which a label of that width lies on the fewest links and nodes. */
  _side(node, links, wide) {
    const [x, y] = this._places.get(node);
    const [across, down] = [(wide + 10) / 2, 9];
    const points = [...this._places].filter(([each]) => each !== node).map(([, spot]) => spot);
    for (const [from, to] of links) {
      const [a, b] = [this._places.get(from), this._places.get(to)];
      if (a && b) for (let part = 0; part <= 1; part += 1 / 40) points.push([a[0] + part * (b[0] - a[0]), a[1] + part * (b[1] - a[1])]);
    }
    const { width, height } = sizeOf(this._canvas);
    const cost = ([right, below]) => {
      const [left, top] = [x + right * (wide / 2 + 13), y + below * 18];
      const out = left - across < 0 || left + across > width || top - down < 2 || top + down > height - 2;
      return (out ? 1e4 : 0) + points.filter(([px, py]) => Math.abs(px - left) < across && Math.abs(py - top) < down).length;
    };
    return SIDES.reduce((best, each) => (cost(each) < cost(best) ? each : best));
  }

  _tell() {
    const node = this._nodes.get(this._read);
    if (node === undefined) {
      this._read = null;
      return;
    }
    const link = (this._store.digest.links ?? []).filter(([from, to]) => from === this._read || to === this._read);
    const [up, down] = [0, 1].map((end) => link.filter((each) => each[end] === this._read).length);
    const parts = [
      `${nameOf(node)}: ${plain(node.role, 20)}, ${plain(node.state ?? "state unknown", 20)}`, node.engine && plain(node.engine, 40),
      node.version && `version ${plain(node.version, 20)}`, typeof node.tokens_per_s === "number" && `${number(Math.round(node.tokens_per_s))} tokens/s`,
      `sends to ${up}`, `hears from ${down}`, typeof node.last_seen_s === "number" && `seen ${duration(node.last_seen_s)} ago`, node.why && plain(node.why, 100),
    ];
    say(byId("graph-read"), parts.filter(Boolean).join(" · "));
  }

  _select(node) {
    if (node === this._read) return;
    this._read = node;
    if (node === null) say(byId("graph-read"), "\u00a0");
    this.draw();
  }

  _at(event) {
    const box = this._canvas.getBoundingClientRect();
    let [best, least] = [null, NEAR];
    for (const [node, [x, y]] of this._places) {
      const far = Math.hypot(x - event.clientX + box.left, y - event.clientY + box.top);
      if (far < least && this._nodes.has(node)) [best, least] = [node, far];
    }
    return best;
  }

  _listen(find) {
    const canvas = this._canvas;
    canvas.addEventListener("pointermove", (event) => this._select(this._at(event)));
    canvas.addEventListener("pointerleave", () => document.activeElement !== canvas && this._select(null));
    canvas.addEventListener("dblclick", (event) => {
      const node = this._at(event);
      if (node !== null) find(node);
    });
    canvas.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
      const nodes = [...this._places.keys()].filter((node) => this._nodes.has(node));
      if (way !== undefined && nodes.length > 0) {
        const now = nodes.indexOf(this._read);
        this._select(nodes[(Math.max(0, now + (now < 0 && way < 0 ? 0 : way)) + nodes.length) % nodes.length]);
      } else if (event.key === "Enter" && this._read !== null) find(this._read);
      else if (event.key === "Escape") this._select(null);
      else return;
      event.preventDefault();
    });
  }
}

function nameOf(node) {
  return called(node.name, node.node);
}

/** The list of a group, which is made at its first member. */
function grouped(groups, key, of) {
  let group = groups.get(key);
  if (group === undefined) {
    group = [];
    group.of = of;
    groups.set(key, group);
  }
  return group;
}

function drawLines(context, lines, width, crowd) {
  context.lineWidth = 0.6 + width * (crowd ? 0.45 : 1);
  context.beginPath();
  for (const [a, b] of lines) {
    context.moveTo(a[0], a[1]);
    context.lineTo(b[0], b[1]);
  }
  context.stroke();
  if (crowd) return;
  context.lineWidth = 1.5;
  context.beginPath();
  for (const [a, b] of lines) {
    const angle = Math.atan2(b[1] - a[1], b[0] - a[0]);
    const [x, y] = [(a[0] + 2 * b[0]) / 3, (a[1] + 2 * b[1]) / 3];
    for (const side of [-2.6, 2.6]) {
      context.moveTo(x, y);
      context.lineTo(x + 7 * Math.cos(angle + side), y + 7 * Math.sin(angle + side));
    }
  }
  context.stroke();
}

const SIDES = [[0, 1], [0, -1], [1, 0], [-1, 0]]; // Below, above, right, left
const OUTLINED = new Set(["dead", "gone", "left", "refused", "standby", "silent"]);

/** A state's sign as a path: drawn and not written, a thousand glyphs take five times as long. */
function trace(context, sign, x, y, size) {
  if (sign === "star") {
    for (let at = 0; at <= 10; at += 1) {
      const [radius, angle] = [at % 2 ? size * 0.48 : size, (Math.PI * at) / 5 - Math.PI / 2];
      const [px, py] = [x + radius * Math.cos(angle), y + radius * Math.sin(angle)];
      if (at === 0) context.moveTo(px, py);
      else context.lineTo(px, py);
    }
  } else if (sign === "fetching" || sign === "installing") {
    context.moveTo(x, y - size);
    context.lineTo(x + size, y + size * 0.8);
    context.lineTo(x - size, y + size * 0.8);
    context.closePath();
  } else if (sign === "square" || sign === "leaf") {
    context.rect(x - size * 0.8, y - size * 0.8, size * 1.6, size * 1.6);
  } else if (["dead", "gone", "left", "refused"].includes(sign)) {
    for (const side of [-1, 1]) {
      context.moveTo(x - size * 0.8, y - side * size * 0.8);
      context.lineTo(x + size * 0.8, y + side * size * 0.8);
    }
  } else {
    context.moveTo(x + size * 0.9, y);
    context.arc(x, y, size * 0.9, 0, 2 * Math.PI);
  }
}
