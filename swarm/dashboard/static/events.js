// The list of events, newest first, of one kind or of all.
import { ask, byId, el, say } from "./dom.js";
import { date, number, plain, spoken } from "./format.js";

const SHOWN = 400; // Rows at first; each load shows a page more
const PAGE = 200;
const OLDEST = 2000; // Older events held beside the newest
const BAD = new Set(["alarm", "checkpoint_failed", "decision_failed", "diverged", "reward_failed", "tensorboard_failed"]);

export class Events {
  constructor(store) {
    this._store = store;
    this.restart();
    byId("event-kind").addEventListener("change", () => this.draw());
    byId("event-older").addEventListener("click", () => this._load());
  }

  restart() {
    this._forget();
    this._limit = SHOWN;
  }

  _forget() {
    [this._older, this._before, this._end, this._kind] = [[], null, false, null];
    this._gone = this._store.eventsGone;
  }

  draw() {
    this._kinds();
    if (this._gone !== this._store.eventsGone) this._forget(); // Else the list had a gap before those kept
    const kind = byId("event-kind").value;
    const all = [...this._older, ...this._store.events];
    const found = kind === "" ? all : all.filter((event) => event.kind === kind);
    this._found = found.length;
    this._rows(found, kind);
    const count = Object.values(this._store.counts).reduce((sum, each) => sum + each, 0);
    const told = found.length === 0 ? "No event of this kind is loaded." : `${number(Math.min(this._limit, found.length))} of ${number(kind === "" ? Math.max(count, found.length) : Math.max(this._store.counts[kind] ?? 0, found.length))} shown.`;
    const rest = this._before > 0 ? "Older ones are in events.jsonl, below." : "These go back to the beginning.";
    const isAll = this._end && this._found <= this._limit;
    say(byId("event-said"), isAll ? `${told} ${rest}` : told);
    byId("event-older").disabled = isAll;
  }

  /** Put new rows above those that are there; make all of them again only for another choice. */
  _rows(found, kind) {
    const body = byId("event-table").tBodies[0];
    const last = kind === this._kind && body.rows.length > 0 ? found.lastIndexOf(this._last) : -1;
    const fresh = found.slice(last < 0 ? 0 : last + 1).slice(-this._limit).reverse().map(row);
    if (last < 0) body.replaceChildren(...fresh);
    else body.prepend(...fresh);
    while (body.rows.length > this._limit) body.lastChild.remove();
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
    const [button, gone] = [byId("event-older"), this._gone];
    if (this._end || this._found > this._limit) {
      this._more();
      return;
    }
    button.disabled = true;
    try {
      const before = this._before ?? this._store.events[0]?.byte ?? 0;
      const answer = await ask(`api/events?before=${before}&count=${PAGE}`);
      if (gone !== this._store.eventsGone) {
        this.draw();
        return;
      }
      this._older = [...(answer.events ?? []), ...this._older];
      this._before = answer.next ?? 0;
      this._end = this._before === 0 || this._older.length >= OLDEST;
    } catch (error) {
      say(byId("event-said"), `Older events cannot be read: ${error.message}`);
      button.disabled = false;
      return;
    }
    this._more();
  }

  _more() {
    this._limit += PAGE;
    this._kind = null;
    this.draw();
  }
}

function row(event) {
  const { time, kind, byte, ...fields } = event;
  const text = (value) => plain(typeof value === "object" ? JSON.stringify(value) : value, 160);
  const quoted = (words) => (/\s/.test(words) ? JSON.stringify(words) : words); // Else a stranger's could read as ours
  const told = Object.entries(fields).slice(0, 16).map(([name, value]) => `${plain(name, 40)} ${typeof value === "number" ? number(value) : quoted(text(value))}`);
  return el("tr", {}, el("td", { class: "number" }, date(time)), el("td", { "data-tone": BAD.has(kind) ? "bad" : "" }, `${BAD.has(kind) ? "✕ " : ""}${plain(spoken(kind), 60)}`), el("td", {}, told.join(" · ")));
}
