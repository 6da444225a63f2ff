// Drives docs/step-by-step.html as a reader does, and writes what it then shows into #report.
"use strict";

const errors = [];
window.addEventListener("error", ({ message }) => errors.push(message));
console.error = console.warn = (...words) => errors.push(words.join(" "));

// Without a window the browser draws hardly any frame.
window.requestAnimationFrame = (call) => setTimeout(() => call(performance.now()), 16);

const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const words = (selector, within = document) => all(selector, within).map((e) => e.textContent);
const control = (name) => document.querySelector(`#settings [name=${name}]`);
const frames = () => new Promise(requestAnimationFrame);

/** Whether two elements cover each other in part. */
function overlap(one, other) {
  const [a, b] = [one, other].map((element) => element.getBoundingClientRect());
  return a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
}

/** What the page shows. */
function shown() {
  return {
    now,
    panels: all("figure").map((figure) => ({
      name: figure.querySelector("figcaption").firstChild.textContent,
      words: words(".words", figure)[0],
      badge: words(".badge", figure)[0],
      have: all(".cells > g", figure).map((cell) => Number(cell.dataset.have)),
      whole: all(".cells > g.complete", figure).length,
      glowing: all(".glow", figure).length,
      times: words(".times", figure),
      messages: words(".message", figure).sort(),
      wires: all(".wire", figure).length,
      covered: all(".device > text", figure).filter((number) =>
        all(".message", figure).some((message) => overlap(number, message)),
      ).length,
      adding: all(".device.adding > text", figure).map((e) => Number(e.textContent)),
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

function click(id) {
  document.getElementById(id).click();
  return shown();
}

function scrub(value) {
  const slider = document.getElementById("scrub");
  slider.value = value;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  slider.dispatchEvent(new Event("change", { bubbles: true }));
  return shown();
}

/** Open a link to the page with this hash. */
async function follow(hash) {
  const changed = new Promise((done) =>
    window.addEventListener("hashchange", done, { once: true }),
  );
  if (location.hash.slice(1) === hash) return;
  location.hash = hash;
  await changed;
}

const form = () => Object.fromEntries(all("#settings [name]").map((e) => [e.name, e.value]));

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

async function drive({ stepped, scrubbed, charts }) {
  const report = { started: { ...shown(), form: form(), hash: location.hash } };
  report.stepped = stepped.map(steps);
  report.scrubbed = scrubbed.map(([values, positions]) => {
    choose(values);
    return [values, positions.map(scrub)];
  });
  report.charts = charts.map(chart);

  await follow("devices=4");
  report.buttons = ["next", "next", "previous", "end", "begin"].map(click);
  const play = document.getElementById("play");
  const label = play.textContent;
  click("play");
  while (play.textContent !== label) await frames();
  report.played = shown();

  await follow("");
  const texts = {
    topology: "ethernet",
    devices: "6",
    algorithm: "tree",
    with: "star",
    bytes: "64K",
    latency2: "7",
    bandwidth: "3.5",
    memory: "20",
  };
  choose(texts);
  scrub(400);
  report.chosen = { form: form(), shown: shown(), hash: location.hash };
  report.late = scrub(990);
  scrub(400);
  await follow("");
  report.usual = { form: form(), shown: shown(), hash: location.hash };
  await follow(report.chosen.hash.slice(1));
  report.again = { form: form(), shown: shown(), hash: location.hash };
  await follow(
    "algorithm=host&with=%E0&devices=99&bytes=-1&topology=bus&latency=x&bandwidth=0&t=-5&lang=toString&theme=1&other=2",
  );
  report.bad = { form: form(), shown: shown() };
  await follow("topology=nvlink&devices=12&t=1e8");
  report.beyond = { form: form(), shown: shown() };
  choose({ topology: "full" });
  report.invalid = ["1M", "many", "2M"].map((bytes) => {
    choose({ bytes });
    return [
      control("bytes").getAttribute("aria-invalid"),
      words("#table-title")[0],
      control("bytes").value,
      words("#wrong")[0],
    ];
  });
  control("bytes").value = "2M";
  choose({ devices: "32" });
  report.many = words("#wrong")[0];
  choose({ topology: "nvlink", devices: "" });
  report.empty = words("#wrong")[0];

  await follow("lang=en&topology=pcie&with=tree&devices=6&algorithm=halving-doubling&t=20");
  report.text = TEXT;
  report.english = { lang: document.documentElement.lang, title: document.title };
  click("language");
  document.querySelector("details").open = true;
  const attributes = all("[aria-label], [placeholder]").map(
    (e) => e.getAttribute("aria-label") || e.placeholder,
  );
  report.chinese = {
    lang: document.documentElement.lang,
    title: document.title,
    now,
    words: [document.body.innerText, ...attributes, ...all("option").map((e) => e.textContent)],
  };
  return report;
}

/** Write the report once the page is there. */
window.addEventListener("load", async () => {
  const told = JSON.parse(document.getElementById("told").textContent);
  let report;
  try {
    report = await drive(told);
  } catch (error) {
    report = { failed: String(error.stack) };
  }
  const element = document.createElement("pre");
  element.id = "report";
  element.textContent = JSON.stringify({ ...report, errors });
  document.body.append(element);
});
