// What can be changed while the learner runs: a form for each setting, and the learner's answer in its own words.
import { byId, el, keepingFocus, say, setTone } from "./dom.js";
import { called, number, plain, spoken } from "./format.js";

const MOST = 1e9; // A bound beyond is there for programs, not for people
const HELD = 3; // Digests that may still tell the value before a change
const ACTIONS = { checkpoint: "now", stop: "after-step" };
const VERBS = { checkpoint: "Write a checkpoint now", stop: "Stop after this step", refuse: "Refuse", let_in: "Let in" };
const GRAVE = { // Asked for once more
  stop: () => "Stop the run after this step? A checkpoint is written, samplers are sent home. It can be resumed later.",
  refuse: (value) => `Refuse ${value}? Its rollouts are no longer taken, until it is let in again.`,
};

export class Steering {
  constructor(store) {
    this._store = store;
    this._forms = new Map();
    this._shape = null;
    // The server takes a right token out of the address.
    this._refused = new URLSearchParams(location.search).has("token");
  }

  draw() {
    const { digest, canSet, live } = this._store;
    if (digest === null) return;
    const settings = digest.settings ?? [];
    // A learner that starts has none yet: what somebody was writing stays.
    const waits = live && canSet && settings.length === 0 && this._forms.size > 0;
    for (const form of this._forms.values()) form.button.disabled = waits || form.busy;
    if (waits) return;
    const shape = [canSet, live, ...settings.map((one) => `${one.key}:${one.kind}`)].join();
    if (shape !== this._shape) {
      this._shape = shape;
      keepingFocus(byId("steering-body"), () => this._build(settings, canSet, live));
    }
    for (const one of settings) this._fill(one, digest);
  }

  _build(settings, canSet, live) {
    const before = this._forms;
    this._forms = new Map();
    const body = byId("steering-body");
    if (!live) {
      body.replaceChildren(el("p", { class: "dim" }, "This run is not led now, so nothing of it can be changed. Resume it with ", el("code", {}, "echo-node lead"), "."));
      return;
    }
    if (!canSet) {
      const field = el("input", { type: "password", name: "token", id: "token", autocomplete: "off", required: true });
      const form = el("form", { method: "get", action: "./", class: "controls" }, el("label", { for: "token" }, "Token"), field, el("button", { type: "submit" }, "Use it"));
      body.replaceChildren(
        this._refused ? el("p", { "data-tone": "bad" }, "✕ That token is not this run's.") : "",
        el("p", {}, "This page only reads. To change settings here, open the address with the token that ", el("code", {}, "echo-node lead"), " printed, or paste the token: ", el("code", {}, "dashboard.json"), " in the run's directory has it. On the learner's machine ", el("code", {}, "echo-node set KEY=VALUE"), " does the same without a page."),
        form,
      );
      return;
    }
    const list = el("div", { class: "settings" });
    for (const one of settings) {
      list.append(this._form(one));
      const [was, is] = [before.get(one.key), this._forms.get(one.key)];
      if (was?.touched && was.field && is.field) [is.field.value, is.touched] = [was.field.value, true];
    }
    body.replaceChildren(settings.length ? list : el("p", { class: "dim" }, "This learner has nothing that can be changed while it runs."));
  }

