// The picture of the swarm: who sends to whom.
import { byId, colours, copyButton, el, fit, onResize, onSeen, onTheme, say } from "./dom.js";
import { duration, number, plain, rate, symbolOf } from "./format.js";
import { parents, place } from "./layout.js";

const NAMED = 28; // Nodes that all get a label; of more only the learner and those pointed at
const NEAR = 14; // Pixels from a node at which it is read
const SETTLE_MS = 10_000; // At least between two layouts of the same nodes: links come and go with each version

const TONES = { good: "c2", warn: "c4", bad: "limit", "": "c5" };

export class Swarm {
  constructor(store, find) {
    this._store = store;
    this._canvas = byId("graph");
    this._nodes = new Map();
    this._places = new Map();
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
    const samplers = this._nodes.size - (this._learner === null ? 0 : 1);
    const empty = samplers <= 0 && this._store.live;
    byId("graph-empty").hidden = !empty;
    say(this._code, plain(digest.join || "echo-node join ADDRESS", 500));
    const links = digest.links ?? [];
    const sent = links.reduce((sum, [, , each]) => sum + (each ?? 0), 0);
    say(byId("swarm-said"), `${number(samplers)} nodes, ${number(links.length)} links, ${rate(sent)} in all`);
    if (this._read !== null) this._tell();
    if (!this._seen || empty || this._canvas.clientWidth === 0) return;
    this._layout(links);
    this._paint(links);
  }

  _take(digest) {
    const columns = digest.nodes?.columns ?? [];
    const at = Object.fromEntries(columns.map((name, place) => [name, place]));
    this._nodes = new Map();
    this._learner = digest.node ?? null;
    for (const row of digest.nodes?.rows ?? []) {
      const node = Object.fromEntries(columns.map((name) => [name, row[at[name]]]));
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
    const { clientWidth: width, clientHeight: height } = this._canvas;
    const key = [width, height, ...this._nodes.keys()].join();
    const wired = links.length > 0;
    const late = performance.now() - this._placed > SETTLE_MS && wired !== this._wired;
    if (key === this._key && !late) return;
    [this._key, this._placed, this._wired] = [key, performance.now(), wired];
    this._places = place(this._learner, this._nodes.keys(), parents(this._learner, this._nodes.keys(), links), width, height);
  }

  _paint(links) {
    const { context } = fit(this._canvas);
    const most = links.reduce((found, [, , each]) => Math.max(found, each ?? 0), 1);
    const busy = links.length > 200;
    context.lineCap = "round";
    for (const mine of [false, true]) {
      for (const [from, to, each] of links) {
        const [a, b] = [this._places.get(from), this._places.get(to)];
        if (!a || !b || (from === this._read || to === this._read) !== mine) continue;
        context.strokeStyle = mine ? colours().c1 : colours().c5;
        context.globalAlpha = mine ? 1 : busy ? 0.22 : 0.5;
        context.lineWidth = each > 0 ? (busy ? 0.5 : 0.8) + (busy ? 2 : 5) * Math.sqrt(each / most) : 0.5;
        context.beginPath();
        context.moveTo(a[0], a[1]);
        context.lineTo(b[0], b[1]);
        context.stroke();
        if (!busy && this._nodes.size <= NAMED) arrow(context, a, b);
      }
    }
    context.globalAlpha = 1;
    for (const node of this._nodes.values()) this._dot(context, node);
    this._labels(context);
  }

  _dot(context, node) {
    const spot = this._places.get(node.node);
    if (!spot) return;
    const [x, y] = spot;
    const tone = symbolOf(node.state).tone;
    const large = node.role === "learner" ? 11 : node.role === "relay" ? 6 : this._nodes.size > 300 ? 3.4 : this._nodes.size > 60 ? 4.5 : 7;
    context.fillStyle = context.strokeStyle = node.role === "learner" ? colours().c0 : colours()[TONES[tone]];
    context.lineWidth = 1.6;
    shape(context, node.role === "learner" ? "star" : node.role === "relay" && node.state === "active" ? "square" : node.state, x, y, large);
    if (node.node !== this._read) return;
    context.strokeStyle = colours().ink;
    context.beginPath();
    context.arc(x, y, large + 4, 0, 2 * Math.PI);
    context.stroke();
  }

  _labels(context) {
    const all = this._nodes.size <= NAMED;
    context.font = "12px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const node of this._nodes.values()) {
      const spot = this._places.get(node.node);
      if (!spot || !(all || node.role === "learner" || node.node === this._read)) continue;
      const words = [nameOf(node).slice(0, 18), node.version].filter(Boolean).join(" · ");
      const wide = context.measureText(words).width;
      const x = Math.min(this._canvas.clientWidth - wide / 2 - 5, Math.max(wide / 2 + 5, spot[0]));
      const y = spot[1] + (node.role === "learner" ? 21 : 17);
      context.globalAlpha = 0.82;
      context.fillStyle = colours().paper;
      context.fillRect(x - wide / 2 - 3, y - 8, wide + 6, 16);
      context.globalAlpha = 1;
      context.fillStyle = colours().ink;
      context.fillText(words, x, y);
    }
    context.textAlign = "start";
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
  return plain(node.name || String(node.node).slice(0, 8), 40);
}

function arrow(context, [ax, ay], [bx, by]) {
  const angle = Math.atan2(by - ay, bx - ax);
  const [x, y] = [(ax + 2 * bx) / 3, (ay + 2 * by) / 3];
  context.lineWidth = 1.5;
  context.beginPath();
  for (const side of [-2.6, 2.6]) {
    context.moveTo(x, y);
    context.lineTo(x + 7 * Math.cos(angle + side), y + 7 * Math.sin(angle + side));
  }
  context.stroke();
}

/** A state's sign, drawn and not written: a thousand glyphs take five times as long. */
function shape(context, state, x, y, size) {
  context.beginPath();
  if (state === "star") {
    for (let at = 0; at < 10; at += 1) {
      const [radius, angle] = [at % 2 ? size * 0.48 : size, (Math.PI * at) / 5 - Math.PI / 2];
      context.lineTo(x + radius * Math.cos(angle), y + radius * Math.sin(angle));
    }
    context.fill();
  } else if (state === "fetching" || state === "installing") {
    context.moveTo(x, y - size);
    context.lineTo(x + size, y + size * 0.8);
    context.lineTo(x - size, y + size * 0.8);
    context.fill();
  } else if (state === "square" || state === "leaf") {
    context.rect(x - size * 0.8, y - size * 0.8, size * 1.6, size * 1.6);
    context.fill();
  } else if (["dead", "gone", "left", "refused"].includes(state)) {
    for (const side of [-1, 1]) {
      context.moveTo(x - size * 0.8, y - side * size * 0.8);
      context.lineTo(x + size * 0.8, y + side * size * 0.8);
    }
    context.stroke();
  } else if (state === "standby" || state === "silent") {
    context.arc(x, y, size * 0.85, 0, 2 * Math.PI);
    context.setLineDash(state === "silent" ? [2, 2] : []);
    context.stroke();
    context.setLineDash([]);
  } else {
    context.arc(x, y, size, 0, 2 * Math.PI);
    context.fill();
  }
}
