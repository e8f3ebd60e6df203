// The timeline: which lanes and which time are on the screen, asked for every two seconds while they are.
import { ask, byId, el, keepingFocus, onResize, onSeen, onTheme, say } from "./dom.js";
import { called, clock, date, duration, plain, share } from "./format.js";
import { drawLanes, forgetPatterns, nameWidth, ROW, sample, TOP } from "./lanes.js";

const POLL_MS = 2000;
const REDRAW_MS = 250; // Of lanes that follow the present, between two answers
const LANES = 64; // That one answer gives
const LEAST_S = 5; // The shortest time shown: spans are noted to some milliseconds, but beats come in seconds
const FIRST_S = 120; // What is shown first
const LATE_S = (2 * POLL_MS) / 1000; // After an answer its lanes are taken to go on for as long: then nobody knows
const PATIENCE_MS = 10_000; // A question that hangs would be the last one

export class Timeline {
  constructor(store) {
    this._store = store;
    this._canvas = byId("lanes-canvas");
    this._scroll = byId("lanes-scroll");
    this._all = [];
    this._lanes = [];
    this._data = null;
    this._span = FIRST_S;
    this._to = null; // null: the present
    this._whole = false;
    this._cursor = null;
    this._skew = 0; // Seconds that the learner's clock is ahead of ours
    this._seen = false;
    this._asking = false;
    this._again = false; // Asked for while a question was on its way
    this._failed = false;
    this._timer = 0;
    this._states = "";
    this._listen();
    onSeen(byId("timeline"), (seen) => {
      this._seen = seen;
      if (seen) this.refresh();
    });
    onResize(this._scroll, () => this._draw());
    onTheme(() => {
      forgetPatterns();
      this._states = "";
      this._legend();
      this._draw();
    });
    setInterval(() => {
      if (this._seen && !document.hidden && this._to === null && this._store.live && !this._whole) this._draw();
    }, REDRAW_MS);
    setInterval(() => {
      if (this._seen && !document.hidden && (this._store.live || this._failed || this._data === null)) this.refresh();
    }, POLL_MS);
  }

  /** Another run, or the same one after a restart. */
  restart() {
    this._data = null;
    if (!this._store.live) this._whole = true;
    say(byId("time-now"), this._store.live ? "Live" : "End");
    this._moved();
  }

  // -- time --------------------------------------------------------------------------------------------------

  get _now() {
    const present = Date.now() / 1000 + this._skew;
    if (!this._store.live) return this._data?.now ?? this._store.digest?.at ?? present;
    // Of a learner that says nothing any more the last it said stays on the screen, with blank time after it.
    return this._data === null ? present : Math.min(present, this._known + this._span / 4);
  }

  /** Until when the lanes are known: what goes on is drawn until then. */
  get _known() {
    const present = Date.now() / 1000 + this._skew;
    return this._data === null ? present : Math.min(present, this._data.now + (this._store.live ? LATE_S : 0));
  }

  get _began() {
    return this._data?.began ?? this._store.digest?.began ?? this._now - FIRST_S;
  }

  /** From when to when is shown. */
  _range() {
    const now = this._now;
    if (this._whole) return [Math.min(this._began, now - LEAST_S), now];
    const to = this._to ?? now;
    return [to - this._span, to];
  }

  _zoom(factor, about) {
    const [from, to] = this._range();
    const most = Math.max(FIRST_S, this._now - this._began);
    const span = Math.min(most, Math.max(LEAST_S, (to - from) * factor));
    const at = about ?? (this._to === null && !this._whole ? to : (from + to) / 2);
    const end = at + ((to - at) / (to - from)) * span;
    this._whole = false;
    this._span = span;
    this._to = end >= this._now - 1e-3 ? null : end;
    this._moved();
  }

  _pan(seconds) {
    const [from, to] = this._range();
    const end = Math.max(this._began + LEAST_S, to + seconds);
    this._whole = false;
    this._span = to - from;
    this._to = end >= this._now ? null : end;
    this._moved();
  }

  _moved() {
    byId("time-now").setAttribute("aria-pressed", String(this._to === null && !this._whole));
    byId("time-all").setAttribute("aria-pressed", String(this._whole));
    this._draw();
    clearTimeout(this._timer);
    this._timer = setTimeout(() => this._seen && this.refresh(), 120);
  }

  // -- asking ------------------------------------------------------------------------------------------------

  async refresh() {
    if (this._store.digest === null) return;
    if (this._asking) {
      this._again = true;
      return;
    }
    [this._asking, this._again, this._failed] = [true, false, false];
    const [from, to] = this._range();
    const wanted = this._shown().lanes.map((each) => each.lane);
    const first = this._data === null;
    const lanes = encodeURIComponent((wanted.length ? wanted : ["learner", "publication"]).join(","));
    try {
      const data = await ask(`api/timeline?lanes=${lanes}&from=${from.toFixed(3)}&to=${(to + 1).toFixed(3)}`, { signal: AbortSignal.timeout(PATIENCE_MS) });
      if (this._store.live) this._skew = data.now - Date.now() / 1000;
      this._data = data;
      this._all = data.all ?? [];
      this._filter();
      this._legend();
    } catch (error) {
      this._failed = true; // Asked again at the next poll, of a kept run too
      if (first) say(byId("lanes-read"), `The timeline cannot be read: ${error.message}`);
    } finally {
      this._asking = false;
    }
    if (!this._failed && (this._again || first)) this.refresh(); // Now with the lanes and the time that are shown
    this._draw();
    this._table();
  }

