// The curves: which figures are drawn together, over what, and with which marks.
import { Chart, MARKS, MOST_CURVES } from "./chart.js";
import { byId, el, onTheme, say } from "./dom.js";
import { called, plain, spoken } from "./format.js";
import { along, columnsOf } from "./store.js";

const MOST_CHOSEN = 12; // Charts that a reader adds; more would be a report
const KEPT = "echo-node figures";

/** The figures that match the patterns of `names`: one star stands for anything. */
function matching(columns, names) {
  const found = [];
  for (const name of names) {
    const [head, tail] = name.split("*");
    for (const each of columns.keys()) {
      const fits = tail === undefined ? each === name : each.startsWith(head) && each.endsWith(tail) && each.length >= name.length;
      if (fits && !found.includes(each)) found.push(each);
    }
  }
  return found.slice(0, MOST_CURVES);
}

/** The band from lowest to highest of points that stand for many steps; none where they are the same. */
function spread(column) {
  return column.low.some((low, at) => low !== column.high[at]) ? { low: column.low, high: column.high } : undefined;
}

function picked(...names) {
  return (store) => matching(store.columns, names).map((name) => curve(name, store.columns.get(name)));
}

/** What a chart's title says already is left out of its legend: "mean" of "staleness/mean". */
const curve = (name, column) => ({ name, label: name.slice(name.indexOf("/") + 1), column, band: spread(column) });

function reward(store) {
  const [mean, deviation] = [store.columns.get("reward"), store.columns.get("reward_std")];
  if (mean === undefined) return [];
  const at = (x) => (deviation === undefined ? 0 : along(deviation.x, deviation.mean, x));
  const band = deviation && {
    low: mean.mean.map((value, n) => value - at(mean.x[n])), high: mean.mean.map((value, n) => value + at(mean.x[n])),
  };
  return [{ name: band ? "reward ± reward_std" : "reward", column: mean, band }];
}

function heldOut(store) {
  const names = [...store.evaluated.keys()].filter((name) => name !== "pass_at_1" || !store.evaluated.has("exact_match"));
  return [...names.slice(0, MOST_CURVES).map((name) => curve(name, store.evaluated.get(name)))];
}

function lengths(store) {
  const mean = store.columns.get("completions/mean_length");
  const [least, most] = ["completions/min_length", "completions/max_length"].map((name) => store.columns.get(name));
  if (mean === undefined) return [];
  const band = least && most && {
    low: mean.x.map((x) => along(least.x, least.mean, x)), high: mean.x.map((x) => along(most.x, most.mean, x)),
  };
  const terminated = matching(store.columns, ["completions/mean_terminated_length"]).map((name) => ({ name, label: "terminated", column: store.columns.get(name) }));
  return [{ name: "completions/mean_length, least to most", label: "mean, min to max", column: mean, band }, ...terminated];
}

function staleness(store) {
  const found = picked("staleness/mean", "staleness/max", "staleness/aim")(store);
  if (found.length === 0 || store.bounds.length === 0) return found;
  const column = columnsOf({ bound: { x: store.bounds.map(([step]) => step), mean: store.bounds.map(([, bound]) => bound) } }).get("bound");
  return [...found, { name: "max_staleness, the bound", label: "bound", column, limit: true }];
}

const CHARTS = [
  { title: "Reward of a rollout", pick: reward, empty: "Comes with the first learner step." },
  { title: "Held-out prompts", pick: heldOut, floor: 0, empty: "Comes with the first evaluation (eval_every_steps)." },
  { title: "Staleness of rollouts", unit: "learner steps", pick: staleness, floor: 0 },
  { title: "Entropy", unit: "nats a token", pick: picked("entropy"), floor: 0 },
  { title: "Mismatch of engine and learner", unit: "nats", pick: picked("mismatch_kl", "mismatch_kl/*"), floor: 0 },
  { title: "Tokens that are clipped", unit: "share", pick: picked("clip_ratio/*"), floor: 0 },
  { title: "Gradient norm before clipping", pick: picked("grad_norm"), floor: 0 },
  { title: "Length of completions", unit: "tokens", pick: lengths, floor: 0 },
  { title: "Groups without variance", unit: "share", pick: picked("frac_reward_zero_std"), floor: 0, ceiling: 1 },
];

export class Curves {
  constructor(store) {
    this._store = store;
    this._hiddenMarks = new Set();
    this._chosen = [];
    this.zoom = null;
    this.across = "step";
    this._told = el("p", { class: "hidden", role: "status" });
    byId("curves").append(this._told);
    this._charts = CHARTS.map((wanted) => this._chart(wanted));
    this._wire();
    for (const name of kept()) this._choose(name);
    onTheme(() => this._each((chart) => chart.rebuild()));
  }

  draw() {
    this._count();
    this._options();
    this._each((chart) => chart.update(this._store));
    this._legendOfMarks();
  }

  // -- what charts share -------------------------------------------------------------------------------------

  x(step) {
    if (this.across === "time") return along(this._store.times.x, this._store.times.mean, step);
    const counted = this.across === "rollouts" ? this._store.columns.get("rollouts_accepted") : undefined;
    return counted === undefined ? step : along(counted.x, counted.mean, step);
  }

