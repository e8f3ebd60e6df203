// Figures, times and strangers' words as short text.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const TENTHS = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const SHORT = 12; // Characters of a node's id, as terminals show them
const HIDING = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

/** Anybody's words, cut, without the marks that would reverse a line or hide in it. */
export function plain(value, most = 200) {
  const words = String(value ?? "");
  const cut = words.slice(0, most).replace(HIDING, "\ufffd");
  return words.length > most ? `${cut} [${WHOLE.format(words.length - most)} characters more]` : cut;
}

/** A value in few characters; "-" for one that is not known. */
export function number(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "-";
  const size = Math.abs(value);
  if (size >= 1e12 || (size > 0 && size < 1e-4)) return value.toExponential(2);
  if (size >= 1e4 || Number.isInteger(value)) return WHOLE.format(value);
  return String(Number(value.toPrecision(4)));
}

/** Labels of an axis whose ticks are `step` apart, such as 18.2k: with as many digits as tell neighbours apart. */
export function ticks(values, step) {
  const size = Math.max(...values.map(Math.abs));
  const small = size > 0 && size < 1e-3 ? Math.floor(Math.log10(size)) : 0;
  const [unit, letter] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([least]) => size >= least) ?? [10 ** small, small ? `e${small}` : ""];
  let digits = 0;
  while (digits < 12 && Math.abs((step / unit) * 10 ** digits - Math.round((step / unit) * 10 ** digits)) > 1e-6) digits += 1;
  return values.map((value) => (Math.abs(value) < step / 2 ? "0" : `${Number((value / unit).toFixed(digits))}${letter}`));
}

/** A value of at most five characters, such as 18.2k, for places with little room. */
export function brief(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "-";
  return ticks([value], 10 ** (Math.floor(Math.log10(Math.abs(value) || 1)) - 2))[0];
}

/** A rate: always one decimal, so that a column of them lines up. */
export function tenths(value) {
  return typeof value === "number" && Number.isFinite(value) ? TENTHS.format(value) : "-";
}

export function share(value) {
  return typeof value === "number" && Number.isFinite(value) ? `${Math.round(value * 100)} %` : "-";
}

export function bytes(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "-";
  for (const [unit, name] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= unit) return `${(value / unit).toFixed(value >= 100 * unit ? 0 : 1)} ${name}`;
  }
  return `${Math.round(value)} B`;
}

export function rate(value) {
  return typeof value === "number" && Number.isFinite(value) ? `${bytes(value)}/s` : "-";
}

/** "1 node", "4 nodes". */
export function counted(count, what) {
  return `${number(count)} ${what}${count === 1 ? "" : "s"}`;
}

/** A length of time, in two units at most: "0.42 s", "3 min 20 s", "2 d 4 h". */
export function duration(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds)) return "-";
  if (seconds < 60) return `${Number(seconds.toPrecision(seconds < 10 ? 2 : 3))} s`;
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = units.findIndex(([unit]) => seconds >= unit);
  const [unit, name] = units[first];
  const [less, lesser] = units[first + 1];
  const rest = Math.floor((seconds % unit) / less);
  return `${Math.floor(seconds / unit)} ${name}${rest ? ` ${rest} ${lesser}` : ""}`;
}

const TWO = (value) => String(value).padStart(2, "0");

/** The reader's own time of day, 24 hours. */
export function clock(unix, withSeconds = true) {
  if (typeof unix !== "number" || !Number.isFinite(unix)) return "-";
  const at = new Date(unix * 1000);
  return `${TWO(at.getHours())}:${TWO(at.getMinutes())}${withSeconds ? `:${TWO(at.getSeconds())}` : ""}`;
}

/** A time on an axis whose labels are `step` seconds apart: at midnight, or of whole days, the date. */
export function tick(unix, step) {
  const day = step >= 86400 || clock(unix) === "00:00:00";
  return day ? new Date(unix * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short" }) : clock(unix, step < 60);
}

export function date(unix) {
  if (typeof unix !== "number" || !Number.isFinite(unix)) return "-";
  const at = new Date(unix * 1000);
  return `${at.getFullYear()}-${TWO(at.getMonth() + 1)}-${TWO(at.getDate())} ${clock(unix)}`;
}

/** A node's name, or the first characters of its id, which is what terminals show as well. */
export function called(name, node) {
  return plain(name || String(node ?? "?").slice(0, SHORT), 40);
}

/** "max_staleness" as "max staleness". */
export function spoken(key) {
  return plain(key, 80).replaceAll("_", " ");
}

/** A version of the weights: the learner step that it follows. One of a run that was set back says which life it is of. */
export function version(text) {
  return plain(text ?? "-", 20).replace(/^0\./, "");
}

/** A run's or a node's state: its symbol, its word and its tone. The symbol tells it to people who see no colours. */
const STATES = {
  running: ["▶", "good"], training: ["▶", "good"], active: ["●", "good"], starting: ["◔", ""], preparing: ["◔", ""],
  waiting: ["◔", "warn"], paused: ["‖", "warn"], standby: ["○", ""], fetching: ["▲", "warn"], installing: ["▲", "warn"],
  leaf: ["◆", ""], silent: ["◌", "bad"], dead: ["✕", "bad"], gone: ["✕", "bad"], left: ["✕", ""], refused: ["⊘", "bad"],
  finished: ["✓", "good"], stopped: ["■", ""], stopping: ["■", "warn"], failed: ["✕", "bad"], diverged: ["✕", "bad"],
};

export function symbolOf(state) {
  const [symbol, tone] = STATES[String(state).split(" ")[0]] ?? ["■", ""];
  return { symbol, tone };
}
