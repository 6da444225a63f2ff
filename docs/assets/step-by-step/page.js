// docs/step-by-step.html: timelines that tools/simulator.py has computed are played.
// timelines.js has them, words.js all words in both languages. What is drawn at a moment depends on
// that moment and the settings only.
"use strict";

/** The links of a topology for some devices, and the routes over them. */
function machineOf(topology, devices) {
  const machine = TIMELINES.topologies[topology][devices];
  const links = machine.links.map((text) => {
    const [name, bandwidth] = text.split(": ");
    return { name, bandwidth: Number(bandwidth) };
  });
  const numbers = (word) => (word.match(/../g) || []).map((digits) => parseInt(digits, 36));
  return { ...machine, links, routes: machine.routes.map((row) => row.split(" ").map(numbers)) };
}

/** The messages of a step, from its line of the plan and its line of the timeline. */
function messagesOf(line, times, begin, routes) {
  const ends = times.split(" ").map(Number);
  return line.split(" ").map((word, i) => {
    const [src, dst] = [parseInt(word[0], 36), parseInt(word[1], 36)];
    const chunks = [...word.slice(3)].map((digit) => parseInt(digit, 36));
    const end = begin + (ends.length > 1 ? ends[i] : ends[0]) * 1e-6;
    return { src, dst, adds: word[2] === "+", chunks, route: routes[src][dst], begin, end };
  });
}

/** The timeline of an algorithm with the settings: the begin and end of every message by step. */
function runOf(algorithm, on) {
  const { devices, bytes } = settings;
  const plan = TIMELINES.algorithms[algorithm].plans[devices];
  let [now, times] = [0, ""];
  const steps = on.steps[algorithm][TIMELINES.played.indexOf(bytes)].map((line, i) => {
    const begin = now;
    times = line || times; // nothing: as in the step before
    const messages = messagesOf(plan.steps[i], times, begin, on.routes);
    now = Math.max(...messages.map(({ end }) => end));
    return { begin, end: now, messages };
  });
  return { algorithm, on, seconds: now, steps, devices: Number(devices), chunks: plan.chunks };
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

const AT_ONCE = 1e-9; // of a time: what differs by less is the same
const SIZES = TIMELINES.chart;

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

/* ---- Words ---- */

/** The text of this name in the reader's language, with values in place of {0}, {1}, ... */
function say(name, ...values) {
  return TEXT[settings.lang][name].replace(/\{(\d)\}/g, (_, i) => values[i]);
}

/** 0 to 3 and 7 as "0–3, 7". */
function numbers(sorted) {
  const starts = sorted.filter((n, i) => n - 1 !== sorted[i - 1]);
  const ends = sorted.filter((n, i) => n + 1 !== sorted[i + 1]);
  return starts.map((n, i) => (n === ends[i] ? n : `${n}–${ends[i]}`)).join(", ");
}

/** Seconds in the unit that suits ``largest``, with three digits of it: "12.3 us". */
function duration(seconds, largest = seconds, unit = true) {
  const units = { s: 1, ms: 1e-3, us: 1e-6 };
  const name = Object.keys(units).find((unit) => largest >= 0.9995 * units[unit]) || "us";
  const size = units[name];
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.max(largest / size, 1e-3)) + 1e-9));
  return (seconds / size).toFixed(digits) + (unit ? ` ${name}` : "");
}

/** A number of bytes as in the settings: 4K, 1.5M. */
function size(bytes) {
  const power = Math.max(0, Math.min(3, Math.floor(Math.log2(bytes) / 10 + 1e-9)));
  return Number((bytes / 1024 ** power).toPrecision(3)) + ["", "K", "M", "G"][power];
}

/** A step's number and times. */
function stepTitle(run, step) {
  if (step === run.steps.length) return say("finished", duration(run.seconds));
  const { begin, end } = run.steps[step];
  const times = [duration(begin, run.seconds, false), duration(end, run.seconds)];
  return say("step", step + 1, run.steps.length, ...times);
}

/** What happens in a step, in a few sentences. */
function stepInWords(run, step) {
  const sentences = [stepTitle(run, step)];
  if (step === run.steps.length) return sentences[0];
  const { messages } = run.steps[step];
  const told = messages.slice(0, messages.length > 4 ? 3 : 4);
  for (const { src, dst, adds, chunks } of told) {
    const sent = say(chunks.length > 1 ? "chunks" : "chunk", numbers(chunks));
    sentences.push(say(adds ? "adds" : "copies", src, sent, dst));
  }
  if (told.length < messages.length) sentences.push(say("more", messages.length - told.length));
  const shared = [...usersOf(messages)].filter(([, users]) => users.length > 1);
  shared.sort((a, b) => b[1].length - a[1].length);
  if (shared.length) {
    const [link, users] = shared[0];
    sentences.push(say("sharing", linkInWords(run.on.links[link].name), users.length));
  }
  if (shared.length > 1) sentences.push(say("allShared", shared.length));
  const values = run.before[step];
  const whole = values.filter((bits) => count(bits) === run.devices);
  sentences.push(say("complete", whole.length, values.length));
  return sentences.join(say("space"));
}

