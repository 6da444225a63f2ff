// gluonpar.collectives.simulate in JavaScript, for docs/step-by-step.html; the tests compare them.
// plans.js has the plans and the topologies.
"use strict";

const AT_ONCE = 1e-9; // of the time until the next event: what ends within it ends with it

/** The links of a topology, with ``kinds[i]`` = {latency, bandwidth}, and the routes over them. */
function topologyOf(name, devices, kinds) {
  const machine = PLANS.topologies[name].machines[devices];
  const links = machine.links.map((text) => {
    const [link, numbers] = text.split(": ");
    const [kind, latency, bandwidth] = numbers.split(" ").map(Number);
    const of = kinds[kind] || { latency: 1, bandwidth: 1 }; // -1: not to be chosen
    return { name: link, latency: latency * of.latency, bandwidth: bandwidth * of.bandwidth };
  });
  const numbers = (word) => (word.match(/../g) || []).map((digits) => parseInt(digits, 36));
  return { links, routes: machine.routes.map((row) => row.split(" ").map(numbers)) };
}

/** The messages of a step, from its line in plans.js. */
function messagesOf(line) {
  return line.split(" ").map((word) => ({
    src: parseInt(word[0], 36),
    dst: parseInt(word[1], 36),
    adds: word[2] === "+",
    chunks: [...word.slice(3)].map((digit) => parseInt(digit, 36)),
  }));
}

/** Simulate an all-reduce: its seconds, and the begin, arrival and end of every message by step.
 *
 * ``on`` is from topologyOf. A message that is added arrives before it ends: its sum takes time.
 */
function simulate(algorithm, devices, bytes, on, memoryBandwidth = Infinity) {
  const plan = PLANS.algorithms[algorithm].plans[devices];
  const steps = [];
  const known = new Map();
  let now = 0;
  for (const line of plan.steps) {
    const messages = messagesOf(line);
    // Most plans have few different steps, but for the numbers of the chunks.
    const key = messages
      .map(({ src, dst, adds, chunks }) => [src, dst, adds, chunks.length])
      .join();
    if (!known.has(key)) {
      known.set(key, timesOf(messages, devices, bytes / plan.chunks, on, memoryBandwidth));
    }
    const { routes, arrive, end } = known.get(key);
    messages.forEach((message, i) => {
      const times = { begin: now, arrive: now + arrive[i], end: now + end[i] };
      Object.assign(message, { route: routes[i], ...times });
    });
    const last = now + Math.max(...end);
    steps.push({ begin: now, end: last, messages });
    now = last;
  }
  return { seconds: now, steps, devices, chunks: plan.chunks };
}

/** The routes of a step's messages, and their arrivals and ends after the step's begin. */
function timesOf(messages, devices, chunkBytes, on, memoryBandwidth) {
  const bytes = messages.map((message) => message.chunks.length * chunkBytes);
  const routes = messages.map((message) => on.routes[message.src][message.dst]);
  const latency = (route) => route.reduce((sum, link) => sum + on.links[link].latency, 0);
  const bandwidth = on.links.map((link) => link.bandwidth);
  const arrive = share(routes.map(latency), bytes, routes, bandwidth);
  const end = arrive.slice();
  const adding = messages.map((_, i) => i).filter((i) => messages[i].adds);
  if (memoryBandwidth < Infinity) {
    // Two reads and a write per byte; the sums of one device share its memory.
    const sums = share(
      adding.map((i) => arrive[i]),
      adding.map((i) => 3 * bytes[i]),
      adding.map((i) => [messages[i].dst]),
      Array(devices).fill(memoryBandwidth),
    );
    adding.forEach((i, j) => (end[i] = sums[j]));
  }
  return { routes, arrive, end };
}

/** When each of some flows ends; a resource on its route is divided evenly among those on it. */
function share(begin, bytes, routes, bandwidth) {
  const end = begin.slice();
  const left = bytes.slice();
  let now = -Infinity;
  for (;;) {
    const unfinished = left.map((_, i) => i).filter((i) => left[i] > 0);
    if (!unfinished.length) return end;
    const active = unfinished.filter((i) => begin[i] <= now);
    const waiting = unfinished.filter((i) => begin[i] > now);
    const next = Math.min(...waiting.map((i) => begin[i])); // Infinity if none waits
    if (!active.length) {
      now = next;
      continue;
    }
    const onEach = Array(bandwidth.length).fill(0);
    for (const i of active) for (const link of routes[i]) onEach[link] += 1;
    const rate = active.map((i) =>
      Math.min(...routes[i].map((link) => bandwidth[link] / onEach[link])),
    );
    const endsIn = active.map((i, j) => left[i] / rate[j]);
    const elapsed = Math.min(next - now, ...endsIn);
    now += elapsed;
    active.forEach((i, j) => {
      if (endsIn[j] <= elapsed * (1 + AT_ONCE)) {
        left[i] = 0;
        end[i] = now;
      } else {
        left[i] -= rate[j] * elapsed;
      }
    });
  }
}

/** Which devices' values each chunk of each device has, as bits, before every step and after. */
function valuesOf({ devices, chunks, steps }) {
  let values = Array.from({ length: devices * chunks }, (_, i) => 1 << Math.floor(i / chunks));
  const before = [values];
  for (const { messages } of steps) {
    values = values.slice();
    for (const message of messages) receive(values, before[before.length - 1], message, chunks);
    before.push(values);
  }
  return before;
}

/** Write into ``values`` what a message brings, of the values before its step. */
function receive(values, before, { src, dst, adds, chunks: sent }, chunks) {
  for (const chunk of sent) {
    const kept = adds ? values[dst * chunks + chunk] : 0;
    values[dst * chunks + chunk] = kept | before[src * chunks + chunk];
  }
}

/** The number of the step at a time; after the last one, the number of steps. */
function stepAt(run, now) {
  if (now >= run.seconds) return run.steps.length;
  return run.steps.filter((step) => step.begin <= now).length - 1;
}

const SIZES = Array.from({ length: 23 }, (_, i) => 2 ** (8 + i)); // 256 bytes to 1 GB

/** The names of the fastest at each of some sizes, in ranges: {names, from, to}. */
function fastest(sizes, times) {
  const best = sizes.map((_, i) => {
    const least = Math.min(...Object.values(times).map((line) => line[i]));
    return Object.keys(times).filter((name) => times[name][i] <= least * (1 + AT_ONCE));
  });
  const ranges = [{ names: best[0], from: sizes[0], to: sizes[sizes.length - 1] }];
  for (let i = 1; i < sizes.length; i++) {
    if (best[i].join() === best[i - 1].join()) continue;
    // Times are lines over bytes, so that their difference is one, too.
    const [old, now] = [times[best[i - 1][0]], times[best[i][0]]];
    const [before, after] = [now[i - 1] - old[i - 1], old[i] - now[i]];
    const part = before + after > 0 ? before / (before + after) : 0.5;
    const at = sizes[i - 1] + part * (sizes[i] - sizes[i - 1]);
    ranges[ranges.length - 1].to = at;
    ranges.push({ names: best[i], from: at, to: sizes[sizes.length - 1] });
  }
  return ranges;
}
