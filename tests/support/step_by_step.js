// Drives docs/step-by-step.html as a reader does, and writes what it then shows into #report.
"use strict";

const errors = [];
window.addEventListener("error", ({ message }) => errors.push(message));
console.error = console.warn = (...words) => errors.push(words.join(" "));

const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const words = (selector, within = document) => all(selector, within).map((e) => e.textContent);
const control = (name) => document.querySelector(`#settings [name=${name}]`);

/** What the page shows. */
function shown() {
  return {
    now,
    panels: all("figure").map((figure) => ({
      name: figure.querySelector("figcaption").firstChild.textContent,
      words: words(".words", figure)[0],
      have: all(".cells > g", figure).map((cell) => Number(cell.dataset.have)),
      whole: all(".cells > g.complete", figure).length,
    })),
  };
}

/** Type or choose values in the form. */
function choose(values) {
  for (const [name, value] of Object.entries(values)) {
    control(name).value = value;
    control(name).dispatchEvent(new Event("input", { bubbles: true }));
  }
}

/** Press a key; whether the page has taken it. */
function press(key, target = document.body) {
  return !target.dispatchEvent(
    new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }),
  );
}

function scrub(value) {
  const slider = document.getElementById("scrub");
  slider.value = value;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  slider.dispatchEvent(new Event("change", { bubbles: true }));
  return shown();
}

/** Drag the slider, which leaves the focus on it, and press keys. */
function keysAfterADrag(values) {
  choose(values);
  document.getElementById("scrub").focus();
  scrub(400);
  return ["ArrowRight", "ArrowLeft", "ArrowLeft", "End", "Home"].map((key) => {
    const taken = press(key, document.activeElement);
    return { key, taken, now };
  });
}

/** Open a link to the page with this hash. */
function follow(hash) {
  history.replaceState(null, "", `#${hash}`);
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}

const form = () => Object.fromEntries(all("#settings [name]").map((e) => [e.name, e.value]));

/** What the page would play with some settings. */
function timeline(values) {
  choose(values);
  const { seconds, steps, on } = panels[0].run;
  const hops = steps.flatMap(({ messages }, step) =>
    messages.flatMap((m) =>
      m.chunks.map((chunk) => {
        const links = m.route.map((link) => on.links[link].name);
        return [step, m.src, m.dst, chunk, m.adds, links, m.begin, m.end];
      }),
    ),
  );
  return { seconds, hops };
}

/** Go through all steps forward with a key, and back. */
function steps(values) {
  choose(values);
  press("Home");
  const forward = [shown()];
  while (forward.length < 100 && press("ArrowRight") && now > forward[forward.length - 1].now)
    forward.push(shown());
  const back = [];
  while (back.length < 100 && now > 0 && press("ArrowLeft")) back.push(now);
  press("End");
  return { values, forward, back, end: shown() };
}

/** The chart's table and sentence. */
function chart(values) {
  choose(values);
  const rows = all("#table tbody tr").map((row) => [row.className, ...words("th, td", row)]);
  return {
    values,
    rows,
    sentence: words("#fastest")[0],
    strip: all("#chart rect").length,
    lines: all("#chart .curve").length,
  };
}

function drive({ timelines, stepped, charts }) {
  const report = { started: { ...shown(), form: form(), hash: location.hash } };
  report.timelines = timelines.map(timeline);
  report.stepped = stepped.map(steps);
  report.charts = charts.map(chart);
  report.dragged = keysAfterADrag(stepped[stepped.length - 1]);

  follow("");
  const texts = {
    topology: "ethernet",
    devices: "6",
    algorithm: "tree",
    with: "star",
    bytes: "4K",
  };
  choose(texts);
  scrub(400);
  report.chosen = { form: form(), shown: shown(), hash: location.hash };
  follow("");
  report.usual = { form: form(), shown: shown(), hash: location.hash };
  follow(report.chosen.hash.slice(1));
  report.again = { form: form(), shown: shown(), hash: location.hash };
  follow(
    "algorithm=host&with=%E0&devices=99&bytes=-1&topology=bus&t=-5&lang=toString&theme=1&other=2",
  );
  report.bad = { form: form(), shown: shown() };
  follow("topology=pcie&devices=12&t=1e8");
  report.beyond = { form: form(), shown: shown() };
  return report;
}

/** Write the report once the page is there. */
window.addEventListener("load", () => {
  const told = JSON.parse(document.getElementById("told").textContent);
  let report;
  try {
    report = drive(told);
  } catch (error) {
    report = { failed: String(error.stack) };
  }
  const element = document.createElement("pre");
  element.id = "report";
  element.textContent = JSON.stringify({ ...report, errors });
  document.body.append(element);
});
