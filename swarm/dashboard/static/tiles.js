// The tiles: a number each, a sparkline of its column, and the details on demand.
import { byId, colours, el, fit, onTheme, say, setTone } from "./dom.js";
import { plain } from "./format.js";

const POINTS = 120; // Newest points of a sparkline, about one a pixel of the narrowest tile
const TILES = 24; // More than there are
const BESIDE = 4; // Details beside the figure, as many as there are stages of a broadcast

const TONES = { good: "▲ good", warn: "◆ look", bad: "✕ bad" };

export class Tiles {
  constructor(store) {
    this._store = store;
    this._list = byId("tiles");
    this._tiles = new Map();
    onTheme(() => this.draw(new Set(["steps"])));
  }

  /** `changed` is what changed of the store. */
  draw(changed) {
    const stepped = changed.has("steps");
    const tiles = (this._store.digest?.tiles ?? []).slice(0, TILES);
    for (const tile of tiles) {
      let shown = this._tiles.get(tile.id);
      if (shown === undefined) {
        shown = this._make(tile);
        this._tiles.set(tile.id, shown);
        this._list.append(shown.item);
      }
      say(shown.label, plain(tile.label, 40));
      this._value(shown, plain(tile.text, 40));
      setTone(shown.value, tile.tone ?? "");
      say(shown.tone, TONES[tile.tone] ? ` (${TONES[tile.tone].slice(2)})` : "");
      this._details(shown, tile.details ?? []);
      if (changed.has("run")) shown.history.length = 0; // What another life of the learner said
      if (changed.has("digest")) remember(shown.history, tile.value);
      if (stepped || shown.series !== tile.series || !this._column(tile)) {
        shown.series = tile.series;
        const known = typeof tile.value === "number";
        this._spark(shown, known ? (this._column(tile)?.mean.slice(-POINTS) ?? shown.history) : []);
      }
    }
    for (const [id, shown] of this._tiles) {
      if (tiles.some((tile) => tile.id === id)) continue;
      shown.item.remove();
      this._tiles.delete(id);
    }
  }

  /** The steps' figure that a tile shows; held-out figures are of versions, and kept apart. */
  _column(tile) {
    const { columns, evaluated } = this._store;
    if (tile.id !== "held_out") return columns.get(tile.series);
    return evaluated.get(tile.series) ?? evaluated.get("exact_match") ?? evaluated.get("reward");
  }

  _make(tile) {
    const [label, value] = [el("span", { class: "label" }), el("span", { class: "value" })];
    const tone = el("span", { class: "hidden" });
    const beside = el("span", { class: "beside" });
    const canvas = el("canvas", { "aria-hidden": "true" });
    const list = el("dl");
    const summary = el("summary", {}, "details");
    summary.append(el("span", { class: "hidden" }, ` of ${plain(tile.label, 40)}`));
    const more = el("details", {}, summary, list);
    const item = el("li", { class: "tile", id: `tile-${plain(tile.id, 40)}` }, label, value, tone, beside, canvas, more);
    return { item, label, value, tone, beside, canvas, list, more, rows: [], history: [], series: undefined };
  }

  /** The figure, and its unit smaller beside it, so that it fits where there is little room. */
  _value(shown, text) {
    if (shown.text === text) return;
    shown.text = shown.value.title = text;
    const [, figure, unit] = /^([-+\d.,]+(?: ?%)?) (.+)$/.exec(text) ?? [null, text || "–", ""];
    const words = /\d|–/.test(figure) ? [figure] : [el("span", { class: "unit" }, figure)];
    shown.value.replaceChildren(...words, ...(unit ? [" ", el("span", { class: "unit" }, unit)] : []));
  }

  /** The first ones always, all of them on demand. */
  _details(shown, details) {
    const first = details.slice(0, BESIDE).map(([name, text]) => (name === "and" ? plain(text, 60) : `${plain(name, 40)} ${plain(text, 40)}`));
    while (shown.beside.children.length > first.length) shown.beside.lastChild.remove();
    first.forEach((said, at) => say(shown.beside.children[at] ?? shown.beside.appendChild(el("span")), said));
    shown.more.hidden = details.length === 0;
    while (shown.rows.length > details.length) for (const each of shown.rows.pop()) each.remove();
    details.slice(0, 32).forEach(([name, text], at) => {
      if (shown.rows[at] === undefined) {
        shown.rows[at] = [el("dt"), el("dd")];
        shown.list.append(...shown.rows[at]);
      }
      say(shown.rows[at][0], plain(name, 60));
      say(shown.rows[at][1], plain(text, 80));
    });
  }

  _spark(shown, ys) {
    const { context, width, height } = fit(shown.canvas);
    if (ys.length < 2 || width === 0) return;
    const [low, high] = [Math.min(...ys), Math.max(...ys)];
    const x = (at) => 2 + ((width - 6) * at) / (ys.length - 1);
    const y = (value) => (high === low ? height / 2 : 4 + ((height - 8) * (high - value)) / (high - low));
    context.beginPath();
    ys.forEach((value, at) => context.lineTo(x(at), y(value)));
    context.strokeStyle = colours().c0;
    context.lineWidth = 1.6;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(x(ys.length - 1), height);
    context.lineTo(x(0), height);
    context.fillStyle = `${colours().c0}22`;
    context.fill();
    context.beginPath();
    context.arc(x(ys.length - 1), y(ys.at(-1)), 2.4, 0, 2 * Math.PI);
    context.fillStyle = colours().c0;
    context.fill();
  }
}

/** What a tile without a figure of steps showed while this page was open. */
function remember(history, value) {
  if (typeof value !== "number") return;
  history.push(value);
  if (history.length > POINTS) history.shift();
}
