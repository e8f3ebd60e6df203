// The table of nodes: any number of rows, of which only those on the screen exist.
import { byId, el, say, setTone } from "./dom.js";
import { called, counted, duration, number, plain, rate, symbolOf, tenths, version } from "./format.js";

const ROW = 32; // Pixels of a row, as in the stylesheet
const MARGIN = 6; // Rows drawn above and below those that are seen, so that scrolling shows no gap
const VERSION = /^\d+\.\d+$/;
const NUMERIC = new Intl.Collator("en", { numeric: true }); // 0.9 comes before 0.10
/** In rem. Columns keep their widths, so that figures that change move nothing. */
const WIDTHS = {
  name: 10, role: 4.7, state: 6, last_seen_s: 5.6, engine: 6.8, precision: 5.2, version: 4.6, lag: 2.8, tokens_per_s: 5.2, rollouts_per_s: 5.6,
  accepted: 5, stale: 3.6, invalid: 4, up_bytes_per_s: 5.4, down_bytes_per_s: 5.4, cost_per_hour: 4.2, cost: 4, why: 11, class: 7,
};
const NARROW = 5.5; // Of a column that a newer learner adds
const HEIGHTS = [4, 8, 12]; // Rows that there is room for: it grows at these, so that a node that joins moves nothing
const LEAST_FIRST = new Set(["name", "role", "state", "engine", "precision", "why", "class", "lag", "last_seen_s"]);

/** Column: its heading and how a value is written. What a newer learner adds gets its own name and `number`. */
const COLUMNS = {
  name: ["Name", null], role: ["Role", null], state: ["State", null], engine: ["Engine", null], precision: ["Precision", null],
  version: ["Version", null], lag: ["Lag", number], tokens_per_s: ["Tokens/s", tenths], rollouts_per_s: ["Rollouts/s", tenths],
  accepted: ["Accepted", number], stale: ["Stale", number], invalid: ["Invalid", number], up_bytes_per_s: ["Up", rate],
  down_bytes_per_s: ["Down", rate], cost_per_hour: ["Cost/h", number], cost: ["Cost", number],
  last_seen_s: ["Last seen", duration], why: ["Why", null], class: ["Class", null],
};

export class Nodes {
  constructor(store) {
    this._store = store;
    this._scroll = byId("node-scroll");
    this._table = byId("node-table");
    this._body = this._table.tBodies[0];
    this._sort = { column: "role", falling: false };
    this._columns = [];
    this._known = new Set();
    this._room = 0;
    this._rows = [];
    this._pool = [];
    const space = () => el("tr", { class: "space", "aria-hidden": "true" }, el("td", { colspan: "1" }));
    [this._above, this._below] = [space(), space()];
    this._body.append(this._above, this._below);
    byId("node-filter").addEventListener("input", () => {
      this._toTop();
      this.draw();
    });
    // Kept, because asking for them in the midst of an update has the browser lay out the page then and there.
    [this._top, this._height] = [0, 0];
    this._scroll.addEventListener("scroll", () => {
      this._top = this._scroll.scrollTop;
      this._window();
    }, { passive: true });
    new ResizeObserver(() => {
      this._height = this._scroll.clientHeight;
      this._window();
    }).observe(this._scroll);
  }

  /** Sort and filter what the newest digest says, and draw the rows on the screen. */
  draw() {
    const { columns = [], rows = [] } = this._store.digest?.nodes ?? {};
    this._head(columns, rows);
    const words = byId("node-filter").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const searched = ["name", "node", "role", "state", "engine", "precision", "why"].map((name) => columns.indexOf(name)).filter((at) => at >= 0);
    const fits = (row) => {
      const text = searched.map((at) => row[at] ?? "").join("\n").toLowerCase();
      return words.every((word) => text.includes(word));
    };
    this._rows = words.length === 0 ? [...rows] : rows.filter(fits);
    const [at, ways] = [columns.indexOf(this._sort.column), this._sort.falling ? -1 : 1];
    const rank = this._ranked(rows, columns.indexOf("node"), columns.indexOf("name"));
    const byName = this._sort.column === "name";
    if (at >= 0) this._rows.sort((a, b) => (byName ? 0 : compared(a[at], b[at], ways)) || (byName ? ways : 1) * (rank(a) - rank(b)));
    const count = rows.length === this._rows.length ? counted(rows.length, "node") : `${number(this._rows.length)} of ${counted(rows.length, "node")}`;
    say(byId("node-count"), count);
    this._room = Math.max(this._room, HEIGHTS.find((each) => each >= rows.length) ?? HEIGHTS.at(-1));
    this._scroll.style.height = `${(this._room + 1) * ROW + 20}px`;
    this._table.setAttribute("aria-rowcount", String(this._rows.length + 1));
    this._window();
  }

