// Where the nodes of the swarm are drawn: the learner in the middle, every node further out than who sends to it.
// Pure, and the same for the same swarm, so that a node stays where a reader saw it.

const LEAST_ARC = 13; // Pixels between neighbours on a ring; more nodes than fit go on further rings of the same depth
const RING = 22; // Pixels between two rings of one depth, at least

/** Each node's sender: the one that sends it most, on a shortest way from the learner. `links` are [from, to, rate]. */
export function parents(learner, nodes, links) {
  const onward = new Map();
  for (const [from, to, rate] of links) {
    if (!onward.has(from)) onward.set(from, []);
    onward.get(from).push([to, rate ?? 0]);
  }
  const known = new Set(nodes);
  const parent = new Map([[learner, null]]);
  let ring = [learner];
  while (ring.length > 0) {
    const best = new Map();
    for (const from of ring) {
      for (const [to, rate] of onward.get(from) ?? []) {
        if (parent.has(to) || !known.has(to)) continue;
        if (!best.has(to) || rate > best.get(to)[1]) best.set(to, [from, rate]);
      }
    }
    for (const [to, [from]] of best) parent.set(to, from);
    ring = [...best.keys()].sort();
  }
  return parent;
}

/** Places as {node: [x, y]} within a width and a height; nodes that nobody sends to are on the outermost ring. */
export function place(learner, nodes, parent, width, height) {
  const depths = new Map();
  const depth = (node) => {
    if (!depths.has(node)) depths.set(node, node === learner ? 0 : parent.has(node) ? depth(parent.get(node)) + 1 : -1);
    return depths.get(node);
  };
  const rings = [];
  const alone = [];
  for (const node of [...nodes].sort()) {
    const at = depth(node);
    if (at < 0) alone.push(node);
    else (rings[at] ??= []).push(node);
  }
  const turn = new Map([[learner, 0]]);
  for (const ring of rings.slice(1)) spreadOut(ring, parent, turn);
  if (alone.length > 0) {
    alone.forEach((node, at) => turn.set(node, (2 * Math.PI * (at + 0.5)) / alone.length));
    rings.push(alone);
  }
  return onEllipses(learner, rings.slice(1), turn, width, height);
}

/** Angles of one ring: children beside their parent, in its order, spread evenly over the whole ring. */
function spreadOut(ring, parent, turn) {
  const at = new Map(ring.map((node) => [node, turn.get(parent.get(node)) ?? 0]));
  ring.sort((a, b) => at.get(a) - at.get(b) || (a < b ? -1 : 1));
  ring.forEach((node, place) => turn.set(node, (2 * Math.PI * (place + 0.5)) / ring.length));
}

function onEllipses(learner, rings, turn, width, height) {
  const room = Math.max(40, Math.min(width, height) / 2 - 26);
  const stretch = Math.min(2.2, Math.max(1, (width / 2 - 40) / room));
  const tall = Math.max(1, (height / 2 - 26) / room);
  const around = (radius) => Math.PI * radius * (stretch + tall);
  // How many circles each depth needs, were the depths equally far apart.
  const counts = rings.map((ring, at) => {
    const radius = (room * (at + 1)) / rings.length;
    return Math.max(1, Math.ceil((ring.length * LEAST_ARC) / around(Math.max(radius, RING))));
  });
  const circles = counts.reduce((sum, count) => sum + count, 0);
  const places = new Map([[learner, [width / 2, height / 2]]]);
  let circle = 0;
  rings.forEach((ring, depth) => {
    const radii = Array.from({ length: counts[depth] }, (_, at) => (room * (circle + at + 1.4)) / (circles + 0.4));
    const turns = takingTurns(radii);
    ring.forEach((node) => {
      const [radius, angle] = [turns(), turn.get(node) - Math.PI / 2];
      places.set(node, [width / 2 + Math.cos(angle) * radius * stretch, height / 2 + Math.sin(angle) * radius * tall]);
    });
    circle += counts[depth];
  });
  return places;
}

/** Neighbours take turns on the circles of their depth; a wider circle gets more of them. */
function takingTurns(radii) {
  const owed = radii.map(() => 0);
  const sum = radii.reduce((all, radius) => all + radius, 0);
  return () => {
    radii.forEach((radius, at) => { owed[at] += radius / sum; });
    const next = owed.indexOf(Math.max(...owed));
    owed[next] -= 1;
    return radii[next];
  };
}
