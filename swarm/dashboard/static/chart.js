// One chart: uPlot for the drawing, a legend with the newest values, and a line that reads the point under the cursor.
import { colours, el, onResize, onSeen, say, sizeOf } from "./dom.js";
import { date, number, plain, spoken, tick, ticks } from "./format.js";

const HEIGHT = 200;
const PRINTED = 300; // Pixels wide on paper, where two charts stand side by side
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [1, 2], [12, 4]]; // As the report's: not everybody sees colours
export const MOST_CURVES = DASHES.length;
const NEAR = 8; // Pixels from a mark at which it is read
const FEW = 10; // Of a kind within the range get their sign each, and a line if they have one; more are ticks
const APART = 6; // Pixels between two marks of a kind

/** How marks look. Rare ones that change a run get a line through the chart, the others a sign at its foot. */
export const MARKS = {
  checkpoint: { sign: "◆", tone: "dim", line: false },
  sampler_joined: { sign: "▲", tone: "c2", line: false },
  sampler_left: { sign: "▼", tone: "c1", line: false },
  sampler_silent: { sign: "▽", tone: "c1", line: false },
  prepared: { sign: "▶", tone: "c0", line: true },
  trainer_restarted: { sign: "↻", tone: "c3", line: true },
  set: { sign: "✎", tone: "c4", line: true },
  alarm: { sign: "!", tone: "limit", line: true },
  diverged: { sign: "✕", tone: "limit", line: true },
};

/**
 * `wanted` has title, unit, floor, ceiling and pick(store), which returns curves [{name, column, band: {low, high} or
 * undefined, limit}]. `room` is what charts share: x(step), extent(), zoom, marks(), zoomTo(), reset().
 */
export class Chart {
  constructor(wanted, room) {
    this.wanted = wanted;
    this._room = room;
    this._seen = false;
    this._dirty = true;
    this._shape = "";
    this._hidden = new Set();
    this._curves = [];
    this._plot = null;
    this._empty = el("p", { class: "empty" }, wanted.empty ?? "No figure of this kind yet.");
    this._box = el("div", {
      class: "plot", tabindex: "0", role: "group", "aria-roledescription": "chart", "aria-label": wanted.title,
      "aria-describedby": "curves-help", on: { keydown: (event) => this._key(event) },
    }, this._empty);
    this._legend = el("ul", { class: "legend" });
    this._read = el("span", { class: "read" });
    this._told = "";
    const unit = wanted.unit ? el("span", { class: "unit" }, wanted.unit) : null;
    const head = el("figcaption", {}, el("span", {}, plain(wanted.title, 80), " ", unit), this._read);
    if (wanted.remove) {
      const label = `Remove ${plain(wanted.title, 80)}`;
      head.append(el("button", { type: "button", class: "small", "aria-label": label, on: { click: wanted.remove } }, "✕"));
    }
    this.figure = el("figure", { class: "chart" }, head, this._box, this._legend);
    onSeen(this.figure, (seen) => {
      this._seen = seen;
      if (seen && this._dirty) this.draw();
    });
    onResize(this._box, () => this._plot?.setSize({ width: this._box.clientWidth, height: HEIGHT }));
    for (const [kind, width] of [["beforeprint", () => PRINTED], ["afterprint", () => this._box.clientWidth]]) {
      window.addEventListener(kind, () => this._plot?.setSize({ width: width(), height: HEIGHT }));
    }
  }

  /** Take the newest figures; the drawing waits until the chart is on the screen. */
  update(store) {
    this._curves = this.wanted.pick(store).slice(0, 2 * MOST_CURVES);
    this._dirty = true;
    this._empty.hidden = this._curves.length > 0;
    this._keys();
    if (this._seen) this.draw();
  }

  /** Drop what was built with other colours or another axis. */
  rebuild() {
    this._shape = "";
    this._dirty = true;
    for (const item of this._legend.children) item.querySelector("canvas")?.remove();
    this._legend.replaceChildren();
    this._keys();
    if (this._seen) this.draw();
  }

  draw() {
    this._dirty = false;
    const shape = this._curves.map((curve) => `${curve.name}|${curve.band !== undefined}`).join();
    if (this._curves.length === 0 || sizeOf(this._box).width === 0) {
      this._plot?.destroy();
      this._plot = null;
      this._shape = "";
      return;
    }
    const data = this._aligned();
    if (shape === this._shape) {
      this._plot.setData(data);
      return;
    }
    this._plot?.destroy();
    this._shape = shape;
    this._plot = new uPlot(this._options(), data, this._box);
  }

  again() {
    if (this._seen && this._plot !== null) this._plot.setData(this._plot.data);
    else this._dirty = true;
  }

