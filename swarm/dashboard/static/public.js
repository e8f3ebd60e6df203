// The page for volunteers: what the run is for, how far it is, how to join, and who has given most.
import { ask, byId, copyButton, el, say } from "./dom.js";
import { brief, number, plain, share } from "./format.js";

const POLL_MS = 5000;
const LEADERS = 100;
const TILES = [
  ["Reward", (state) => number(state.reward)], ["Held-out", (state) => (typeof state.held_out === "number" && state.held_out <= 1 ? share(state.held_out) : number(state.held_out))],
  ["Samplers now", (state) => number(state.samplers)], ["Rollouts accepted", (state) => number(state.rollouts)], ["Tokens accepted", (state) => brief(state.tokens)],
];

const values = TILES.map(([label]) => {
  const value = el("span", { class: "value" }, "-");
  byId("tiles").append(el("li", { class: "tile" }, el("span", { class: "label" }, label), value));
  return value;
});
byId("join").append(copyButton(byId("join-line")));

function show(state) {
  say(byId("run"), plain(state.run, 80) || "echo-node");
  document.title = `${plain(state.run, 80) || "echo-node"} · step ${number(state.step)}`;
  const what = plain(state.what, 2000);
  say(byId("what"), what ? `${what[0].toUpperCase()}${what.slice(1).replace(/\.$/, "")}.` : "A language model learns by reinforcement, on machines that people lend.");
  byId("progress").max = Math.max(1, state.steps || 1);
  byId("progress").value = state.step ?? 0;
  say(byId("steps"), `step ${number(state.step)} of ${number(state.steps)}`);
  say(byId("going"), going(state));
  TILES.forEach(([, write], at) => say(values[at], write(state)));
  say(byId("join-line"), plain(state.join, 500));
  byId("installs").replaceChildren(...Object.entries(state.installs ?? {}).flatMap(([kind, line]) =>
    [el("dt", {}, plain(kind, 40)), el("dd", {}, el("code", {}, plain(line, 300)))]));
  const leaders = (state.leaders ?? []).slice(0, LEADERS);
  byId("nobody").hidden = leaders.length > 0;
  byId("leaders").replaceChildren(...leaders.map((one, at) => el("tr", {},
    el("td", { class: "number" }, String(at + 1)), el("th", { scope: "row" }, plain(one.name, 60) || "no name"), el("td", { class: "number" }, number(one.tokens)), el("td", { class: "number" }, number(one.rollouts)))));
}

/** Whether it goes well, in a sentence. */
function going({ held_out_first: first, held_out: now, step }) {
  if (typeof first !== "number" || typeof now !== "number") return step > 0 ? "It was not tested on held-out prompts yet." : "It has yet to begin.";
  const told = now > first ? "It learns" : now < first ? "It answers fewer than at first" : "No change is measured yet";
  return `${told}: of the prompts that it never trains on it answered ${share(first)} at first, and ${share(now)} now.`;
}

async function poll() {
  try {
    if (!document.hidden) show(await ask("public/state.json"));
    say(byId("said"), "\u00a0");
  } catch {
    say(byId("said"), "The learner does not answer just now; these are the last figures it gave.");
  }
  setTimeout(poll, POLL_MS);
}

poll();
