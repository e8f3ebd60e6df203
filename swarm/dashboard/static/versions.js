// The newest versions of the weights: how large, how far they are, how long they took. And how old rollouts are.
import { byId, colours, el, fit, onResize, onTheme, say } from "./dom.js";
import { bytes, duration, number, plain, share, version } from "./format.js";

const ROWS = 8; // Newest versions in the table
const BEHIND = 4; // Nodes with a bar of their own: those furthest behind
const UNCHANGED = 64; // Bytes: a version of fewer says that no weight is another one
const AGES = 12; // Bars of the histogram; older rollouts share the last

const COLUMNS = [
  ["Version", (one) => version(one.version)],
  ["50 %", (one) => took(one.installed_s?.["50"])],
  ["90 %", (one) => took(one.installed_s?.["90"])],
  ["100 %", (one) => took(one.installed_s?.["100"])],
  ["Nodes", (one) => `${number(one.complete)} of ${number(one.of)}`],
  ["Repairs", (one) => number(one.repairs)],
  ["Encoded", (one) => bytes(one.encoded_bytes)],
  ["Sent", (one) => bytes(one.sent_bytes)],
  ["Stage", (one) => took(one.stage_s)],
  ["Prepared", (one) => took(one.prepared_s)],
  ["Codecs", (one) => codecs(one.codecs)],
];

/** Seconds, below one as milliseconds, so that a column of them compares. */
function took(seconds) {
  return typeof seconds === "number" && seconds < 1 ? `${number(Number((1000 * seconds).toPrecision(2)))} ms` : duration(seconds);
}

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
    const less = !(one.raw_bytes && one.encoded_bytes) ? "" : one.encoded_bytes < UNCHANGED ? ", unchanged" : `, ${Number((one.raw_bytes / one.encoded_bytes).toPrecision(3))} times smaller`;
    say(this._line, `Version ${version(one.version)}: ${bytes(one.raw_bytes)} raw, ${bytes(one.encoded_bytes)} encoded${less}, ${bytes(one.sent_bytes)} sent`);
    this._bar.value = one.of > 0 ? one.complete / one.of : 0;
    say(this._done, `${number(one.complete)} of ${number(one.of)}`);
    const progress = Object.entries(one.progress ?? {}).sort((a, b) => a[1] - b[1] || (a[0] < b[0] ? -1 : 1));
    this._cells(progress.map(([, part]) => part));
    this._bars(progress.filter(([, part]) => part < 1).slice(0, BEHIND));
  }

  /** A cell for each node, those furthest behind on the left; of more nodes than pixels, every few share one. */
  _cells(parts) {
    const { context, width, height } = fit(this._strip);
    const cells = Math.min(parts.length, width);
    const gap = width / cells > 4 ? 1 : 0;
    for (let at = 0; at < cells; at += 1) {
      const part = Math.max(0, Math.min(1, parts[Math.floor((at * parts.length) / cells)]));
      const [left, right] = [Math.round((at * width) / cells), Math.round(((at + 1) * width) / cells) - gap];
      context.fillStyle = colours().grid;
      context.fillRect(left, 0, right - left, height);
      context.fillStyle = part >= 1 ? colours().c2 : colours().c1;
      context.fillRect(left, height * (1 - part), right - left, height * part);
    }
  }

  /** Places for the bars are there when they are empty too, so that nothing below them moves. */
  _bars(behind) {
    while (this._behind.children.length < BEHIND) {
      this._behind.append(el("li", {}, el("span"), el("progress", { max: "1", value: "0", "aria-label": "Progress" }), el("span")));
    }
    [...this._behind.children].forEach((item, at) => {
      item.style.visibility = at < behind.length ? "visible" : "hidden";
      if (at >= behind.length) return;
      const [node, part] = behind[at];
      say(item.children[0], this._store.nameOf(node));
      item.children[1].value = part;
      item.children[1].ariaLabel = `Progress of ${this._store.nameOf(node)}`;
      say(item.children[2], share(part));
    });
  }

  _table() {
    const table = byId("version-table");
    const head = COLUMNS.map(([name], at) => el("th", { scope: "col", class: at === 0 ? "" : "number" }, name));
    this._rows = Array.from({ length: ROWS }, () => {
      const cells = COLUMNS.map((_, at) => el(at === 0 ? "th" : "td", { scope: at === 0 ? "row" : null, class: at === 0 ? "" : "number" }));
      return { row: el("tr", { hidden: true }, ...cells), cells };
    });
    table.append(this._caption = el("caption"), el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...this._rows.map(({ row }) => row)));
  }

  _fill(versions) {
    say(this._caption, `Newest versions${versions[0]?.raw_bytes ? ` of ${bytes(versions[0].raw_bytes)} each` : ""}; the first times are from publication until so many nodes had it`);
    this._rows.forEach(({ row, cells }, at) => {
      row.hidden = at >= versions.length;
      if (at < versions.length) cells.forEach((cell, n) => say(cell, COLUMNS[n][1](versions[at])));
    });
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
      item.children[1].style.minWidth = count > 0 ? "2px" : "0";
      say(item.children[2], sum > 0 ? `${number(count)} (${share(count / sum)})` : "-");
    });
  }
}