  /** The range of x that all charts show without a zoom: the steps of the run. */
  extent() {
    return this._extent;
  }

  marks() {
    return this._marks;
  }

  zoomTo(low, high) {
    const [first, last] = this._extent;
    const [from, to] = [Math.max(first, low), Math.min(last, high)];
    if (to - from < (last - first) / 1e5) return;
    this.zoom = from <= first && to >= last ? null : [from, to];
    this._zoomed();
  }

  reset() {
    this.zoom = null;
    this._zoomed();
  }

  tell(words) {
    say(this._told, words);
  }

  // ----------------------------------------------------------------------------------------------------------

  _each(does) {
    for (const chart of [...this._charts, ...this._chosen]) does(chart);
  }

  _zoomed() {
    byId("zoom-reset").disabled = this.zoom === null;
    this._each((chart) => chart.again());
  }

  _count() {
    const step = Math.max(this._store.times.x.at(-1) ?? 0, this._store.digest?.step ?? 0, 1);
    const steps = [this.x(0), this.x(step)];
    this._extent = [Math.min(...steps), Math.max(...steps)];
    if (!(this._extent[1] > this._extent[0])) this._extent[1] = this._extent[0] + 1;
    this._marks = this._store.marks
      .filter(({ kind }) => MARKS[kind] !== undefined && !this._hiddenMarks.has(kind))
      .map((mark) => ({ ...mark, x: this.x(mark.step), text: this._named(mark.text) }));
  }

  /** A mark's words, with the name of the node whose id they end with the beginning of. */
  _named(text) {
    const { columns = [], rows = [] } = this._store.digest?.nodes ?? {};
    const [words, id] = /^(?:sampler_|sampler )\S+ ([0-9a-z]{8,12})$/.exec(text) ?? [];
    const row = id && rows.find((each) => each[columns.indexOf("node")]?.startsWith(id));
    return row ? words.slice(0, -id.length) + called(row[columns.indexOf("name")], id) : text;
  }

  _chart(wanted) {
    const chart = new Chart(wanted, this);
    byId("charts").append(chart.figure);
    return chart;
  }

  _wire() {
    byId("across").addEventListener("change", (event) => {
      this.across = event.target.value;
      this.zoom = null;
      byId("zoom-reset").disabled = true;
      this._count();
      this._each((chart) => chart.rebuild());
    });
    byId("zoom-reset").addEventListener("click", () => this.reset());
    byId("figure-add").addEventListener("click", () => this._choose(byId("figure-chosen").value, true));
  }

  _options() {
    const select = byId("figure-chosen");
    const names = [...this._store.columns.keys()].sort();
    if (select.dataset.names === names.join()) return;
    select.dataset.names = names.join();
    const value = select.value;
    select.replaceChildren(...names.map((name) => el("option", { value: name }, plain(name, 80))));
    if (names.includes(value)) select.value = value;
    byId("figure-add").disabled = names.length === 0;
  }

  _choose(name, asked = false) {
    if (!name || this._chosen.length >= MOST_CHOSEN || this._chosen.some((chart) => chart.wanted.title === name)) return;
    const remove = () => {
      chart.figure.remove();
      this._chosen = this._chosen.filter((each) => each !== chart);
      keep(this._chosen.map((each) => each.wanted.title));
      byId("figure-chosen").focus();
    };
    const chart = this._chart({ title: name, pick: picked(name), remove });
    this._chosen.push(chart);
    if (!asked) return;
    chart.update(this._store);
    keep(this._chosen.map((each) => each.wanted.title));
    chart.figure.scrollIntoView({ block: "nearest" });
  }

  /** A toggle for each kind of mark of this run. */
  _legendOfMarks() {
    const box = byId("marks");
    const counts = new Map();
    for (const { kind } of this._store.marks) if (MARKS[kind]) counts.set(kind, (counts.get(kind) ?? 0) + 1);
    for (const [kind, count] of counts) {
      let label = box.querySelector(`[data-kind="${kind}"]`);
      if (label === null) {
        const input = el("input", { type: "checkbox", id: `mark-${kind}` });
        input.checked = !this._hiddenMarks.has(kind);
        input.addEventListener("change", () => {
          if (input.checked) this._hiddenMarks.delete(kind);
          else this._hiddenMarks.add(kind);
          this._count();
          this._each((chart) => chart.again());
        });
        label = el("label", {}, input, el("span", { class: "symbol", "aria-hidden": "true" }, MARKS[kind].sign), el("span"));
        label.dataset.kind = kind;
        box.append(label);
      }
      say(label.lastChild, `${spoken(kind)} (${count})`);
    }
  }
}

function kept() {
  try {
    const names = JSON.parse(localStorage.getItem(KEPT) ?? "[]");
    return Array.isArray(names) ? names.slice(0, MOST_CHOSEN).filter((name) => typeof name === "string") : [];
  } catch {
    return [];
  }
}

function keep(names) {
  try {
    localStorage.setItem(KEPT, JSON.stringify(names));
  } catch {
    // A browser may refuse to keep anything; the charts are there until the page is left.
  }
}