function linkInWords(name) {
  const [, kind, number, way, src, dst] = name.match(LINK_NAME);
  if (src) return say("between", src, dst);
  return say(way === "out" ? "from" : "to", say(kind === "switch" ? switchWord() : kind, number));
}

const LINK_NAME = /(?:(device|switch) (\d+) (out|in))|(\d+)-(\d+)/;
const switchWord = () => (settings.topology === "ethernet" ? "host" : "switch");

/** The messages on each link, by the link's number. */
function usersOf(messages) {
  const users = new Map();
  for (const message of messages) {
    for (const link of message.route) users.set(link, [...(users.get(link) || []), message]);
  }
  return users;
}

/* ---- Settings: texts by name, as in the form and in the link's hash ---- */

const LANGUAGE = (navigator.language || "").startsWith("zh") ? "zh" : "en";
const ALGORITHMS = Object.keys(TIMELINES.algorithms);

/** A number as a text without the rounding of its unit. */
const short = (number) => String(Number(number.toPrecision(9)));

function defaults() {
  const chosen = { algorithm: "ring", with: "", devices: "8", bytes: "1M", topology: "full" };
  return { ...chosen, t: "0", lang: LANGUAGE, theme: "" };
}

/** What a setting can be, on a topology. */
function choices(topology) {
  return {
    algorithm: ALGORITHMS,
    with: ["", ...ALGORITHMS],
    devices: Object.keys(TIMELINES.topologies[topology]),
    bytes: TIMELINES.played,
    topology: Object.keys(TIMELINES.topologies),
    lang: Object.keys(TEXT),
    theme: ["", "light", "dark"],
  };
}

/** Settings from some texts; what is missing or not valid is the default. */
function complete(texts) {
  const chosen = defaults();
  const known = (name) => choices(chosen.topology)[name].includes(texts[name]);
  for (const name of ["topology", ...Object.keys(chosen)]) {
    if (name === "t" ? /^[\d.e-]+$/.test(texts.t) && texts.t >= 0 : known(name)) {
      chosen[name] = texts[name];
    }
  }
  return chosen;
}

const readHash = () => complete(Object.fromEntries(new URLSearchParams(location.hash.slice(1))));

/** Keep the settings that are not the default in the page's link. */
function writeHash() {
  const usual = defaults();
  const texts = Object.entries({ ...settings, t: short(now * 1e6) });
  const hash = new URLSearchParams(texts.filter(([name, text]) => text !== usual[name])).toString();
  history.replaceState(null, "", location.href.split("#")[0] + (hash ? `#${hash}` : ""));
}

/* ---- The picture of one algorithm: places, and what is where at a moment ---- */

/** Each device's switch, from the routes: all on switch 0 where no route passes others. */
function switchesOf({ links, routes }) {
  const switches = routes.map(() => undefined);
  const named = (route) => route.map((link) => links[link].name);
  const pairs = routes.flatMap((row, src) => row.map((route, dst) => [src, dst, named(route)]));
  for (const [src, dst, names] of pairs) {
    const passed = names.join().match(/switch (\d+) out,switch (\d+) in/);
    if (passed) [switches[src], switches[dst]] = passed.slice(1).map(Number);
  }
  for (const [src, dst, names] of pairs) {
    const together = names.length === 2 && names[0].startsWith("device");
    if (together && switches[src] === undefined) switches[src] = switches[dst];
  }
  return switches.map((number) => number || 0);
}

/** Where everything is on a sheet of this width, in pixels: boxes, switches and the links that the
 * algorithm uses. */