  _filter() {
    const words = byId("lane-filter").value.trim().toLowerCase();
    this._lanes = words === "" ? this._all : this._all.filter((each) => `${each.name} ${each.lane}`.toLowerCase().includes(words));
    const height = TOP + this._lanes.length * ROW;
    byId("lanes-space").style.height = `${Math.max(0, height - this._canvas.clientHeight)}px`;
  }

  _shown() {
    const first = Math.max(0, Math.floor(this._scroll.scrollTop / ROW));
    const count = Math.min(LANES, Math.ceil((this._canvas.clientHeight - TOP) / ROW) + 1);
    return { lanes: this._lanes.slice(first, first + count), offset: first * ROW - this._scroll.scrollTop };
  }

  // -- drawing -----------------------------------------------------------------------------------------------

  _draw() {
    if (!this._seen || this._canvas.clientWidth === 0) return;
    const [from, to] = this._range();
    drawLanes(this._canvas, { ...this._shown(), from, to, data: this._data, now: this._known, cursor: this._cursor });
  }

  _legend() {
    const states = this._data?.states ?? [];
    if (this._states === states.join()) return;
    this._states = states.join();
    const items = states.map((state) => el("li", {}, el("canvas", { "aria-hidden": "true" }), plain(state, 20)));
    byId("lane-legend").replaceChildren(...items);
    items.forEach((item, at) => sample(item.firstChild, states[at]));
  }

  /** The shares of each visible lane's states, for readers who do not see the picture. */
  _table() {
    const { lanes } = this._shown();
    if (!byId("lanes-shares").open || this._data === null) return;
    const [from, to] = this._range();
    const { states } = this._data;
    const head = el("tr", {}, el("th", { scope: "col" }, "Lane"), ...states.map((state) => el("th", { scope: "col", class: "number" }, plain(state, 20))));
    const rows = lanes.map((each) => {
      const shares = this._shares(each.lane, from, to);
      return el("tr", {}, el("th", { scope: "row" }, laneName(each)), ...states.map((_, at) => el("td", { class: "number" }, share(shares[at] ?? 0))));
    });
    const table = byId("lanes-table");
    keepingFocus(table, () => table.replaceChildren(el("caption", {}, `Shares of the time from ${date(from)} to ${date(to)}`), el("thead", {}, head), el("tbody", {}, ...rows)));
  }

  _shares(lane, from, to) {
    const sums = [];
    for (const [state, began, ended] of this._data.spans?.[lane] ?? []) {
      const part = Math.min(to, ended ?? this._known) - Math.max(from, began);
      if (part > 0) sums[state] = (sums[state] ?? 0) + part / (to - from);
    }
    const { began = 0, bucket_s: size = 1 } = this._data.buckets ?? {};
    for (const [at, bucket] of (this._data.buckets?.lanes?.[lane] ?? []).entries()) {
      const part = Math.min(to, began + (at + 1) * size) - Math.max(from, began + at * size);
      if (part > 0) bucket.forEach((each, state) => { sums[state] = (sums[state] ?? 0) + (each * part) / (to - from); });
    }
    return sums;
  }

  _read() {
    const { lane, at } = this._cursor;
    const each = this._all.find((one) => one.lane === lane);
    const name = laneName(each ?? { lane });
    const span = (this._data?.spans?.[lane] ?? []).find(([, began, ended]) => began <= at && at < (ended ?? Infinity));
    let what = "nothing noted";
    const unheard = this._store.live && Date.now() / 1000 + this._skew > this._data?.now + LATE_S;
    if (span && unheard && at > this._data.now) what = `nothing heard since ${clock(this._data.now)}`;
    else if (span) what = `${this._data.states[span[0]]} for ${duration((span[2] ?? this._known) - span[1])}${span[2] === null && !unheard ? ", going on" : ""}, since ${clock(span[1])}`;
    else if (this._data?.buckets) {
      const { began, bucket_s: size, lanes } = this._data.buckets;
      const bucket = lanes[lane]?.[Math.floor((at - began) / size)] ?? [];
      const parts = bucket.map((part, state) => (part >= 0.005 ? `${this._data.states[state]} ${share(part)}` : "")).filter(Boolean);
      if (parts.length) what = `${parts.join(", ")} of ${duration(size)}`;
    }
    say(byId("lanes-read"), `${name} at ${clock(at)}: ${what}`);
  }

  // -- hands -------------------------------------------------------------------------------------------------