  /** The order by name, which breaks ties; kept while the nodes are the same, because it takes the most time. */
  _ranked(rows, node, name) {
    const key = rows.map((row) => `${row[node]} ${row[name]}`).join();
    if (key !== this._rankedOf) {
      this._rankedOf = key;
      const named = rows.map((row) => [called(row[name], row[node]), row[node]]).sort((a, b) => compared(a[0], b[0], 1));
      this._ranks = new Map(named.map(([, id], at) => [id, at]));
    }
    return (row) => this._ranks.get(row[node]);
  }

  /** The columns of which something is known, or was; when somebody was seen is more urgent than what runs there. */
  _head(columns, rows) {
    const known = columns.filter((name, at) => name !== "node" && (this._known.has(name) || rows.some((row) => row[at] !== null)));
    if (this._columns.join() === columns.join() && this._known.size === known.length) return;
    this._known = new Set(known);
    this._columns = columns;
    const shown = known.filter((name) => name !== "last_seen_s");
    if (shown.length < known.length) shown.splice(shown.indexOf("state") + 1, 0, "last_seen_s");
    this._shown = shown.map((name) => ({ name, at: columns.indexOf(name) }));
    const cells = this._shown.map(({ name }) => {
      const button = el("button", { type: "button" }, COLUMNS[name]?.[0] ?? plain(name, 40));
      button.addEventListener("click", () => this._sortBy(name));
      const cell = el("th", { scope: "col", "aria-sort": "none", class: COLUMNS[name]?.[1] === null ? "" : "number" }, button);
      cell.dataset.column = name;
      cell.style.width = `${WIDTHS[name] ?? NARROW}rem`;
      return cell;
    });
    this._table.tHead.replaceChildren(el("tr", { "aria-rowindex": "1" }, ...cells));
    this._table.style.minWidth = `${this._shown.reduce((sum, { name }) => sum + (WIDTHS[name] ?? NARROW), 0)}rem`;
    for (const space of [this._above, this._below]) space.firstChild.colSpan = Math.max(1, this._shown.length);
    for (const row of this._pool) row.row.remove();
    this._pool = [];
    this._arrows();
  }

  _sortBy(name) {
    const again = this._sort.column === name;
    this._sort = { column: name, falling: again ? !this._sort.falling : !LEAST_FIRST.has(name) };
    this._arrows();
    this._toTop();
    this.draw();
  }

  _toTop() {
    this._scroll.scrollTop = this._top = 0;
  }

  _arrows() {
    for (const cell of this._table.tHead.rows[0].cells) {
      const sorted = cell.dataset.column === this._sort.column;
      cell.setAttribute("aria-sort", sorted ? (this._sort.falling ? "descending" : "ascending") : "none");
    }
  }

  _window() {
    if (this._columns.length === 0) return;
    const top = Math.min(this._top, Math.max(0, this._rows.length * ROW - this._height));
    const first = Math.max(0, Math.floor(top / ROW) - MARGIN);
    const count = Math.min(this._rows.length - first, Math.ceil(this._height / ROW) + 2 * MARGIN);
    while (this._pool.length < count) this._pool.push(this._make());
    this._pool.forEach((row, at) => {
      row.row.hidden = at >= count;
      if (at < count) this._fill(row, this._rows[first + at], first + at);
    });
    this._above.firstChild.style.height = `${first * ROW}px`;
    this._below.firstChild.style.height = `${Math.max(0, this._rows.length - first - count) * ROW}px`;
  }

  _make() {
    const cells = this._shown.map(({ name }, at) => el(at === 0 ? "th" : "td", { scope: at === 0 ? "row" : null, class: COLUMNS[name]?.[1] === null ? "" : "number" }));
    const row = el("tr", {}, ...cells);
    this._body.insertBefore(row, this._below);
    return { row, cells, node: null };
  }

  _fill(shown, values, place) {
    const node = values[this._columns.indexOf("node")];
    shown.row.ariaRowIndex = String(place + 2);
    this._shown.forEach(({ name, at }, n) => {
      const value = values[at];
      const cell = shown.cells[n];
      const write = COLUMNS[name] === undefined ? number : COLUMNS[name][1];
      let text = write && (typeof value === "number" || value === null) ? write(value) : plain(value ?? "-", 120);
      if (name === "version") text = version(value);
      if (name === "name" && (value === null || value === "")) text = called("", node);
      if (name === "state" && value !== null) {
        const { symbol, tone } = symbolOf(value);
        text = `${symbol} ${text}`;
        setTone(cell, tone);
      }
      say(cell, text);
      if (name === "name" || name === "why") cell.title = name === "name" ? plain(`${value} ${node}`, 120) : text;
    });
  }
}

/** Unknown values last, whichever way the others go. */
function compared(a, b, ways) {
  if (a === b) return 0;
  const [none, other] = [a === null || a === undefined || a === "", b === null || b === undefined || b === ""];
  if (none || other) return Number(none) - Number(other);
  if (typeof a === "number" && typeof b === "number") return ways * (a - b);
  const [one, two] = [String(a), String(b)];
  if (VERSION.test(one) && VERSION.test(two)) return ways * NUMERIC.compare(one, two);
  return ways * (one < two ? -1 : 1);
}
