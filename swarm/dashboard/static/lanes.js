// How lanes of the timeline look: a colour and a pattern for each state, spans with their names, buckets as stacked shares.
import { colours, fit } from "./dom.js";
import { called, tick } from "./format.js";

export const ROW = 26; // Pixels of a lane
export const TOP = 24; // Pixels of the axis above
const GAP = 4;
const COLUMN = 8; // Pixels of a column of shares, where spans are too short to be seen one by one
const SHORT = 6; // Pixels of the median span at which that is so

/** State: its colour, and the pattern that tells it to people who do not see the colour. */
const LOOKS = {
  train: ["c2", "solid"], wait: ["dim", "dots"], stage: ["c3", "rising"], encode: ["c0", "crossed"], send: ["c5", "upright"],
  draw: ["c0", "solid"], install: ["c4", "rising"], fetch: ["c1", "falling"], standby: ["edge", "hollow"], gone: ["limit", "cross"],
};
const UNKNOWN = ["c5", "dots"]; // A state of a newer learner

const patterns = new Map();

export function forgetPatterns() {
  patterns.clear();
}

function patternOf(context, state) {
  const known = patterns.get(state);
  if (known) return known;
  const [name, kind] = LOOKS[state] ?? UNKNOWN;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const paint = tile.getContext("2d");
  const faint = ["dots", "hollow", "cross"].includes(kind);
  paint.fillStyle = faint ? colours().card : colours()[name];
  paint.fillRect(0, 0, 8, 8);
  paint.fillStyle = paint.strokeStyle = faint ? colours()[name] : colours().paper;
  paint.globalAlpha = faint ? 0.7 : 0.42;
  paint.lineWidth = 1.5;
  const lines = {
    rising: [[-1, 9, 9, -1], [-1, 1, 1, -1], [7, 9, 9, 7]], falling: [[-1, -1, 9, 9], [7, -1, 9, 1], [-1, 7, 1, 9]],
    upright: [[2, 0, 2, 8]], crossed: [[-1, 9, 9, -1], [-1, -1, 9, 9]], cross: [[1, 1, 7, 7], [1, 7, 7, 1]],
  }[kind] ?? [];
  for (const [x0, y0, x1, y1] of lines) {
    paint.beginPath();
    paint.moveTo(x0, y0);
    paint.lineTo(x1, y1);
    paint.stroke();
  }
  if (kind === "dots") for (const [x, y] of [[1, 1], [5, 5]]) paint.fillRect(x, y, 1.5, 1.5);
  const made = context.createPattern(tile, "repeat");
  patterns.set(state, made);
  return made;
}

function block(context, state, x, y, width, height, framed = true) {
  context.fillStyle = patternOf(context, state);
  context.fillRect(x, y, width, height);
  const [name, kind] = LOOKS[state] ?? UNKNOWN;
  if (framed && (kind === "hollow" || kind === "dots" || kind === "cross") && width > 3 && height > 3) {
    context.strokeStyle = colours()[name];
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
  }
}

/** A sample for the legend. */
export function sample(canvas, state) {
  const { context, width, height } = fit(canvas);
  block(context, state, 0, 1, width, height - 2);
}

export function nameWidth(width) {
  return Math.min(170, Math.max(84, width * 0.16));
}

/** A second, 5 s, a minute, ... so that labels are at least 80 pixels apart. */
function stride(span, width) {
  const steps = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800];
  return steps.find((step) => (step / span) * width >= 80) ?? 604800;
}

/**
 * Draw `lanes` [{lane, name, gone}], the first of them at `offset` pixels (zero or negative), of the time from `from` to
 * `to`. `data` is the newest answer of /api/timeline, `cursor` {lane, at} or null.
 */
export function drawLanes(canvas, { lanes, offset, from, to, data, now, cursor }) {
  const { context, width, height } = fit(canvas);
  const left = nameWidth(width);
  const x = (at) => left + ((at - from) / (to - from)) * (width - left);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  grid(context, { from, to, x, left, width, height });
  context.save();
  context.beginPath();
  context.rect(0, TOP, width, height - TOP);
  context.clip();
  lanes.forEach((each, at) => {
    const y = TOP + offset + at * ROW;
    if (cursor?.lane === each.lane) {
      context.fillStyle = colours().veil;
      context.fillRect(0, y, width, ROW);
    }
    context.save();
    context.beginPath();
    context.rect(left, TOP, width - left, height - TOP);
    context.clip();
    const [spans, shares] = [data?.spans?.[each.lane], data?.buckets?.lanes?.[each.lane]];
    if (spans) drawSpans(context, spans, data.states, y, { from, to, x, now });
    else if (shares) drawShares(context, shares, data, y, { x, left, width });
    context.restore();
    context.fillStyle = each.gone ? colours().dim : colours().ink;
    context.fillText(clipped(context, called(each.name === each.lane ? "" : each.name, each.lane) + (each.gone ? " ✕" : ""), left - 14), 8, y + ROW / 2);
  });
  if (cursor) {
    context.strokeStyle = colours().ink;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(Math.round(x(cursor.at)) + 0.5, TOP);
    context.lineTo(Math.round(x(cursor.at)) + 0.5, height);
    context.stroke();
  }
  context.restore();
}

