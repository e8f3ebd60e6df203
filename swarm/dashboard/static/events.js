// The list of events, newest first, of one kind or of all.
import { ask, byId, el, say } from "./dom.js";
import { date, number, plain, spoken } from "./format.js";

const SHOWN = 400; // Rows; more are found with the filter, or in events.jsonl
const PAGE = 200;
const OLDEST = 2000; // Older events held beside the newest
const BAD = new Set(["alarm", "best_failed", "checkpoint_failed", "decision_failed", "diverged", "reward_failed", "tensorboard_failed"]);

export class Events {
  constructor(store) {
    this._store = store;
    this._older = [];
    this._before = null;
    this._end = false;
    this._kind = null;
    byId("event-kind").addEventListener("change", () => this.draw());
    byId("event-older").addEventListener("click", () => this._load());
  }

  restart() {
    [this._older, this._before, this._end, this._kind] = [[], null, false, null];
  }

  draw() {
    this._kinds();
    const kind = byId("event-kind").value;
    const all = [...this._older, ...this._store.events];
    const found = kind === "" ? all : all.filter((event) => event.kind === kind);
    this._rows(found, kind);
    const count = Object.values(this._store.counts).reduce((sum, each) => sum + each, 0);
    const told = found.length === 0 ? "No event of this kind is loaded." : `${number(Math.min(SHOWN, found.length))} of ${number(kind === "" ? Math.max(count, found.length) : Math.max(this._store.counts[kind] ?? 0, found.length))} shown.`;
    say(byId("event-said"), this._end ? `${told} These go back to the beginning.` : told);
    byId("event-older").disabled = this._end;
  }

  /** Put new rows above those that are there; make all of them again only for another choice. */
  _rows(found, kind) {
    const body = byId("event-table").tBodies[0];
    const last = kind === this._kind && body.rows.length > 0 ? found.lastIndexOf(this._last) : -1;
    const fresh = found.slice(last < 0 ? -SHOWN : last + 1).slice(-SHOWN).reverse().map(row);
    if (last < 0) body.replaceChildren(...fresh);
    else body.prepend(...fresh);
    while (body.rows.length > SHOWN) body.lastChild.remove();
    [this._kind, this._last] = [kind, found.at(-1)];
  }

  _kinds() {
    const select = byId("event-kind");
    const counts = Object.entries(this._store.counts).sort(([a], [b]) => (a < b ? -1 : 1)).slice(0, 200);
    for (const [kind, count] of counts) {
      let option = [...select.options].find((each) => each.value === kind);
      if (option === undefined) {
        option = el("option", { value: kind });
        const after = [...select.options].find((each) => each.value > kind);
        select.insertBefore(option, after ?? null);
      }
      say(option, `${spoken(kind)} (${number(count)})`);
    }
  }

  async _load() {
    const button = byId("event-older");
    button.disabled = true;
    try {
      const have = this._older.length + this._store.events.length;
      const all = Object.values(this._store.counts).reduce((sum, each) => sum + each, 0);
      const before = this._before ?? Math.max(0, all - have);
      const answer = await ask(`api/events?before=${before}&count=${PAGE}`);
      const events = Array.isArray(answer) ? answer : (answer.events ?? []);
      this._older = [...events, ...this._older].slice(0, OLDEST);
      this._before = answer.next ?? before - events.length;
      this._end = events.length === 0 || answer.next === null || this._before <= 0 || this._older.length >= OLDEST;
    } catch (error) {
      say(byId("event-said"), `Older events cannot be read: ${error.message}`);
      button.disabled = false;
      return;
    }
    this._kind = null;
    this.draw();
  }
}

function row(event) {
  const { time, kind, ...fields } = event;
  const told = Object.entries(fields).slice(0, 16).map(([name, value]) => `${plain(name, 40)} ${typeof value === "number" ? number(value) : plain(typeof value === "object" ? JSON.stringify(value) : value, 160)}`);
  return el("tr", {}, el("td", { class: "number" }, date(time)), el("td", { "data-tone": BAD.has(kind) ? "bad" : "" }, `${BAD.has(kind) ? "✕ " : ""}${plain(spoken(kind), 60)}`), el("td", {}, told.join(" · ")));
}