function placesOf({ devices, chunks, on, steps }, width) {
  const switches = switchesOf(on);
  const groups = Math.max(...switches) + 1;
  const half = groups > 1 ? switches.filter((s) => s < groups / 2).length : 0; // on the left
  const around = half ? 2 * Math.max(half, devices - half) : devices; // if the circle were full
  const box = boxOf(chunks, width, around);
  // On a phone: space for an arrow, or for the switches, between the boxes.
  const gap = width < 420 ? (half ? 34 : 24) : 12;
  const least = box.height + (box.height + gap) / Math.sin(Math.PI / Math.max(around, 3));
  const height = Math.max(Math.min(0.62 * width, 150 + 45 * around, 480), least);
  const middle = { x: width / 2, y: height / 2 };
  const boxes = switches.map((_, i) => {
    // Clockwise from the top; with several switches, both sides from the top down.
    let turn = (2 * (i - 0.5)) / devices;
    if (half) turn = i < half ? -(i + 0.5) / half : (i - half + 0.5) / (devices - half);
    const x = middle.x + (middle.x - box.width / 2 - 4) * Math.sin(Math.PI * turn);
    const y = middle.y - (middle.y - box.height / 2 - 4) * Math.cos(Math.PI * turn);
    return { x, y, half: [box.width / 2, box.height / 2] };
  });
  const nodes = nodesOf(boxes, switches, groups, middle);
  const ends = (name) => {
    const [, kind, number, way, src, dst] = name.match(LINK_NAME);
    if (src) return [boxes[src], boxes[dst]];
    const hub = nodes[nodes.length - 1];
    const inner = kind === "device" ? nodes[switches[number]] : hub;
    const outer = kind === "device" ? boxes[number] : nodes[number];
    return way === "out" ? [outer, inner] : [inner, outer];
  };
  const used = new Set(steps.flatMap(({ messages }) => messages.flatMap(({ route }) => route)));
  const links = on.links.map(({ name }, i) => used.has(i) && ends(name));
  return { width, height, box, boxes, nodes, links };
}

/** The switches, each between its devices and the middle, and what connects them. */
function nodesOf(boxes, switches, groups, middle) {
  const node = ({ x, y }, text) => ({ x, y, text, half: [7 + textWidth(text) / 2, 11] });
  if (groups === 1) return [node(middle, say("onlySwitch"))];
  const nodes = Array.from({ length: groups }, (_, s) => {
    const mine = boxes.filter((_, i) => switches[i] === s);
    const mean = (axis) => mine.reduce((sum, place) => sum + place[axis] / mine.length, 0);
    const between = (axis) => middle[axis] + 0.8 * (mean(axis) - middle[axis]);
    return node({ x: between("x"), y: between("y") }, say(switchWord(), s));
  });
  return [...nodes, node(middle, say(switchWord() === "host" ? "network" : "cpus"))];
}

/** About the pixels that a text in a picture takes. */
const textWidth = (text) => [...text].reduce((sum, c) => sum + (c > "\u2e80" ? 11 : 6.2), 0);

/** A device's box and its cells: in one row if there is space, in several if not. */
function boxOf(chunks, width, around) {
  const side = Math.sin(Math.PI / Math.max(around, 3));
  const most = Math.min((0.68 * side * width) / (1 + 0.68 * side), 0.3 * width, 210) - 8;
  const least = [11, 8, 6].find((pixels) => chunks * pixels <= 3 * most) || 5;
  const rows = Math.ceil((chunks * least) / most);
  const columns = Math.ceil(chunks / rows);
  const cell = {
    width: Math.min(most / columns, chunks > 1 ? 24 : 48),
    height: [24, 16, 12][Math.min(rows, 3) - 1],
  };
  return { columns, cell, width: columns * cell.width + 8, height: rows * (cell.height + 2) + 20 };
}

/** A link as a line from border to border, ``aside`` pixels to the right of its direction.
 *
 * It is the way of the middle of a label that is as large as ``more``, half of its sides, and stays
 * off both ends: if there is too little space, half way between them.
 */
function line([from, to], aside, more = [0, 0]) {
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const length = Math.hypot(dx, dy) || 1;
  const inside = ({ half: [w, h] }) =>
    length * Math.min((w + more[0]) / Math.abs(dx), (h + more[1]) / Math.abs(dy));
  const at = (distance) => ({
    x: from.x + (dx * distance - dy * aside) / length,
    y: from.y + (dy * distance + dx * aside) / length,
  });
  const [begin, end] = [inside(from), length - inside(to)];
  return begin < end ? [at(begin), at(end)] : [at((begin + end) / 2), at((begin + end) / 2)];
}

/** The point at a part, 0 to 1, of the way along some lines. */
function along(lines, part) {
  const lengths = lines.map(([a, b]) => Math.hypot(b.x - a.x, b.y - a.y));
  let left = part * lengths.reduce((sum, length) => sum + length, 0);
  let i = 0;
  while (i < lines.length - 1 && left > lengths[i]) left -= lengths[i++];
  const [a, b] = lines[i];
  const rest = Math.min(left / (lengths[i] || 1), 1);
  return { x: a.x + (b.x - a.x) * rest, y: a.y + (b.y - a.y) * rest };
}

const LANE = 4; // pixels from the middle of a wire to each of its directions

/** The markup of an SVG element. */
function tag(name, attributes, inside = "") {
  const texts = Object.entries(attributes).map(([key, value]) => ` ${key}="${value}"`);
  return `<${name}${texts.join("")}>${inside}</${name}>`;
}

