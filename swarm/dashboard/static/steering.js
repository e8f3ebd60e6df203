// What can be changed while the learner runs: a form for each setting, and the learner's answer in its own words.
import { byId, el, say, setTone } from "./dom.js";
import { called, number, plain, spoken } from "./format.js";

const MOST = 1e9; // A bound beyond is there for programs, not for people
const ACTIONS = { checkpoint: "now", stop: "after-step" };
const GRAVE = { // Asked for once more
  stop: () => "Stop the run after this step? A checkpoint is written, samplers are sent home. It can be resumed later.",
  refuse: (value) => `Refuse ${value}? Its rollouts are no longer taken, until it is let in again.`,
};

export class Steering {
  constructor(store) {
    this._store = store;
    this._forms = new Map();
    this._shape = null;
  }

  draw() {
    const { digest, canSet, live } = this._store;
    if (digest === null) return;
    const settings = digest.settings ?? [];
    const shape = [canSet, live, ...settings.map((one) => `${one.key}:${one.kind}`)].join();
    if (shape !== this._shape) {
      this._shape = shape;
      this._build(settings, canSet, live);
    }
    for (const one of settings) this._fill(one, digest);
  }

  _build(settings, canSet, live) {
    this._forms.clear();
    const body = byId("steering-body");
    if (!live) {
      body.replaceChildren(el("p", { class: "dim" }, "This run is not led now, so nothing of it can be changed. Resume it with ", el("code", {}, "echo-node lead"), "."));
      return;
    }
    if (!canSet) {
      const field = el("input", { type: "password", name: "token", id: "token", autocomplete: "off", required: true });
      const form = el("form", { method: "get", action: "./", class: "controls" }, el("label", { for: "token" }, "Token"), field, el("button", { type: "submit" }, "Use it"));
      body.replaceChildren(
        el("p", {}, "This page only reads. To change settings here, open the address with the token that ", el("code", {}, "echo-node lead"), " printed, or paste the token: ", el("code", {}, "dashboard.json"), " in the run's directory has it. On the learner's machine ", el("code", {}, "echo-node set KEY=VALUE"), " does the same without a page."),
        form,
      );
      return;
    }
    const list = el("div", { class: "settings" });
    for (const one of settings) list.append(this._form(one));
    body.replaceChildren(settings.length ? list : el("p", { class: "dim" }, "This learner has nothing that can be changed while it runs."));
  }

  _form(one) {
    const id = `set-${plain(one.key, 60)}`;
    const field = fieldOf(one, id);
    const now = el("span", { class: "dim", id: `${id}-now` });
    const help = el("p", { class: "hint", id: `${id}-help` }, plain(one.help, 300));
    field?.setAttribute("aria-describedby", `${id}-help ${id}-now`);
    const button = el("button", { type: "submit", class: one.key in GRAVE ? "danger" : "" }, one.kind === "action" ? plain(`${spoken(one.key)} ${one.value ?? ACTIONS[one.key] ?? ""}`.trim().replaceAll("-", " "), 60) : "Set");
    const title = field ? el("label", { for: id }, spoken(one.key)) : el("b", {}, spoken(one.key));
    const unit = one.unit && one.unit !== "" ? el("span", { class: "dim" }, plain(one.unit, 20)) : null;
    const form = el("form", { class: "setting" }, el("div", {}, title, " ", now), help, el("div", { class: "controls" }, field, unit, button));
    form.dataset.setting = plain(one.key, 60);
    button.setAttribute("aria-label", one.kind === "action" ? button.textContent : `Set ${spoken(one.key)}`);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this._send(one, field, button);
    });
    this._forms.set(one.key, { field, now, touched: false });
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
    const said = one.kind === "bool" ? (one.value ? "is on" : "is off") : one.value === null ? "no bound" : `is ${typeof one.value === "number" ? number(one.value) : plain(one.value, 40)}`;
    const limits = [typeof one.min === "number" && `from ${number(one.min)}`, typeof one.max === "number" && one.max < MOST && `to ${number(one.max)}`].filter(Boolean).join(" ");
    say(form.now, limits ? `${said}, ${limits}` : said);
    if (form.touched || document.activeElement === form.field) return;
    if (one.kind === "bool") form.field.checked = Boolean(one.value);
    else if (form.field.value !== String(one.value ?? "")) form.field.value = String(one.value ?? "");
  }

  async _send(one, field, button) {
    const value = valueOf(one, field);
    if (one.key in GRAVE) {
      const name = field?.selectedOptions?.[0]?.textContent ?? String(value);
      if (!(await agreed(GRAVE[one.key](name), spoken(one.key)))) return;
    }
    button.disabled = true;
    const answer = byId("steering-answer");
    try {
      const sent = await fetch("api/set", {
        method: "POST", credentials: "same-origin", headers: { "Content-Type": "application/json", "X-Echo-Node": "1" },
        body: JSON.stringify({ [one.key]: value }),
      });
      const told = await sent.json().catch(() => ({}));
      setTone(answer, sent.ok ? "good" : "bad");
      say(answer, sent.ok ? `✓ ${plain(told.done ?? "Done.", 500)}` : `✕ ${plain(told.refused ?? `Refused: ${sent.status} ${sent.statusText}`, 500)}`);
      if (sent.ok) this._forms.get(one.key).touched = false;
    } catch (error) {
      setTone(answer, "bad");
      say(answer, `✕ The learner did not answer (${error.message}); nothing may have changed. Try again when the page is connected.`);
    }
    button.disabled = false;
  }
}

function fieldOf(one, id) {
  if (one.kind === "action") return null;
  if (one.kind === "bool") return el("input", { type: "checkbox", id });
  if (one.kind === "node") return el("select", { id, required: true });
  const step = one.kind === "int" ? "1" : "any";
  return el("input", { type: "number", id, step, min: one.min ?? null, max: one.max ?? null, placeholder: one.value === null ? "none" : null, required: one.value !== null });
}

function valueOf(one, field) {
  if (one.kind === "action") return one.value ?? ACTIONS[one.key] ?? true;
  if (one.kind === "bool") return field.checked;
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
  const key = JSON.stringify(refused ? digest.barred : (digest.nodes?.rows ?? []).map((row) => row.slice(0, 2)));
  if (listed.get(select) === key) return;
  listed.set(select, key);
  const nodes = refused ? barred(digest) : present(digest);
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
