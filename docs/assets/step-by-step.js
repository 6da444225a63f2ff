// All-reduce, step by step: the page docs/step-by-step.html. plans.js has the plans and topologies.
"use strict";

/* ---- The simulation: gluonpar.collectives.simulate in JavaScript; the tests compare the two ---- */

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
  let now = 0;
  for (const line of plan.steps) {
    const messages = timed(messagesOf(line), devices, bytes / plan.chunks, on, memoryBandwidth);
    for (const message of messages) {
      message.begin = now;
      message.arrive += now;
      message.end += now;
    }
    const end = Math.max(...messages.map((message) => message.end));
    steps.push({ begin: now, end, messages });
    now = end;
  }
  return { seconds: now, steps, devices, chunks: plan.chunks };
}

/** The messages of a step with their routes, arrivals and ends, from the step's begin on. */
function timed(messages, devices, chunkBytes, on, memoryBandwidth) {
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
  return messages.map((message, i) => ({
    ...message,
    bytes: bytes[i],
    route: routes[i],
    arrive: arrive[i],
    end: end[i],
  }));
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