const textTag = (x, y, text, more = {}) =>
  tag("text", { x, y, "text-anchor": "middle", ...more }, text);

const lineTag = ([a, b], more) => tag("line", { x1: a.x, y1: a.y, x2: b.x, y2: b.y, ...more });

const points = (x1, y1, x2, y2) => [
  { x: x1, y: y1 },
  { x: x2, y: y2 },
];

const svgTag = (width, height, label, inside) =>
  tag("svg", { width, height, role: "img", "aria-label": label }, inside);

/** A rectangle and a text around a place. */
function labelTag({ x, y }, [w, h], text, classes) {
  const rect = tag("rect", { x: -w, y: -h, width: 2 * w, height: 2 * h, rx: 5 });
  const at = { class: classes, transform: `translate(${x},${y})` };
  return tag("g", at, rect + textTag(0, 4, text));
}

/** A cell: a frame, what it has, and a tick when it is complete. */
function cellTag(x, y, width, height) {
  const at = `translate(${width / 2},${height / 2})scale(${Math.min(1, width / 12)})`;
  const parts = [
    tag("title", {}),
    tag("rect", { class: "cell", width, height }),
    tag("rect", { class: "have", x: 1, width: width - 2 }),
    tag("path", { class: "tick", d: "M-4,0l3,3l5,-6", transform: at }),
  ];
  return tag("g", { transform: `translate(${x},${y})` }, parts.join(""));
}

/** Show that a cell has the values of ``have`` of K devices. */
function fillCell(cell, have, devices, title = "") {
  if (cell.dataset.have === String(have)) return;
  cell.dataset.have = have;
  cell.setAttribute("class", have === devices ? "complete" : "");
  const [name, frame, filled] = cell.children;
  const height = frame.getAttribute("height") - 2;
  filled.setAttribute("y", 1 + height * (1 - have / devices));
  filled.setAttribute("height", (height * have) / devices);
  name.textContent = title;
}

/** The way of a message around the ring of all devices; none if it is not to a neighbour. */
const wayOf = ({ src, dst }, devices) =>
  ({ 1: "next", [devices - 1]: "before" })[(dst - src + devices) % devices] || "";

/** Whether every device sends both ways in every step: each way then has a colour. */
function goesBothWays({ devices, steps }) {
  const sent = (messages, way) => messages.filter((m) => wayOf(m, devices) === way).length;
  const both = ({ messages }) =>
    messages.length === 2 * devices &&
    sent(messages, "next") === devices &&
    sent(messages, "before") === devices;
  return devices > 2 && steps.every(both);
}

/** Draw everything of a run that stays, and return what showPanel changes. */
function makePanel(run) {
  const figure = document.createElement("figure");
  figure.innerHTML =
    `<figcaption>${run.algorithm}<span class="badge"></span></figcaption>` +
    `<p class="about">${TIMELINES.algorithms[run.algorithm][settings.lang]}</p>` +
    `<div class="picture"></div><p class="words" aria-live="polite"></p>`;
  $("panels").append(figure);
  const picture = figure.querySelector(".picture");
  const places = placesOf(run, picture.clientWidth);
  const most = Math.max(...run.on.links.map(({ bandwidth }) => bandwidth));
  const wires = places.links.map((ends, i) => {
    const width = 0.4 + 1.5 * Math.sqrt(run.on.links[i].bandwidth / most);
    return ends ? lineTag(line(ends, LANE), { class: "wire", "stroke-width": width }) : "";
  });
  const direct = run.on.links.every(({ name }, i) => !places.links[i] || !/device/.test(name));
  const nodes = direct
    ? []
    : places.nodes.map((node) => labelTag(node, node.half, node.text, "node"));
  const layers = [
    ARROW,
    tag("g", { class: wires.length > 40 ? "many" : "" }, wires.join("")),
    tag("g", { class: "active" }),
    ...nodes,
    ...places.boxes.map((_, i) => deviceTag(run, places, i)),
    tag("g", { class: "moving" }),
  ];
  const label = say("picture", run.algorithm, run.devices);
  picture.innerHTML = svgTag(places.width, places.height, label, layers.join(""));
  const all = (selector) => [...figure.querySelectorAll(selector)];
  const find = (selector) => figure.querySelector(selector);
  const way = goesBothWays(run) ? (message) => wayOf(message, run.devices) : () => "";
  return { run, places, way, find, cells: all(".cells > g"), devices: all(".device") };
}

const ARROW = `<marker id="arrow" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto"
  markerUnits="userSpaceOnUse"><path d="M0,0.5L8,4L0,7.5z" fill="context-stroke"/></marker>`;