  _aligned() {
    const tables = this._curves.flatMap(({ column, band, limit }) => {
      const xs = [];
      const keep = [];
      column.x.forEach((step, at) => {
        const x = this._room.x(step);
        if (xs.length > 0 && x <= xs.at(-1)) return; // A resumed run may count rollouts afresh
        xs.push(x);
        keep.push(at);
      });
      const picked = (values) => keep.map((at) => values[at]);
      const mean = picked(column.mean);
      if (limit && xs.length > 0) {
        xs.push(Math.max(xs.at(-1) + 1e-9, this._room.extent()[1]));
        mean.push(mean.at(-1));
      }
      return [band ? [xs, picked(band.high), picked(band.low), mean] : [xs, mean]];
    });
    return tables.length === 1 ? tables[0] : uPlot.join(tables);
  }

  _options() {
    const series = [{}];
    const bands = [];
    this._places = [];
    this._curves.forEach((curve, at) => {
      const { colour, dash } = looks(curve, at);
      if (curve.band) {
        const first = series.length;
        bands.push({ series: [first, first + 1], fill: `${colour}2e` });
        const edge = { width: 0, points: { show: false } };
        series.push(edge, { ...edge });
      }
      this._places.push(series.length);
      series.push({
        label: curve.name, stroke: colour, width: 1.8, dash,
        points: { show: curve.column.x.length < 12 && !curve.limit, size: 6, fill: colour },
        paths: curve.limit ? uPlot.paths.stepped({ align: 1 }) : undefined,
        show: !this._hidden.has(curve.name),
      });
    });
    const axis = { stroke: colours().dim, grid: { stroke: colours().grid, width: 1 }, ticks: { stroke: colours().line, width: 1, size: 4 }, font: "12px system-ui, sans-serif" };
    const timed = this._room.across === "time";
    return {
      width: this._box.clientWidth, height: HEIGHT, legend: { show: false }, series, bands, padding: [8, 16, 0, 0],
      scales: {
        x: { time: timed, range: () => this._room.zoom ?? this._room.extent() },
        y: { range: (_, low, high) => yRange(this.wanted, low, high) },
      },
      axes: [
        { ...axis, size: 30, space: 64, values: (_, at, _axis, _space, step) => (timed ? at.map((each) => tick(each, step)) : ticks(at, step)) },
        { ...axis, size: 48, space: 32, values: (_, at, _axis, _space, step) => ticks(at, step) },
      ],
      cursor: {
        y: false, points: { size: 7 }, drag: { x: true, y: false, setScale: false },
        sync: { key: "curves", scales: ["x", null], filters: { pub: (kind) => kind === "mousemove" || kind === "mouseleave" } },
        bind: { dblclick: () => () => this._room.reset() },
      },
      hooks: {
        draw: [(plot) => this._drawMarks(plot)],
        setCursor: [(plot) => this._readCursor(plot)],
        setSelect: [(plot) => this._zoom(plot)],
      },
    };
  }

