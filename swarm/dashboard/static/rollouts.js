// The rollouts, a group at a time. All of it is strangers' text: it goes into text nodes and nowhere else.
import { ask, byId, el, say } from "./dom.js";
import { called, number, plain } from "./format.js";

const PAGE = 20; // Groups of one answer
const KEPT = 200; // Groups held; going further back forgets the newest
const SEARCHED = 10; // Answers looked through for a group that fits the filter, before saying so
const LONGEST = 20_000; // Characters of a text that are shown
const FILTERS = {
  all: () => true,
  mixed: (rewards) => new Set(rewards).size > 1,
  high: (rewards, limit) => rewards.some((reward) => reward >= limit),
  low: (rewards, limit) => rewards.length > 0 && rewards.every((reward) => reward <= limit),
};

export class Rollouts {
  constructor(store) {
    this._store = store;
    this._groups = [];
    this._next = null;
    this._at = 0;
    this._busy = false;
    this._loaded = false;
    const press = (id, does) => byId(id).addEventListener("click", does);
    press("rollout-newer", () => this._move(-1));
    press("rollout-older", () => this._move(1));
    press("rollout-newest", () => this.load());
    const filter = byId("rollout-filter");
    filter.addEventListener("change", () => {
      byId("rollout-limit").disabled = !["high", "low"].includes(filter.value);
      this._first();
    });
    byId("rollout-limit").addEventListener("change", () => this._first());
    new IntersectionObserver((entries) => {
      if (entries.at(-1).isIntersecting && !this._loaded) this.load();
    }, { rootMargin: "50%" }).observe(byId("rollouts"));
  }

  restart() {
    if (this._loaded) this.load();
  }

  /** There may be a first group now, where there was none. */
  stepped() {
    if (this._loaded && !this._busy && this._groups.length === 0) this.load();
  }

  async load() {
    this._loaded = true;
    [this._groups, this._next, this._at] = [[], null, 0];
    await this._more();
    await this._first();
  }

  /** Ask for older groups. Returns how many came. */
  async _more() {
    if (this._busy) return 0;
    this._busy = true;
    try {
      const before = this._groups.length > 0 ? `before=${encodeURIComponent(this._next)}&` : "";
      const answer = await ask(`api/rollouts?${before}count=${PAGE}`);
      const groups = answer.groups ?? [];
      this._fault = plain(answer.fault, 300);
      this._groups.push(...groups);
      this._next = answer.next ?? null;
      const gone = Math.max(0, this._groups.length - KEPT);
      this._groups.splice(0, gone);
      this._at -= gone;
      return groups.length;
    } catch (error) {
      this._fault = `Rollouts cannot be read: ${error.message}`;
      return 0;
    } finally {
      this._busy = false;
    }
  }

  _fits(group) {
    const rewards = group.rollouts.map((one) => one.reward).filter((reward) => typeof reward === "number");
    return FILTERS[byId("rollout-filter").value](rewards, Number(byId("rollout-limit").value));
  }

  async _first() {
    this._at = -1;
    await this._move(1);
  }

  async _move(way) {
    let [at, answers] = [this._at + way, 0];
    for (; at >= 0; at += way) {
      if (at >= this._groups.length) {
        const came = this._next === null || answers >= SEARCHED ? 0 : await this._more();
        if (came === 0) break;
        answers += 1;
        at = this._groups.length - came;
      }
      if (!this._fits(this._groups[at])) continue;
      this._at = at;
      this._show();
      return;
    }
    if (this._groups[this._at] === undefined) this._none();
    else say(byId("rollout-said"), `${this._said()} There is no ${way > 0 ? "older" : "newer"} group that fits${answers >= SEARCHED ? ` among the next ${SEARCHED * PAGE}` : ""}.`);
  }

  _none() {
    byId("rollout-group").replaceChildren();
    const none = this._groups.length > 0 ? "No group fits this filter." : "No group is complete yet. The first one comes when a sampler has drawn all completions of a prompt.";
    say(byId("rollout-said"), this._fault || none);
  }

  _said() {
    const group = this._groups[this._at];
    const trained = group.step === null || group.step === undefined ? "not trained on yet" : `trained on in step ${number(group.step)}`;
    return `Group ${plain(group.group, 40)}, ${trained}, ${group.rollouts.length} rollouts. ${this._fault}`;
  }

  _show() {
    const group = this._groups[this._at];
    say(byId("rollout-said"), this._said());
    const wanted = group.wanted === null || group.wanted === undefined || group.wanted === "" ? null : el("p", {}, el("b", {}, "Wanted: "), plain(group.wanted, 500));
    byId("rollout-group").replaceChildren(
      el("h3", {}, "Prompt"),
      el("pre", { class: "prompt", tabindex: "0", "aria-label": "Prompt", role: "region" }, plain(group.prompt, LONGEST)),
      ...(wanted ? [wanted] : []),
      el("h3", {}, "Completions"),
      el("div", { class: "completions" }, ...group.rollouts.map((one) => this._one(one))),
    );
  }

  _one(one) {
    const name = this._name(one.node);
    const exact = one.exact === null || one.exact === undefined ? null : el("span", { "data-tone": one.exact ? "good" : "" }, one.exact ? "✓ exact" : "not exact");
    const facts = [`${number(one.tokens)} tokens`, one.finish && plain(one.finish, 30), `by ${name}`, typeof one.staleness === "number" && `${number(one.staleness)} steps old`];
    const parts = Object.entries(one.parts ?? {}).slice(0, 16).map(([part, value]) => `${plain(part, 40)} ${number(value)}`);
    const spans = el("div", { class: "spans", role: "group", "aria-label": "Versions that drew it" }, ...(one.spans ?? []).slice(0, 32).map(([version, tokens]) => {
      const span = el("span", { title: `version ${plain(version, 20)}: ${number(tokens)} tokens` }, `${plain(version, 20)}: ${number(tokens)}`);
      span.style.flexGrow = String(Math.max(1, tokens));
      return span;
    }));
    return el("article", { class: "rollout" },
      el("h4", {}, el("span", {}, typeof one.reward === "number" ? `Reward ${number(one.reward)}` : "No reward yet"), exact),
      el("p", { class: "meta" }, facts.filter(Boolean).join(" · ")),
      parts.length ? el("p", { class: "meta" }, parts.join(" · ")) : null,
      spans,
      el("pre", { class: "completion", tabindex: "0", role: "region", "aria-label": `Completion ${number(one.index)}` }, plain(one.completion, LONGEST)));
  }

  _name(node) {
    const { columns = [], rows = [] } = this._store.digest?.nodes ?? {};
    const row = rows.find((each) => each[columns.indexOf("node")] === node);
    return called(row?.[columns.indexOf("name")], node);
  }
}