function deviceTag({ chunks }, { box, boxes }, i) {
  const { columns, cell, width, height } = box;
  const cells = Array.from({ length: chunks }, (_, c) => {
    const [row, column] = [Math.floor(c / columns), c % columns];
    const at = [4 + column * cell.width, 17 + row * (cell.height + 2)];
    return cellTag(...at, cell.width - 1, cell.height);
  });
  const at = `translate(${boxes[i].x - width / 2},${boxes[i].y - height / 2})`;
  const frame = tag("rect", { class: "box", width, height, rx: 5 });
  const inside = frame + textTag(width / 2, 13, i) + tag("g", { class: "cells" }, cells.join(""));
  return tag("g", { class: "device", transform: at }, inside);
}

/** Show a panel at a moment. */
function showPanel(panel, moment) {
  const { run, places, find } = panel;
  const step = stepAt(run, moment);
  const { messages } = run.steps[step] || { messages: [] };
  haveAt(run, step, moment).forEach((have, i) => {
    const [device, chunk] = [Math.floor(i / run.chunks), i % run.chunks];
    fillCell(panel.cells[i], have, run.devices, say("cell", device, chunk, have, run.devices));
  });
  const moving = messages.filter(({ end }) => moment < end);
  const users = usersOf(moving);
  const links = [...users].map(([link, { length }]) => [places.links[link], length]);
  const ways = [...users.values()].map(([message]) => panel.way(message));
  // Where many links have two messages each, they glow, but have no label.
  const labelled = links.filter(([, length]) => length > 1).length > 8 ? 3 : 2;
  find(".active").innerHTML = links.map((link, i) => activeTags(link, ways[i])).join("");
  find(".moving").innerHTML =
    moving.map((message) => messageTag(panel, message, step, moment, users)).join("") +
    links
      .filter(([, length]) => length >= labelled)
      .map(timesTag)
      .join("");
  if (panel.step === step) return;
  panel.step = step;
  find(".words").textContent = stepInWords(run, step);
  find(".badge").textContent = step === run.steps.length ? say("badge", duration(run.seconds)) : "";
}

/** Of how many devices each chunk has the values at a moment. */
function haveAt(run, step, moment) {
  const values = run.before[step].slice();
  const { messages } = run.steps[step] || { messages: [] };
  const arrived = messages.filter(({ end }) => end <= moment);
  for (const message of arrived) receive(values, run.before[step], message, run.chunks);
  return values.map(count);
}

/** The number of devices whose bits are set. */
function count(bits) {
  let number = 0;
  for (; bits; bits &= bits - 1) number += 1;
  return number;
}

/** A link that is used now: it glows if messages share it, and else has the colour of their way. */
function activeTags([ends, users], way) {
  const shown = line(ends, LANE);
  const used = { class: `used ${users > 1 ? "shared" : way}`, "marker-end": "url(#arrow)" };
  const glow = { class: "glow", "stroke-width": Math.min(6 + 2 * users, 20) };
  return (users > 1 ? lineTag(shown, glow) : "") + lineTag(shown, used);
}

/** Whether a link is between switches. They are close, so messages go beside them. */
const inner = (ends) => ends.every(({ text }) => text !== undefined);

/** How many messages share a link, beside its middle. */
function timesTag([ends, users]) {
  const { x, y } = along([line(ends, inner(ends) ? 40 : 30)], 0.5);
  return textTag(x, y + 4, `×${users}`, { class: "times" });
}

/** A message on its way; those that share a link follow one another, so that each can be seen. */
function messageTag({ run, places, way }, message, step, moment, users) {
  const text = (message.adds ? "+" : "=") + numbers(message.chunks);
  const half = 4 + 3.3 * text.length;
  const lines = message.route.map((link) => {
    const ends = places.links[link];
    return inner(ends) ? line(ends, LANE + 16) : line(ends, LANE + 6, [half + 1, 9]);
  });
  const length = lines.reduce((sum, [a, b]) => sum + Math.hypot(b.x - a.x, b.y - a.y), 0) || 1;
  const sharing = message.route.map((link) => users.get(link));
  const train = sharing.reduce((most, some) => (some.length > most.length ? some : most));
  const gap = Math.min((2 * half + 2) / length, 0.7 / train.length);
  const part = (moment - message.begin) / (message.end - message.begin);
  const behind = part * (1 + gap * (train.length - 1)) - gap * train.indexOf(message);
  const place = along(lines, Math.max(0, Math.min(1, behind)));
  const sent = run.before[step][message.src * run.chunks + message.chunks[0]];
  const kind = count(sent) === run.devices ? "message whole" : "message";
  return labelTag(place, [half, 8], text, `${kind} ${way(message)}`);
}

