// What every part of the page does with elements, canvases and colours.
import { kept } from "./kept.js";

/**
 * An element. Text goes in as text nodes, never as markup, and `style` through the CSSOM, which the page's
 * Content-Security-Policy allows; a style attribute it would not.
 */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [kind, does] of Object.entries(value)) made.addEventListener(kind, does);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Set the text only if it is another one: an unchanged text costs no layout, and is not read out again. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setTone(element, tone) {
  if (element.dataset.tone !== tone) element.dataset.tone = tone;
}

// Asking an element for its size in the midst of an update has the browser lay out the page then and there.
let sizes = new WeakMap();
window.addEventListener("resize", () => { sizes = new WeakMap(); });

/** The size of a canvas in CSS pixels, as it was when the window, or what onResize watches, last changed. */
export function sizeOf(canvas) {
  let size = sizes.get(canvas);
  if (size === undefined) {
    size = { width: canvas.clientWidth, height: canvas.clientHeight };
    if (size.width > 0) sizes.set(canvas, size);
  }
  return size;
}

/** Make a canvas as sharp as the screen. Returns its context, in CSS pixels, and its size. */
export function fit(canvas) {
  const ratio = Math.min(3, window.devicePixelRatio || 1);
  const { width, height } = sizeOf(canvas);
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

const dark = window.matchMedia("(prefers-color-scheme: dark)");
let palette = null;

/** The colours of the stylesheet, for canvases. */
export function colours() {
  if (palette === null) {
    const style = getComputedStyle(document.documentElement);
    palette = new Proxy({}, { get: (known, name) => (known[name] ??= style.getPropertyValue(`--${name}`).trim()) });
  }
  return palette;
}

export function onTheme(does) {
  dark.addEventListener("change", () => {
    palette = null;
    does();
  });
}

/**
 * Call `does(seen)` when an element comes onto the screen (or within a screen's quarter of it) or leaves it. All of a
 * report is seen: it may be printed.
 */
export function onSeen(element, does) {
  if (kept !== null) {
    queueMicrotask(() => does(true));
    return;
  }
  new IntersectionObserver((entries) => does(entries.at(-1).isIntersecting), { rootMargin: "25%" }).observe(element);
}

/** Call `does` after an element's width changed; the first call comes at once. */
export function onResize(element, does) {
  let last = -1;
  new ResizeObserver(() => {
    if (element.clientWidth === last) return;
    last = element.clientWidth;
    sizes = new WeakMap();
    does();
  }).observe(element);
}

/** A GET of JSON; of a report, what it has of that. An error says what the server said. */
export async function ask(path, options) {
  if (kept !== null) return kept.answers[path.split("?")[0]];
  const answer = await fetch(path, { credentials: "same-origin", ...options });
  if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText} (${path.split("?")[0]})`);
  return answer.json();
}

/** A button that copies the text of `from`; where the browser refuses, it selects that text instead. */
export function copyButton(from) {
  const button = el("button", { type: "button", class: "small" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(from.textContent);
      say(button, "Copied");
    } catch {
      getSelection().selectAllChildren(from);
      say(button, "Selected");
    }
    setTimeout(() => say(button, "Copy"), 2000);
  });
  return button;
}

/** Keep the focus where it is while `does` rebuilds what is inside `parent`: by the element's data-key. */
export function keepingFocus(parent, does) {
  const key = parent.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  does();
  if (key !== undefined) parent.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
}