  _point(event) {
    const box = this._canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const left = nameWidth(box.width);
    const [from, to] = this._range();
    const { lanes, offset } = this._shown();
    const each = lanes[Math.floor((y - TOP - offset) / ROW)];
    return { lane: each?.lane, at: from + ((x - left) / (box.width - left)) * (to - from), inside: x >= left && y >= TOP };
  }

  _listen() {
    const canvas = this._canvas;
    let grabbed = null;
    canvas.addEventListener("pointerdown", (event) => {
      const [from, to] = this._range();
      grabbed = { x: event.clientX, from, to, id: event.pointerId, moved: false };
    });
    canvas.addEventListener("pointermove", (event) => {
      if (grabbed !== null && (grabbed.moved || Math.abs(event.clientX - grabbed.x) > 4)) {
        if (!grabbed.moved) canvas.setPointerCapture(grabbed.id);
        grabbed.moved = true;
        const width = canvas.clientWidth - nameWidth(canvas.clientWidth);
        const [, to] = this._range();
        this._pan(grabbed.to - ((event.clientX - grabbed.x) / width) * (grabbed.to - grabbed.from) - to);
        return;
      }
      const { lane, at, inside } = this._point(event);
      this._cursor = lane && inside ? { lane, at } : null;
      if (this._cursor) this._read();
      this._draw();
    });
    for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, () => { grabbed = null; });
    canvas.addEventListener("pointerleave", () => {
      if (document.activeElement !== canvas) this._cursor = null;
      this._draw();
    });
    canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        this._zoom(event.deltaY > 0 ? 1.25 : 0.8, this._to === null && !this._whole ? undefined : this._point(event).at);
      } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        const [from, to] = this._range();
        this._pan((event.deltaX / canvas.clientWidth) * (to - from));
      }
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this._key(event));
    this._scroll.addEventListener("scroll", () => {
      this._draw();
      clearTimeout(this._timer);
      this._timer = setTimeout(() => this.refresh(), 120);
    }, { passive: true });
    byId("lane-filter").addEventListener("input", () => {
      this._filter();
      this._scroll.scrollTop = 0;
      this._moved();
    });
    const press = (id, does) => byId(id).addEventListener("click", does);
    press("time-out", () => this._zoom(2));
    press("time-in", () => this._zoom(0.5));
    press("time-earlier", () => this._back(-0.5));
    press("time-later", () => this._back(0.5));
    press("time-now", () => this._toNow());
    press("time-all", () => this._all_());
    byId("lanes-shares").addEventListener("toggle", () => this._table());
  }

  _back(part) {
    const [from, to] = this._range();
    this._pan(part * (to - from));
  }

  _toNow() {
    if (this._whole || this._span > this._now - this._began) this._span = FIRST_S;
    [this._whole, this._to] = [false, null];
    this._moved();
  }

  _all_() {
    this._whole = true;
    this._moved();
  }

  _key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const way = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (event.key === "+" || event.key === "=") this._zoom(0.5);
    else if (event.key === "-") this._zoom(2);
    else if (event.key === "Home") this._all_();
    else if (event.key === "End") this._toNow();
    else if (way === undefined) return;
    else if (event.shiftKey) this._back(way * 0.25);
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight") this._along(way);
    else this._across(way);
    event.preventDefault();
  }

  /** Move the reading along its lane, from span to span. */
  _along(way) {
    const [from, to] = this._range();
    const lane = this._cursor?.lane ?? this._shown().lanes[0]?.lane;
    if (lane === undefined) return;
    const at = Math.min(to, Math.max(from, this._cursor?.at ?? to));
    const { began = 0, bucket_s: size = 1 } = this._data?.buckets ?? {};
    const stops = this._data?.spans
      ? (this._data.spans[lane] ?? []).map(([, start, end]) => (start + (end ?? this._known)) / 2)
      : (this._data?.buckets?.lanes?.[lane] ?? []).map((_, n) => began + (n + 0.5) * size);
    const least = (to - from) / 2000;
    const next = way > 0 ? stops.find((stop) => stop > at + least) : stops.findLast((stop) => stop < at - least);
    if (next === undefined) return;
    if (next < from || next > to) this._pan(next < from ? next - from - (to - from) / 4 : next - to + (to - from) / 4);
    this._cursor = { lane, at: next };
    this._read();
    this._draw();
  }

  _across(way) {
    const [from, to] = this._range();
    const place = this._lanes.findIndex((each) => each.lane === this._cursor?.lane);
    const next = Math.min(this._lanes.length - 1, Math.max(0, place + way));
    if (this._lanes[next] === undefined) return;
    const top = next * ROW;
    const room = this._canvas.clientHeight - TOP - ROW;
    if (top < this._scroll.scrollTop) this._scroll.scrollTop = top;
    if (top > this._scroll.scrollTop + room) this._scroll.scrollTop = top - room;
    this._cursor = { lane: this._lanes[next].lane, at: this._cursor?.at ?? (from + to) / 2 };
    this._read();
    this._draw();
  }
}

function laneName({ lane, name }) {
  return called(name === lane ? "" : name, lane);
}