  _zoom(plot) {
    const { left, width } = plot.select;
    if (width > 4) this._room.zoomTo(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  }

  _drawMarks(plot) {
    const { ctx } = plot;
    const { left, top, width, height } = plot.bbox;
    const ratio = uPlot.pxRatio;
    ctx.save();
    ctx.font = `bold ${11 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    ctx.lineWidth = ratio;
    const kinds = new Map();
    for (const { x, kind } of this._room.marks()) {
      const at = plot.valToPos(x, "x", true);
      if (at < left || at > left + width) continue;
      const places = kinds.get(kind) ?? { last: -Infinity, count: 0, drawn: [] };
      kinds.set(kind, places);
      places.count += 1;
      if (Math.abs(at - places.last) < APART * ratio) continue;
      places.last = at;
      places.drawn.push(at);
    }
    for (const [at, kind, few] of [...kinds].flatMap(([kind, { count, drawn }]) => drawn.map((at) => [at, kind, count < FEW]))) {
      const look = MARKS[kind];
      ctx.fillStyle = ctx.strokeStyle = colours()[look.tone];
      if (!few) {
        ctx.fillRect(at - ratio, top + height - 7 * ratio, 2 * ratio, 7 * ratio);
      } else if (look.line) {
        ctx.setLineDash([3 * ratio, 3 * ratio]);
        ctx.beginPath();
        ctx.moveTo(at, top + 12 * ratio);
        ctx.lineTo(at, top + height);
        ctx.stroke();
        ctx.fillText(look.sign, at, top + 9 * ratio);
      } else {
        ctx.fillText(look.sign, at, top + height - 2 * ratio);
      }
    }
    ctx.restore();
  }

  _readCursor(plot) {
    const { left, idx } = plot.cursor;
    const away = left === undefined || left < 0 || idx === null || idx === undefined;
    const where = away ? [] : this._where(plot, left, idx);
    say(this._read, where.join(" · "));
    this._told = away ? "" : [...where, ...this._values(plot, idx)].join(" · ");
    this._keys(away ? undefined : (at) => nearest(plot.data[this._places[at]] ?? [], idx));
  }

  /** Where the cursor is, and the marks there; the legend has the values. */
  _where(plot, left, idx) {
    const x = plot.data[0][idx];
    const where = this._room.across === "time" ? date(x) : `${this._room.across} ${number(Math.round(x))}`;
    const marks = this._room.marks().filter((mark) => Math.abs(plot.valToPos(mark.x, "x") - left) <= NEAR);
    return [where, ...marks.slice(0, 3).map((mark) => `${MARKS[mark.kind].sign} ${spoken(mark.text)}`)];
  }

  _values(plot, idx) {
    const values = this._curves.map((curve, at) => {
      const place = this._places[at];
      const value = nearest(plot.data[place], idx);
      const band = curve.band && value !== null ? [plot.data[place - 1][idx], plot.data[place - 2][idx]] : null;
      const spread = band && band[0] < band[1] ? ` (${number(band[0])} to ${number(band[1])})` : "";
      return this._hidden.has(curve.name) || value === null ? null : `${plain(curve.label ?? curve.name, 40)} ${number(value)}${spread}`;
    });
    return values.filter((value) => value !== null);
  }

  _key(event) {
    const plot = this._plot;
    if (plot === null || event.ctrlKey || event.altKey || event.metaKey) return;
    const xs = plot.data[0];
    const [low, high] = [plot.scales.x.min, plot.scales.x.max];
    const now = plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : null;
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (way !== undefined) {
      const stops = (event.shiftKey ? this._room.marks().map((mark) => mark.x).sort((a, b) => a - b) : xs).filter((x) => x >= low && x <= high);
      const least = 0.5 / (plot.bbox.width / uPlot.pxRatio) * (high - low); // Half a pixel: the same place as now
      const next = way > 0 ? stops.find((x) => x > (now ?? -Infinity) + least) : stops.findLast((x) => x < (now ?? Infinity) - least);
      if (next !== undefined) {
        plot.setCursor({ left: plot.valToPos(next, "x"), top: 10 }, true, true);
        this._room.tell(this._told);
      }
    } else if (event.key === "+" || event.key === "=" || event.key === "-") {
      const middle = now ?? (low + high) / 2;
      const half = ((high - low) / 2) * (event.key === "-" ? 2 : 0.5);
      this._room.zoomTo(middle - half, middle + half);
      if (now !== null) queueMicrotask(() => plot.setCursor({ left: plot.valToPos(now, "x"), top: 10 }, true, true)); // After uPlot, which scales in one too
    } else if (event.key === "Escape") {
      this._room.reset();
    } else return;
    event.preventDefault();
  }

  /** The legend, with the newest values or those at the cursor. */
  _keys(valueOf = (at) => this._curves[at].column.last) {
    const names = new Set(this._curves.map((curve) => curve.name));
    for (const item of [...this._legend.children]) if (!names.has(item.dataset.name)) item.remove();
    this._curves.forEach((curve, at) => {
      let item = [...this._legend.children].find((each) => each.dataset.name === curve.name);
      if (item === undefined) {
        item = this._keyOf(curve, at);
        this._legend.append(item);
      }
      say(item.querySelector("b"), number(valueOf(at)));
    });
  }

  _keyOf(curve, at) {
    const canvas = el("canvas", { "aria-hidden": "true", width: 52, height: 28 });
    const context = canvas.getContext("2d");
    const { colour, dash } = looks(curve, at);
    context.strokeStyle = colour;
    context.lineWidth = 4;
    context.setLineDash(dash.map((length) => 2 * length));
    context.beginPath();
    context.moveTo(0, 14);
    context.lineTo(52, 14);
    context.stroke();
    const button = el("button", { type: "button", class: "key", "aria-pressed": "true", title: plain(curve.name, 120) }, canvas, el("span", { class: "name" }, plain(curve.label ?? curve.name, 60)), " ", el("b"));
    button.addEventListener("click", () => {
      const hide = !this._hidden.has(curve.name);
      if (hide) this._hidden.add(curve.name);
      else this._hidden.delete(curve.name);
      button.setAttribute("aria-pressed", String(!hide));
      this._shape = "";
      this.draw();
    });
    const item = el("li", {}, button);
    item.dataset.name = curve.name;
    button.setAttribute("aria-pressed", String(!this._hidden.has(curve.name)));
    return item;
  }
}

function looks(curve, at) {
  if (curve.limit) return { colour: colours().limit, dash: [5, 3] };
  return { colour: colours()[`c${at % MOST_CURVES}`], dash: DASHES[at % MOST_CURVES] };
}

function yRange(wanted, low, high) {
  if (low === null || high === null || !Number.isFinite(low + high)) return [0, 1];
  const [floor, ceiling] = [Math.min(low, wanted.floor ?? low), Math.max(high, wanted.ceiling ?? high)];
  const pad = (ceiling - floor || Math.abs(ceiling) || 1) * 0.06;
  return [wanted.floor !== undefined && floor === wanted.floor ? floor : floor - pad, ceiling === wanted.ceiling ? ceiling : ceiling + pad];
}

/** The value at `idx`, or the last one before: curves that are joined have other points. */
function nearest(values, idx) {
  for (let at = idx; at >= 0; at -= 1) if (values[at] !== undefined && values[at] !== null) return values[at];
  return null;
}