  _form(one) {
    const id = `set-${plain(one.key, 60)}`;
    const field = fieldOf(one, id);
    const now = el("span", { class: "dim", id: `${id}-now` });
    const help = el("p", { class: "hint", id: `${id}-help` }, plain(one.help, 300));
    field?.setAttribute("aria-describedby", `${id}-help ${id}-now`);
    field?.setAttribute("data-key", id);
    const verb = VERBS[one.key] ?? (one.kind === "action" ? plain(spoken(one.key), 60) : "Set");
    const button = el("button", { type: "submit", "data-key": `${id}-do`, class: one.key in GRAVE ? "danger" : "" }, verb);
    const title = field ? el("label", { for: id }, spoken(one.key)) : el("b", {}, spoken(one.key));
    const unit = one.unit && one.unit !== "" ? el("span", { class: "dim" }, plain(one.unit, 20)) : null;
    const form = el("form", { class: "setting" }, el("div", {}, title, " ", now), help, el("div", { class: "controls" }, field, unit, button));
    form.dataset.setting = plain(one.key, 60);
    if (verb === "Set" && one.kind !== "bool") button.setAttribute("aria-label", `Set ${spoken(one.key)}`);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this._send(one, field, button);
    });
    this._forms.set(one.key, { field, now, button, touched: false, busy: false, held: null });
    field?.addEventListener("input", () => { this._forms.get(one.key).touched = true; });
    return form;
  }

  /** Show the value that holds. A field that somebody is filling in is left alone. */
  _fill(one, digest) {
    const form = this._forms.get(one.key);
    if (form === undefined) return;
    if (one.kind === "node") {
      nodesInto(form.field, digest, one.key === "let_in");
      return;
    }
    if (one.kind === "action") return;
    const value = holding(form, one.value);
    if (one.kind === "bool") {
      form.value = Boolean(value);
      const [on, off] = one.key === "paused" ? ["Go on", "Pause"] : ["Turn off", "Turn on"];
      say(form.button, form.value ? on : off);
      say(form.now, form.value ? "yes" : "no");
      return;
    }
    const said = value === null ? "no bound" : `is ${typeof value === "number" ? number(value) : plain(value, 40)}`;
    const limits = [typeof one.above === "number" ? `above ${number(one.above)}` : typeof one.min === "number" && `from ${number(one.min)}`, typeof one.max === "number" && one.max < MOST && `to ${number(one.max)}`].filter(Boolean).join(" ");
    say(form.now, limits ? `${said}, ${limits}` : said);
    // One setting's limit may depend on another's value.
    for (const side of ["min", "max"]) if (form.field[side] !== String(one[side] ?? "")) form.field[side] = one[side] ?? "";
    if (form.touched || document.activeElement === form.field) return;
    if (form.field.value !== String(value ?? "")) form.field.value = String(value ?? "");
  }

  async _send(one, field, button) {
    const form = this._forms.get(one.key);
    const value = one.kind === "bool" ? !form.value : valueOf(one, field);
    if (one.key in GRAVE) {
      const name = field?.selectedOptions?.[0]?.textContent ?? String(value);
      if (!(await agreed(GRAVE[one.key](name), spoken(one.key)))) return;
    }
    form.busy = button.disabled = true;
    const answer = byId("steering-answer");
    try {
      const sent = await fetch("api/set", {
        method: "POST", credentials: "same-origin", headers: { "Content-Type": "application/json", "X-Echo-Node": "1" },
        body: JSON.stringify({ [one.key]: value }),
      });
      const told = await sent.json().catch(() => ({}));
      setTone(answer, sent.ok ? "good" : "bad");
      say(answer, sent.ok ? `✓ ${this._named(told.done ?? "Done.")}` : `✕ ${this._named(told.refused ?? `Refused: ${sent.status} ${sent.statusText}`)}`);
      if (sent.ok && one.kind !== "node" && one.kind !== "action") {
        Object.assign(form, { touched: false, held: { value, left: HELD } });
        this._fill((this._store.digest.settings ?? []).find((each) => each.key === one.key) ?? one, this._store.digest);
      }
    } catch (error) {
      setTone(answer, "bad");
      say(answer, `✕ The learner did not answer (${error.message}); nothing may have changed. Try again when the page is connected.`);
    }
    form.busy = button.disabled = false;
  }

  /** The learner's words, with the names of the nodes that they call by their ids. */
  _named(words) {
    const names = new Map(present(this._store.digest));
    return plain(words, 500).replace(/\b[0-9a-f]{32}\b/g, (node) => (names.has(node) ? `${names.get(node)} (${called("", node)})` : node));
  }
}

/** The value that the learner confirmed, until its digests tell it too; else theirs. */
function holding(form, value) {
  if (form.held === null) return value;
  form.held.left -= 1;
  const held = form.held.value;
  if (held === value || form.held.left < 0) form.held = null;
  return form.held === null ? value : held;
}

function fieldOf(one, id) {
  if (one.kind === "action" || one.kind === "bool") return null;
  if (one.kind === "node") return el("select", { id, required: true });
  const step = one.kind === "int" ? "1" : "any";
  return el("input", { type: "number", id, step, placeholder: one.value === null ? "none" : null, required: one.value !== null });
}

function valueOf(one, field) {
  if (one.kind === "action") return one.value ?? ACTIONS[one.key] ?? true;
  if (one.kind === "node") return field.value;
  return field.value === "" ? null : Number(field.value);
}

const listed = new WeakMap(); // What each list of nodes was made from

function present({ nodes }) {
  const { columns = [], rows = [] } = nodes ?? {};
  const [id, name, role] = ["node", "name", "role"].map((column) => columns.indexOf(column));
  return rows.filter((row) => row[role] !== "learner").map((row) => [row[id], called(row[name], row[id])]);
}

function barred(digest) {
  const names = new Map(present(digest));
  return (digest.barred ?? []).map((node) => [node, names.get(node) ?? called("", node)]);
}

function nodesInto(select, digest, refused) {
  // Raw: to clean a thousand names each second would take longer than all the rest of this form.
  const key = JSON.stringify([digest.barred, refused || (digest.nodes?.rows ?? []).map((row) => row.slice(0, 2))]);
  if (listed.get(select) === key) return;
  listed.set(select, key);
  const out = new Set(digest.barred ?? []);
  const nodes = refused ? barred(digest) : present(digest).filter(([node]) => !out.has(node));
  const chosen = select.value;
  const none = el("option", { value: "" }, nodes.length ? "choose a node" : "no node");
  select.replaceChildren(none, ...nodes.map(([node, name]) => el("option", { value: node }, `${name} (${called("", node)})`)));
  if (nodes.some(([node]) => node === chosen)) select.value = chosen;
}

/** Ask with the page's own dialogue. */
function agreed(question, verb) {
  const dialog = byId("confirm");
  say(byId("confirm-said"), question);
  say(byId("confirm-yes"), `Yes, ${verb}`);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true }));
}