/** What the shapes in the pictures mean. */
function drawKey() {
  const [place, half] = [{ x: 15, y: 9 }, [12, 8]];
  const wire = points(2, 9, 28, 9);
  const shapes = {
    keyPart: cellTag(8, 0, 14, 18),
    keyWhole: cellTag(8, 0, 14, 18),
    keyAdds: labelTag(place, half, "+2", "message"),
    keyCopies: labelTag(place, half, "=2", "message whole"),
    keyShared:
      lineTag(wire, { class: "glow", "stroke-width": 12 }) +
      lineTag(wire, { class: "used shared" }),
  };
  if (panels.some(({ run }) => goesBothWays(run))) {
    const arrow = { "marker-end": "url(#arrow)" };
    shapes.keyNext = lineTag(wire, { class: "used next", ...arrow });
    shapes.keyBefore = lineTag(wire, { class: "used before", ...arrow });
  }
  const items = Object.entries(shapes).map(([name, shape]) => {
    const svg = tag("svg", { width: 30, height: 18, "aria-hidden": true }, shape);
    return `<li>${svg}<span>${say(name)}</span></li>`;
  });
  $("key").innerHTML = items.join("");
  [...$("key").querySelectorAll(".cell")].forEach((cell, i) =>
    fillCell(cell.parentNode, [3, 8][i], 8),
  );
}

/* ---- The chart and its table ---- */

function drawChart() {
  const on = machineOf(settings.topology, settings.devices);
  const times = on.seconds;
  const ranges = fastest(SIZES, times);
  const words = ranges.map(({ names, from, to }) =>
    say("range", names.join(" = "), size(from), size(to)),
  );
  $("fastest").textContent = say("fastest", words.join(say("semicolon")));
  const width = $("chart").clientWidth;
  const height = Math.max(300, Math.min(420, width * 0.5));
  const area = { left: 58, right: width - 146, top: 44, bottom: height - 40 };
  const logs = Object.values(times).flat().map(Math.log10);
  area.powers = [Math.min(...logs) - 0.1, Math.max(...logs) + 0.1];
  area.x = (bytes) => area.left + ((Math.log2(bytes) - 8) / 22) * (area.right - area.left);
  area.y = (seconds) => {
    const part = (Math.log10(seconds) - area.powers[0]) / (area.powers[1] - area.powers[0]);
    return area.bottom - part * (area.bottom - area.top);
  };
  const parts = [
    ...axes(area),
    ...ranges.map((range) => stripTags(area, range)),
    ...curves(area, times),
  ];
  const at = area.x(SIZES.find((bytes) => size(bytes) === settings.bytes));
  parts.push(lineTag(points(at, area.top - 10, at, area.bottom), { class: "at" }));
  const label = say("chart", $("fastest").textContent);
  $("chart").innerHTML = svgTag(width, height, label, parts.join(""));
  drawTable(on);
}

/** Grid lines and their labels. */
function axes({ left, right, top, bottom, powers, x, y }) {
  const grid = { class: "grid" };
  const muted = { class: "muted" };
  const parts = [textTag((left + right) / 2, bottom + 35, say("bytes"), muted)];
  for (let power = Math.ceil(powers[0]); power <= powers[1]; power++) {
    const at = y(10 ** power);
    parts.push(lineTag(points(left, at, right, at), grid));
    const label = duration(10 ** power).replace(/\.0+/, "");
    parts.push(textTag(left - 6, at + 4, label, { class: "muted", "text-anchor": "end" }));
  }
  for (let power = 10; power <= 30; power += right - left < 400 ? 10 : 5) {
    const at = x(2 ** power);
    parts.push(lineTag(points(at, top, at, bottom), grid));
    parts.push(textTag(at, bottom + 18, size(2 ** power), muted));
  }
  return parts;
}

/** The fastest algorithms of a range of sizes: a strip in the colour of the first, and names. */
function stripTags({ top, x }, { names, from, to }) {
  const width = x(to) - x(from);
  const style = colourOf(names[0]);
  const texts = [names.join(" = "), `${names[0]} = …`, names[0], ""];
  const label = texts.find((text) => textWidth(text) < width);
  const strip = tag("rect", { x: x(from), y: top - 18, width, height: 8, style, class: "strip" });
  return strip + textTag((x(from) + x(to)) / 2, top - 24, label);
}

/** A style sheet's --colour for an algorithm. */
const colourOf = (name) => `--colour: ${TIMELINES.algorithms[name].colour}`;

