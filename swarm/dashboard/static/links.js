// Who sends to whom, as a table: the links over which versions went lately.
import { byId, el, say } from "./dom.js";
import { called, counted, plain, rate, version } from "./format.js";

const ROWS = 100; // Those that carry most; of 2,000 links nobody reads each

export class Links {
  constructor(store) {
    this._store = store;
    this._body = byId("link-table").tBodies[0];
  }

  draw() {
    const { digest } = this._store;
    if (digest === null) return;
    const links = digest.links ?? [];
    byId("links").hidden = !this._store.live && links.length === 0; // Of a run that is not led nothing is known
    const { columns = [], rows = [] } = digest.nodes ?? {};
    const [id, name] = ["node", "name"].map((column) => columns.indexOf(column));
    const names = new Map(rows.map((row) => [row[id], called(row[name], row[id])]));
    const nameOf = (node) => names.get(node) ?? called("", node);
    const busiest = [...links].sort((a, b) => (b[2] ?? 0) - (a[2] ?? 0)).slice(0, ROWS);
    const shown = busiest.map(([from, to, each, one]) => [nameOf(from), nameOf(to), rate(each), version(one)]);
    shown.sort((a, b) => (`${a[0]}\n${a[1]}` < `${b[0]}\n${b[1]}` ? -1 : 1)); // By name, so that rows stay where they are
    const sent = links.reduce((sum, [, , each]) => sum + (each ?? 0), 0);
    const more = links.length > shown.length ? `; the ${shown.length} that carry most are shown` : "";
    say(byId("links-said"), links.length ? `${counted(links.length, "link")}, ${rate(sent)} in all${more}` : "no weights were sent lately");
    while (this._body.rows.length > shown.length) this._body.lastChild.remove();
    shown.forEach((cells, at) => {
      const row = this._body.rows[at] ?? this._body.appendChild(el("tr", {}, el("th", { scope: "row" }), el("td"), el("td", { class: "number" }), el("td", { class: "number" })));
      cells.forEach((text, n) => say(row.cells[n], plain(text, 60)));
    });
  }
}
