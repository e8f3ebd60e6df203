// What the page knows of the run: the newest snapshot, and what the stream added to it. Memory stays bounded over days.
import { called } from "./format.js";

const POINTS = 400; // Of one curve after thinning; it is thinned again at twice as many. More than a screen's width
// shows of a chart, and a page of 60 figures stays under 20 MB.
const EVENTS = 2000; // Newest events kept; older ones are asked for
const MARKS = 600; // Newest marks kept; beyond, charts are a carpet of them
const NAMES = 512; // Of figures, twice what the report reads
const MARKED = new Set([
  "checkpoint", "sampler_joined", "sampler_left", "sampler_silent", "trainer_restarted", "prepared", "set", "alarm",
  "diverged",
]);
const NO_FIGURES = new Set(["step", "time", "kind", "version", "newest_version", "prompts", "samples", "unaudited", "byte"]);

const numeric = (value) => typeof value === "number" && Number.isFinite(value);

/** The value of y at `at`, on straight lines between points whose x rise; beyond both ends, the end's slope goes on. */
export function along(xs, ys, at) {
  const last = xs.length - 1;
  if (last < 0) return at;
  if (last === 0) return ys[0];
  let [low, high] = [0, last];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= at) low = middle;
    else high = middle;
  }
  const span = xs[high] - xs[low];
  return span === 0 ? ys[high] : ys[low] + ((at - xs[low]) * (ys[high] - ys[low])) / span;
}

/** A figure's points: x, and the mean, the lowest and the highest value of each, with how many steps it stands for. */
class Column {
  constructor(kept = {}) {
    this.x = [...(kept.x ?? [])];
    this.mean = [...(kept.mean ?? [])];
    this.low = [...(kept.low ?? kept.mean ?? [])];
    this.high = [...(kept.high ?? kept.mean ?? [])];
    this.weight = this.x.map((x, at) => Math.max(1, at === 0 ? 1 : x - this.x[at - 1]));
  }

  get last() {
    return this.mean.at(-1);
  }

  add(x, value) {
    if (this.x.length > 0 && x <= this.x.at(-1)) return;
    this.x.push(x);
    this.mean.push(value);
    this.low.push(value);
    this.high.push(value);
    this.weight.push(1);
    if (this.x.length > 2 * POINTS) this._thin();
  }

  /** Join neighbours until each point stands for about equally many steps. */
  _thin() {
    const wanted = this.weight.reduce((sum, each) => sum + each, 0) / POINTS;
    const was = { x: this.x, mean: this.mean, low: this.low, high: this.high, weight: this.weight };
    const empty = { x: [], mean: [], low: [], high: [], weight: [] };
    Object.assign(this, empty);
    for (let from = 0; from < was.x.length; ) {
      let [weight, x, mean, low, high] = [0, 0, 0, Infinity, -Infinity];
      do {
        const each = was.weight[from];
        weight += each;
        x += each * was.x[from];
        mean += each * was.mean[from];
        low = Math.min(low, was.low[from]);
        high = Math.max(high, was.high[from]);
        from += 1;
      } while (weight < wanted && from < was.x.length - 1); // The newest value stays a point of its own
      this.x.push(x / weight);
      this.mean.push(mean / weight);
      this.low.push(low);
      this.high.push(high);
      this.weight.push(weight);
    }
  }
}

export function columnsOf(kept) {
  return new Map(Object.entries(kept ?? {}).slice(0, NAMES).map(([name, column]) => [name, new Column(column)]));
}

/** The fields are null, or empty, until the first snapshot. `changed` has the names of what is to be drawn again. */
export class Store {
  constructor() {
    this.changed = new Set();
    this.snapshots = 0;
    this.eventsGone = 0; // How often events were let go
    this._take({});
  }

  /** Put in one message of the stream. An unknown kind is one of a newer learner: it is left alone. */
  apply(kind, data) {
    if (kind === "snapshot") {
      this.snapshots += 1;
      this._take(data);
      for (const part of ["digest", "steps", "events", "run"]) this.changed.add(part);
    } else if (kind === "digest") {
      this.digest = data;
      this.changed.add("digest");
    } else if (kind === "steps") {
      for (const line of data) this._addStep(line);
      this.changed.add("steps");
    } else if (kind === "events") {
      for (const event of data) this._addEvent(event);
      this.changed.add("events");
    }
  }

  _take(snapshot) {
    this.boot = snapshot.boot ?? "";
    this.live = snapshot.live ?? false;
    this.canSet = snapshot.can_set ?? false;
    this.name = snapshot.name ?? "";
    this.digest = snapshot.digest ?? null;
    this.config = snapshot.config ?? {};
    this.torn = snapshot.torn ?? 0;
    this.columns = columnsOf(snapshot.columns);
    this.evaluated = columnsOf(snapshot.evaluated);
    this.times = new Column(snapshot.times);
    this.marks = (snapshot.marks ?? []).slice(-MARKS);
    this.bounds = snapshot.bounds ?? [];
    this.eventsGone += 1;
    this.events = (snapshot.events ?? []).slice(-EVENTS);
    this.counts = { ...(snapshot.event_counts ?? {}) };
  }

  /** A node's name, or the beginning of its id. */
  nameOf(id) {
    const { columns = [], rows = [] } = this.digest?.nodes ?? {};
    return called(rows.find((row) => row[columns.indexOf("node")] === id)?.[columns.indexOf("name")], id);
  }

  _addStep(line) {
    if (!numeric(line.step)) return;
    for (const [name, value] of Object.entries(line)) {
      if (NO_FIGURES.has(name) || name.startsWith("eval_") || !numeric(value)) continue;
      this._add(this.columns, name, line.step, value);
    }
    if (numeric(line.time)) this.times.add(line.step, line.time);
  }

  _addEvent(event) {
    const kind = String(event.kind);
    this.events.push(event);
    if (this.events.length > EVENTS) {
      this.events.splice(0, EVENTS / 4);
      this.eventsGone += 1;
    }
    this.counts[kind] = (this.counts[kind] ?? 0) + 1;
    if (kind === "evaluated" && numeric(event.version)) {
      for (const [name, value] of Object.entries(event)) {
        if (!NO_FIGURES.has(name) && numeric(value)) this._add(this.evaluated, name, event.version, value);
      }
      this.changed.add("steps");
    }
    const step = numeric(event.step) ? event.step : (this.times.x.at(-1) ?? 0);
    if (kind === "set" && event.key === "max_staleness" && numeric(event.after)) this.bounds.push([step, event.after]);
    if (!MARKED.has(kind)) return;
    this.marks.push({ step, kind, text: markText(event) });
    if (this.marks.length > MARKS) this.marks.splice(0, MARKS / 4);
    this.changed.add("steps");
  }

  _add(columns, name, x, value) {
    if (!columns.has(name) && columns.size < NAMES) columns.set(name, new Column());
    columns.get(name)?.add(x, value);
  }
}

function markText(event) {
  const what = String(event.kind).replaceAll("_", " ");
  if (event.kind === "set") return `${event.key} ${event.before} → ${event.after}`;
  if (event.kind === "alarm") return `alarm ${event.alarm ?? ""}`;
  return event.name || event.node ? `${what} ${event.name || String(event.node).slice(0, 8)}` : what;
}