/** A line per algorithm in dashes where others coincide, and the names at their ends, moved apart. */
function curves({ right, bottom, x, y }, times) {
  const ends = ALGORITHMS.map((name) => ({ name, y: y(times[name][SIZES.length - 1]) }));
  ends.sort((a, b) => a.y - b.y);
  ends.forEach((end, i) => (end.at = Math.max(end.y, i ? ends[i - 1].at + 16 : 0)));
  let lowest = bottom;
  for (const end of [...ends].reverse()) {
    end.at = Math.min(end.at, lowest);
    lowest = end.at - 16;
  }
  const close = (name, other, j) => Math.abs(y(times[name][j]) - y(times[other][j])) < HIDES;
  return ALGORITHMS.map((name) => {
    const end = ends.find((one) => one.name === name);
    const leader = `M${right + 2},${end.y}L${right + 12},${end.at}h6`;
    const parts = [];
    let dashes = "";
    SIZES.forEach((bytes, j) => {
      const [here, next] = [[x(bytes), y(times[name][j])].map((n) => n.toFixed(1)), j + 1];
      if (parts.length) parts[parts.length - 1].points += ` ${here}`;
      if (next === SIZES.length) return;
      const same = ALGORITHMS.filter((other) => close(name, other, j) && close(name, other, next));
      const length = DASHES / same.length;
      const dashed = `${length} ${DASHES - length}`;
      const from = -same.indexOf(name) * length;
      if (parts.length && dashes === same.join()) return;
      dashes = same.join();
      const look = same.length > 1 ? { "stroke-dasharray": dashed, "stroke-dashoffset": from } : {};
      parts.push({ points: `${here}`, ...look });
    });
    const chosen = [settings.algorithm, settings.with].includes(name) ? "chosen" : "";
    const lines = parts.map((part) => tag("polyline", part)).join("") + tag("path", { d: leader });
    const text = textTag(right + 21, end.at + 4, name, { class: chosen, "text-anchor": "start" });
    return tag("g", { class: "curve", style: colourOf(name) }, lines + text);
  });
}

const HIDES = 1.5; // pixels between lines of which one would hide the other
const DASHES = 24; // pixels in which every one of several lines that coincide has a dash

function drawTable(on) {
  $("table-title").textContent = say("tableTitle", settings.bytes);
  const runs = ALGORITHMS.map((name) => runOf(name, on));
  const least = Math.min(...runs.map((run) => run.seconds));
  const heads = ["algorithm", "steps", "seconds", "relative"];
  const rows = runs.map(({ algorithm, steps, seconds }) => {
    const best = seconds <= least * (1 + AT_ONCE);
    const relative = best ? say("isFastest") : `${(seconds / least).toPrecision(3)} ×`;
    const cells = [steps.length, duration(seconds), relative].map((text) => `<td>${text}</td>`);
    const name = `<th scope="row">${algorithm}</th>`;
    return `<tr class="${best ? "fastest" : ""}">${name}${cells.join("")}</tr>`;
  });
  const head = heads.map((name) => `<th scope="col">${say(name)}</th>`).join("");
  $("table").innerHTML = `<thead><tr>${head}</tr></thead><tbody>${rows.join("")}</tbody>`;
}

/* ---- The page: settings, one clock for all panels, controls ---- */

const $ = (id) => document.getElementById(id);
const REDUCED = matchMedia("(prefers-reduced-motion: reduce)");
const PLAYED = { step: 1.4, least: 5, most: 24 }; // seconds: by the steps, and bounds

let settings = complete({});
let panels = [];
let now = 0; // seconds since the begin of the all-reduce
let playing = null; // when playing began, and at which moment

const longest = () => Math.max(...panels.map(({ run }) => run.seconds));

/** When a step begins in any panel, and the end. */
function marks() {
  const times = panels.flatMap(({ run }) => [...run.steps.map((step) => step.begin), run.seconds]);
  times.sort((a, b) => a - b);
  return times.filter((time, i) => i === 0 || time > times[i - 1] + AT_ONCE * longest());
}

/** Draw anew, with settings that have changed. */
function update(texts) {
  const translate = !panels.length || texts.lang !== settings.lang;
  settings = texts;
  if (translate) fillWords();
  fillForm();
  document.documentElement.dataset.theme = settings.theme;
  draw();
  const at = settings.t * 1e-6;
  stop();
  show(marks().find((mark) => Math.abs(mark - at) < 1e-5 * longest()) || Math.min(at, longest()));
}

/** Draw the panels and the chart for the width that there is. */
function draw() {
  const on = machineOf(settings.topology, settings.devices);
  const names = new Set([settings.algorithm, settings.with].filter((name) => name));
  $("panels").innerHTML = "";
  $("panels").className = names.size > 1 ? "two" : "one";
  const runs = [...names].map((name) => runOf(name, on));
  panels = runs.map((run) => makePanel({ ...run, before: valuesOf(run) }));
  drawKey();
  drawChart();
}

