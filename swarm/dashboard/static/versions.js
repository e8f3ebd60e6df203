// The newest versions of the weights: how large, how far they are, how long they took. And how old rollouts are.
import { byId, colours, el, fit, onResize, onTheme, say } from "./dom.js";
import { bytes, duration, number, plain, share } from "./format.js";

const ROWS = 8; // Newest versions in the table
const BEHIND = 8; // Nodes with a bar of their own: those furthest behind
const AGES = 12; // Bars of the histogram; older rollouts share the last

const COLUMNS = [
  ["Version", (one) => plain(one.version, 20)],
  ["Raw", (one) => bytes(one.raw_bytes)],
  ["Encoded", (one) => bytes(one.encoded_bytes)],
  ["Sent", (one) => bytes(one.sent_bytes)],
  ["Stage", (one) => duration(one.stage_s)],
  ["Prepared", (one) => duration(one.prepared_s)],
  ["50 %", (one) => duration(one.installed_s?.["50"])],
  ["90 %", (one) => duration(one.installed_s?.["90"])],
  ["100 %", (one) => duration(one.installed_s?.["100"])],
  ["Nodes", (one) => `${number(one.complete)} of ${number(one.of)}`],
  ["Repairs", (one) => number(one.repairs)],
  ["Codecs", (one) => codecs(one.codecs)],
];

function codecs(used) {
  return Object.entries(used ?? {}).slice(0, 4).map(([name, part]) => `${plain(name, 20)} ${part <= 1 ? share(part) : number(part)}`).join(", ") || "-";
}

export class Versions {
  constructor(store) {
    this._store = store;
    this._line = el("p");
    this._bar = el("progress", { max: "1", value: "0", "aria-label": "Nodes that have the newest version" });
    this._done = el("span");
    this._strip = el("canvas", { "aria-hidden": "true" });
    this._behind = el("ul", { class: "behind" });
    byId("version-newest").append(this._line, el("div", { class: "version-line" }, el("span", {}, "Complete"), this._bar, this._done), this._strip, this._behind);
    this._table();
    onTheme(() => this.draw());
    onResize(this._strip, () => this.draw());
  }

  draw() {
    const { digest } = this._store;
    if (digest === null) return;
    const versions = (digest.versions ?? []).slice(-ROWS).reverse();
    this._newest(versions[0]);
    this._fill(versions);
    this._ages(digest.staleness ?? { bound: 0, counts: [] });
  }

  _newest(one) {
    if (one === undefined) {
      say(this._line, "No version is published yet. The first one goes out when the model is loaded.");
      return;
    }
    const less = one.raw_bytes && one.encoded_bytes ? `, ${Number((one.raw_bytes / one.encoded_bytes).toPrecision(3))} times smaller` : "";
    say(this._line, `Version ${plain(one.version, 20)}: ${bytes(one.raw_bytes)} raw, ${bytes(one.encoded_bytes)} encoded${less}, ${bytes(one.sent_bytes)} sent`);
    this._bar.value = one.of > 0 ? one.complete / one.of : 0;
    say(this._done, `${number(one.complete)} of ${number(one.of)}`);
    const progress = Object.entries(one.progress ?? {}).sort((a, b) => a[1] - b[1] || (a[0] < b[0] ? -1 : 1));
    this._cells(progress.map(([, part]) => part));
    this._bars(progress.filter(([, part]) => part < 1).slice(0, BEHIND));
  }

  /** A cell for each node, those furthest behind on the left. */
  _cells(parts) {
    const { context, width, height } = fit(this._strip);
    const wide = width / Math.max(1, parts.length);
    const gap = wide > 4 ? 1 : 0;
    parts.forEach((part, at) => {
      context.fillStyle = colours().grid;
      context.fillRect(at * wide, 0, Math.max(0.5, wide - gap), height);
      context.fillStyle = part >= 1 ? colours().c2 : colours().c1;
      const high = Math.max(0, Math.min(1, part)) * height;
      context.fillRect(at * wide, height - high, Math.max(0.5, wide - gap), high);
    });
  }

  _bars(behind) {
    const names = this._names();
    while (this._behind.children.length > behind.length) this._behind.lastChild.remove();
    behind.forEach(([node, part], at) => {
      let item = this._behind.children[at];
      if (item === undefined) {
        item = el("li", {}, el("span"), el("progress", { max: "1" }), el("span"));
        this._behind.append(item);
      }
      const name = names.get(node) ?? plain(node, 200).slice(0, 8);
      say(item.children[0], name);
      item.children[1].value = part;
      item.children[1].ariaLabel = `Progress of ${name}`;
      say(item.children[2], share(part));
    });
  }

  _names() {
    const { columns = [], rows = [] } = this._store.digest.nodes ?? {};
    const [id, name] = [columns.indexOf("node"), columns.indexOf("name")];
    return new Map(rows.filter((row) => row[name]).map((row) => [row[id], plain(row[name], 40)]));
  }

  _table() {
    const table = byId("version-table");
    const head = COLUMNS.map(([name], at) => el("th", { scope: "col", class: at === 0 ? "" : "number" }, name));
    this._rows = Array.from({ length: ROWS }, () => {
      const cells = COLUMNS.map((_, at) => el(at === 0 ? "th" : "td", { scope: at === 0 ? "row" : null, class: at === 0 ? "" : "number" }, "\u00a0"));
      return { row: el("tr", {}, ...cells), cells };
    });
    table.append(el("caption", {}, "Newest versions; the times are from publication until so many nodes had it"), el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...this._rows.map(({ row }) => row)));
  }

  _fill(versions) {
    this._rows.forEach(({ cells }, at) => cells.forEach((cell, n) => say(cell, versions[at] ? COLUMNS[n][1](versions[at]) : "\u00a0")));
  }

  _ages({ bound, counts }) {
    const list = byId("staleness");
    const last = Math.max(bound ?? 0, counts.length - 1);
    const shown = Array.from({ length: Math.min(AGES, last + 1) }, (_, age) => counts[age] ?? 0);
    if (counts.length > AGES) shown[AGES - 1] = counts.slice(AGES - 1).reduce((sum, each) => sum + each, 0);
    const sum = counts.reduce((all, each) => all + each, 0);
    const most = Math.max(1, ...shown);
    while (list.children.length > shown.length) list.lastChild.remove();
    shown.forEach((count, age) => {
      let item = list.children[age];
      if (item === undefined) {
        item = el("li", {}, el("span"), el("span", { class: "bar", "aria-hidden": "true" }), el("span"));
        list.append(item);
      }
      const many = age === AGES - 1 && counts.length > AGES ? " or more" : "";
      const said = age === bound ? ", the bound" : age > bound ? ", over the bound" : "";
      say(item.children[0], `${age}${many}${said}`);
      item.classList.toggle("over", age > bound);
      item.classList.toggle("at-bound", age === bound);
      item.children[1].style.width = `${(100 * count) / most}%`;
      say(item.children[2], sum > 0 ? `${number(count)} (${share(count / sum)})` : "-");
    });
  }
}