function grid(context, { from, to, x, left, width, height }) {
  const step = stride(to - from, width - left);
  const shift = new Date(from * 1000).getTimezoneOffset() * 60; // Days begin at the reader's midnight
  context.strokeStyle = colours().grid;
  context.fillStyle = colours().dim;
  context.lineWidth = 1;
  for (let at = Math.ceil((from - shift) / step) * step + shift; at <= to; at += step) {
    const place = Math.round(x(at)) + 0.5;
    context.beginPath();
    context.moveTo(place, TOP - 4);
    context.lineTo(place, height);
    context.stroke();
    const label = tick(at, step);
    const wide = context.measureText(label).width;
    if (place + wide / 2 < width && place - wide / 2 > left - 30) context.fillText(label, place - wide / 2, TOP / 2);
  }
}

function drawSpans(context, spans, states, y, { from, to, x, now }) {
  const seen = spans.map(([state, began, ended]) => [state, began, Math.min(ended ?? now, now)]).filter(([, began, end]) => end > from && began < to);
  const a_second = x(from + 1) - x(from);
  const lengths = seen.map(([, began, end]) => end - began).sort((a, b) => a - b);
  const crowd = lengths[lengths.length >> 1] * a_second < SHORT;
  const long = crowd ? (2 * COLUMN) / a_second : 0;
  if (crowd) drawColumns(context, seen.filter(([, began, end]) => end - began < long), states, y, { x, size: COLUMN / a_second });
  for (const [state, began, end] of seen) {
    if (end - began < long) continue;
    const [left, right] = [Math.max(x(began), x(from)), Math.min(x(end), x(to))];
    const wide = Math.max(1, right - left - (right - left > 4 ? 1 : 0));
    block(context, states[state], left, y + GAP / 2, wide, ROW - GAP);
    const name = states[state];
    if (wide > 44 && wide > context.measureText(name).width + 14) label(context, name, left + 6, y + ROW / 2);
  }
}

/** Shares of the states in columns of `size` seconds, which stand still while time goes on. */
function drawColumns(context, spans, states, y, { x, size }) {
  const columns = new Map();
  for (const [state, began, end] of spans) {
    for (let at = Math.floor(began / size); at * size < end; at += 1) {
      if (!columns.has(at)) columns.set(at, states.map(() => 0));
      columns.get(at)[state] += (Math.min(end, (at + 1) * size) - Math.max(began, at * size)) / size;
    }
  }
  for (const [at, shares] of columns) stack(context, shares, states, y, Math.round(x(at * size)), Math.round(x((at + 1) * size)));
}

/** Shares of one column, one above the other. */
function stack(context, shares, states, y, from, to) {
  let foot = y + ROW - GAP / 2;
  shares.forEach((part, state) => {
    if (!(part > 0)) return;
    const high = Math.min(1, part) * (ROW - GAP);
    foot -= high;
    block(context, states[state], from, foot, Math.max(1, to - from), high, false);
  });
}

/** A word on a patch of paper, so that it is readable on every pattern. */
function label(context, name, x, y) {
  const wide = context.measureText(name).width;
  context.fillStyle = colours().paper;
  context.globalAlpha = 0.88;
  context.beginPath();
  context.roundRect(x - 3, y - 7.5, wide + 6, 15, 3);
  context.fill();
  context.globalAlpha = 1;
  context.fillStyle = colours().ink;
  context.fillText(name, x, y + 0.5);
}

function drawShares(context, shares, data, y, { x, left, width }) {
  const { began, bucket_s: size } = data.buckets;
  shares.forEach((bucket, at) => {
    const [from, to] = [x(began + at * size), x(began + (at + 1) * size)];
    if (to < left || from > width) return;
    stack(context, bucket, data.states, y, from, Math.max(from, to - 0.5));
  });
}

function clipped(context, text, most) {
  if (context.measureText(text).width <= most) return text;
  let cut = text;
  while (cut.length > 1 && context.measureText(`${cut}…`).width > most) cut = cut.slice(0, -1);
  return `${cut}…`;
}