/** Write all words that do not depend on the settings, but for the language. */
function fillWords() {
  document.documentElement.lang = say("code");
  document.title = say("title");
  $("language").textContent = say("language");
  $("language").lang = settings.lang === "zh" ? "en" : "zh-CN";
  for (const element of document.querySelectorAll("[data-text]")) {
    element.textContent = say(element.dataset.text);
  }
  for (const element of document.querySelectorAll("[data-label]")) {
    element.setAttribute("aria-label", say(element.dataset.label));
    if (element.tagName === "BUTTON") element.title = say(element.dataset.label);
  }
}

function fillForm() {
  const words = { with: (name) => name || say("none"), topology: say };
  for (const select of $("settings").elements) {
    const texts = choices(settings.topology)[select.name];
    const word = words[select.name] || String;
    const options = texts.map((text) => `<option value="${text}">${word(text)}</option>`);
    select.innerHTML = options.join("");
    select.value = settings[select.name];
  }
}

/** Show all panels at a moment. */
function show(moment) {
  now = moment;
  const end = longest();
  for (const panel of panels) showPanel(panel, now);
  $("clock").textContent = say("clock", duration(now, end, false), duration(end));
  $("scrub").value = (1000 * now) / (end || 1);
  if (playing) return; // a screen reader need not follow
  const steps = panels.map(({ run }) => stepTitle(run, stepAt(run, now)));
  $("scrub").setAttribute("aria-valuetext", [$("clock").textContent, ...steps].join(" "));
}

/** Go to a moment, and keep it in the page's link. */
function go(moment) {
  stop();
  show(moment);
  writeHash();
}

/** Go to where the previous (-1) or the next (1) step begins. */
function goStep(direction) {
  const some = 1e-9 * longest();
  const ahead = marks().filter((time) => direction * (time - now) > some);
  go((direction > 0 ? ahead[0] : ahead.pop()) ?? now);
}

function play() {
  if (now >= longest()) show(0);
  playing = { since: performance.now(), from: now };
  showPlaying();
  requestAnimationFrame(frame);
}

function stop() {
  playing = null;
  showPlaying();
}

/** A screen reader reads the steps when they are not playing. */
function showPlaying() {
  $("play").textContent = say(playing ? "pause" : "play");
  const live = playing ? "off" : "polite";
  for (const { find } of panels) find(".words").setAttribute("aria-live", live);
}

const toggle = () => (playing ? go(now) : play());

function frame() {
  if (!playing) return;
  const times = marks();
  const seconds = Math.min(Math.max(PLAYED.step * times.length, PLAYED.least), PLAYED.most);
  const part = ((performance.now() - playing.since) / 1000 / seconds);
  const moment = playing.from + part * longest();
  if (moment >= longest()) {
    go(longest());
    return;
  }
  // Without motion: from the begin of a step to that of the next.
  show(REDUCED.matches ? times.filter((mark) => mark <= moment).pop() : moment);
  requestAnimationFrame(frame);
}

/** Take a value from the form. */
function changed({ target: { name, value } }) {
  update(complete({ ...settings, [name]: value, t: "0" }));
  writeHash();
}

function pressed(event) {
  // The slider keeps the focus after a drag; its own step, a thousandth, is none of the plan's.
  const busy = event.target.closest("input:not(#scrub), select, textarea, summary, a");
  const button = event.target.closest("button");
  if (busy || event.ctrlKey || event.altKey || event.metaKey || (button && event.key === " "))
    return;
  const actions = {
    " ": toggle,
    ArrowLeft: () => goStep(-1),
    ArrowRight: () => goStep(1),
    Home: () => go(0),
    End: () => go(longest()),
  };
  if (!(event.key in actions)) return;
  event.preventDefault();
  actions[event.key]();
}

function start() {
  $("settings").addEventListener("input", changed);
  $("settings").addEventListener("submit", (event) => event.preventDefault());
  $("language").addEventListener("click", () => {
    update({ ...settings, lang: settings.lang === "zh" ? "en" : "zh", t: short(now * 1e6) });
    writeHash();
  });
  $("play").addEventListener("click", toggle);
  $("begin").addEventListener("click", () => go(0));
  $("end").addEventListener("click", () => go(longest()));
  $("previous").addEventListener("click", () => goStep(-1));
  $("next").addEventListener("click", () => goStep(1));
  $("scrub").addEventListener("input", () => {
    stop();
    show(($("scrub").value / 1000) * longest());
  });
  $("scrub").addEventListener("change", writeHash);
  document.addEventListener("keydown", pressed);
  window.addEventListener("hashchange", () => update(readHash()));
  let width = innerWidth;
  window.addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar changes the height only
    width = innerWidth;
    const moment = now;
    draw();
    show(moment);
  });
  update(readHash());
}

start();
