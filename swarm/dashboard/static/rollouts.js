// The rollouts, a group at a time. All of it is strangers' text: it goes into text nodes and nowhere else.
import { ask, byId, el, onSeen, say } from "./dom.js";
import { number, plain, version } from "./format.js";

const PAGE = 20; // Groups of one answer
const KEPT = 200; // Groups held; going further back forgets the newest
const SEARCHED = 10; // Answers looked through for a group that fits the filter, before saying so
const LONGEST = 20_000; // Characters of a text that are shown
const TURNS = 200; // Texts of one episode that are shown
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
    this._shown = null;
    this._life = 0; // Of the list: what was asked of one before it is not shown any more
    this._turn = Promise.resolve(); // Presses are answered one after the other
    this._loaded = false;
    const press = (id, does) => byId(id).addEventListener("click", does);
    press("rollout-newer", () => this._then(() => this._move(-1)));
    press("rollout-older", () => this._then(() => this._move(1)));
    press("rollout-newest", () => {
      byId("rollout-step").value = "";
      this.load();
    });
    byId("rollout-step").addEventListener("change", () => this.load());
    const filter = byId("rollout-filter");
    filter.addEventListener("change", () => {
      byId("rollout-limit").disabled = !["high", "low"].includes(filter.value);
      this._then(() => this._first());
    });
    byId("rollout-limit").addEventListener("change", () => this._then(() => this._first()));
    onSeen(byId("rollouts"), (seen) => seen && !this._loaded && this.load());
  }

  restart() {
    if (this._loaded) this.load();
  }

  /** There may be a first group now, where there was none. */
  stepped() {
    if (this._loaded && this._shown === null) this.load();
  }

  load() {
    this._loaded = true;
    this._life += 1;
    this._then(async () => {
      [this._groups, this._next, this._at] = [[], null, 0];
      await this._more();
      await this._first();
    });
  }

  _then(does) {
    const life = this._life;
    this._turn = this._turn.then(() => (life === this._life ? does() : null));
  }

  /** Ask for older groups. Returns how many came. */
  async _more() {
    try {
      const before = this._groups.length > 0 ? `before=${encodeURIComponent(this._next)}&` : "";
      const step = Number(byId("rollout-step").value);
      const answer = await ask(`api/rollouts?${before}count=${PAGE}${step >= 1 ? `&step=${Math.floor(step)}` : ""}`);
      const groups = answer.groups ?? [];
      this._fault = plain(answer.fault, 300);
      this._groups.push(...groups);
      this._next = answer.next ?? null;
      const gone = Math.max(0, this._groups.length - KEPT);
      this._groups.splice(0, gone);
      this._at = Math.max(-1, this._at - gone);
      return groups.length;
    } catch (error) {
      this._fault = `Rollouts cannot be read: ${error.message}`;
      return 0;
    }
  }

  _fits(group) {
    return FILTERS[byId("rollout-filter").value](rewardsOf(group), Number(byId("rollout-limit").value));
  }

  /** Begin with the newest group that has rewards: the newest of all are being drawn and scored. */
  async _first() {
    [this._at, this._shown] = [-1, null];
    const rewarded = this._groups.findIndex((group) => rewardsOf(group).length > 0 && this._fits(group));
    if (rewarded > 0) this._at = rewarded - 1;
    await this._move(1);
  }

  async _move(way) {
    const life = this._life;
    let [at, answers] = [this._at + way, 0];
    for (; at >= 0; at += way) {
      if (at >= this._groups.length) {
        const came = this._next === null || answers >= SEARCHED ? 0 : await this._more();
        if (life !== this._life) return;
        if (came === 0) break;
        answers += 1;
        at = this._groups.length - came;
      }
      if (!this._fits(this._groups[at])) continue;
      [this._at, this._shown] = [at, this._groups[at]];
      this._show();
      return;
    }
    if (this._shown === null) this._none();
    else say(byId("rollout-said"), `${this._said()} There is no ${way > 0 ? "older" : "newer"} group that fits${answers >= SEARCHED ? ` among the next ${SEARCHED * PAGE}` : ""}.`);
  }

  _none() {
    byId("rollout-group").replaceChildren();
    const none = this._groups.length > 0 ? "No group fits this filter." : byId("rollout-step").value ? "No group of this step is kept." : "No group is complete yet. The first one comes when a sampler has drawn all completions of a prompt.";
    say(byId("rollout-said"), this._fault || none);
  }

  _said() {
    const [group, rewards] = [this._shown, rewardsOf(this._shown)];
    const trained = group.dropped ? `dropped: ${plain(group.dropped, 60)}` : typeof group.step === "number" ? `trained on in step ${number(group.step)}` : this._isGoing() ? "not trained on yet" : "never trained on";
    const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
    const spread = Math.sqrt(rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / rewards.length);
    const told = rewards.length ? `, rewards ${number(mean)} ± ${number(spread)} (${number(Math.min(...rewards))} to ${number(Math.max(...rewards))})` : "";
    return `Group ${plain(group.group, 40)}, ${trained}, ${group.rollouts.length} rollouts${told}. ${this._fault}`;
  }

  _isGoing() {
    return this._store.live && !["finished", "stopped", "failed"].includes(this._store.digest?.state);
  }

  _show() {
    const group = this._shown;
    say(byId("rollout-said"), this._said());
    const wanted = group.wanted === null || group.wanted === undefined || group.wanted === "" ? null : el("p", {}, el("b", {}, "Wanted: "), plain(group.wanted, 500));
    byId("rollout-group").replaceChildren(
      el("h3", {}, "Prompt"),
      el("pre", { class: "prompt", tabindex: "0", "aria-label": "Prompt", role: "region" }, plain(group.prompt, LONGEST)),
      ...(wanted ? [wanted] : []),
      el("h3", {}, "Completions"),
      el("div", { class: "completions" }, ...group.rollouts.map((one) => this._one(one, group))),
    );
  }

  _one(one, group) {
    const unscored = group.dropped || !this._isGoing() ? "No reward" : "No reward yet";
    const name = this._store.nameOf(one.node);
    const exact = one.exact === null || one.exact === undefined ? null : el("span", { "data-tone": one.exact ? "good" : "" }, one.exact ? "✓ exact" : "not exact");
    const facts = [`${number(one.tokens)} tokens`, one.finish && plain(one.finish, 30), `by ${name}`, typeof one.staleness === "number" && `${number(one.staleness)} steps old`];
    const parts = Object.entries(one.parts ?? {}).slice(0, 16).map(([part, value]) => `${plain(part, 40)} ${number(value)}`);
    const spans = el("div", { class: "spans", role: "group", "aria-label": "Versions that drew it" }, ...(one.spans ?? []).slice(0, 32).map(([drawnBy, tokens]) => {
      const span = el("span", { title: `version ${version(drawnBy)}: ${number(tokens)} tokens` }, `${version(drawnBy)}: ${number(tokens)}`);
      span.style.flexGrow = String(Math.max(1, tokens));
      return span;
    }));
    return el("article", { class: "rollout" },
      el("h4", {}, el("span", {}, typeof one.reward === "number" ? `Reward ${number(one.reward)}` : unscored), exact),
      el("p", { class: "meta" }, facts.filter(Boolean).join(" · ")),
      parts.length ? el("p", { class: "meta" }, parts.join(" · ")) : null,
      spans,
      one.lost ? el("p", { class: "meta" }, "Lost: its text is damaged, or no longer kept.") : one.turns?.length ? this._conversation(one) : el("pre", { class: "completion", tabindex: "0", role: "region", "aria-label": `Completion ${number(one.index)}` }, plain(one.completion, LONGEST)));
  }

  /** An episode: what the environment told, and what was drawn in each turn. */
  _conversation(one) {
    return el("div", { class: "conversation", tabindex: "0", role: "region", "aria-label": `Episode ${number(one.index)}` }, ...one.turns.slice(0, TURNS).map((turn) => {
      const [isDrawn, player] = [turn.node !== undefined, typeof turn.player === "number" ? `player ${number(turn.player)}` : ""];
      const facts = isDrawn ? [player || "model", `reward ${number(turn.reward)}`, `by ${this._store.nameOf(turn.node)}`, `version ${(turn.versions ?? []).map(version).join(", ")}`] : [player ? `environment to ${player}` : "environment"];
      return el("div", { class: isDrawn ? "said" : "read" }, el("p", { class: "meta" }, facts.join(" · ")), el("pre", { class: "completion" }, plain(turn.text, LONGEST)));
    }));
  }
}

function rewardsOf(group) {
  return group.rollouts.map((one) => one.reward).filter((reward) => typeof reward === "number");
}
