"use strict";
// Scores: points in the plane. Their scores, weights and outputs come from the API.

const EDGE = 4.7;
const points = {
  query: [[2.2, 1.4], [-2.4, 0.6], [0.4, -2.6]],
  key: [[3, 2.6], [-3, 2.2], [-1.6, -2.4], [2.6, -1.8], [0.2, 3.4]],
};
const scoresView = new AttentionView(byId("scores-view"));
const plane = byId("plane");
let asked = 0, moved = null;

function settings() {
  return {
    score: byId("score").value,
    regime: byId("regime").value,
    temperature: 10 ** Number(byId("temperature").value),
    width: Number(byId("width").value),
    scaled: byId("scaled").checked,
    valid_len: Number(byId("valid").value),
    causal: byId("causal").checked,
  };
}

async function refresh() {
  const number = ++asked;
  const chosen = settings();
  byId("temperature-shown").textContent = chosen.temperature.toFixed(2);
  byId("width-shown").textContent = chosen.width.toFixed(2);
  byId("valid-shown").textContent = chosen.valid_len;
  byId("width-label").hidden = chosen.score !== "gaussian";
  try {
    const found = await ask("/api/attend", { ...points, ...chosen });
    if (number !== asked) return; // something newer is under way
    byId("scores-error").textContent = "";
    drawPlane(found, chosen);
    const names = (count, letter) => Array.from({ length: count }, (_, i) => letter + (i + 1));
    const view = scoresView.at.view;
    drawNumbers(found);
    scoresView.show(ofRows(found.weights, names(points.query.length, "q"),
      names(points.key.length, "k")));
    scoresView.choose(view);
  } catch (error) {
    if (number === asked) byId("scores-error").textContent = error.message;
  }
}
const refreshSoon = soon(30, refresh);

function drawNumbers(found) {
  const line = (cells, tag) => make("tr", {}, ...cells.map(
    (text, i) => make(i ? tag : "th", i ? (tag === "th" ? { scope: "col", text } : { text }) :
      { scope: tag === "th" ? "col" : "row", text })));
  const keys = points.key.map((_, k) => `k${k + 1}`);
  byId("numbers").replaceChildren(
    make("caption", { class: "hint", text: "Scores a(q, k), and the outputs" }),
    make("thead", {}, line(["", ...keys, "output"], "th")),
    make("tbody", {}, ...found.scores.map((row, q) => line(
      [`q${q + 1}`, ...row.map((score) => score.toFixed(2)),
        found.output[q].map((x) => x.toFixed(2)).join(", ")], "td"))));
}

// The plane --------------------------------------------------------------------------------------

function shape(tag, attributes, parent) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent.append(made);
  return made;
}

function drawPlane(found, chosen) {
  const focused = document.activeElement && document.activeElement.dataset
    ? document.activeElement.dataset.point : null;
  plane.replaceChildren();
  shape("line", { x1: -5, x2: 5, y1: 0, y2: 0, class: "axis" }, plane);
  shape("line", { y1: -5, y2: 5, x1: 0, x2: 0, class: "axis" }, plane);
  if (found.hull.length) {
    const corners = found.hull.map(([x, y]) => `${x},${-y}`).join(" ");
    shape("polygon", { points: corners, class: "hull" }, plane);
  }
  found.weights.forEach((row, q) => row.forEach((weight, k) => {
    if (weight < 0.02) return;
    const [x1, y1] = points.query[q], [x2, y2] = points.key[k];
    const share = Math.min(weight, 1);
    shape("line", { x1, y1: -y1, x2, y2: -y2, class: "look", "stroke-width": 0.02 + 0.1 * share,
      "stroke-opacity": (0.15 + 0.6 * share).toFixed(3) }, plane);
  }));
  found.output.forEach(([x, y], q) => {
    const cross = shape("g", { transform: `translate(${x} ${-y})`, class: "output" }, plane);
    shape("line", { x1: -0.16, y1: -0.16, x2: 0.16, y2: 0.16 }, cross);
    shape("line", { x1: -0.16, y1: 0.16, x2: 0.16, y2: -0.16 }, cross);
    label(x, y, `out ${q + 1}`, true);
  });
  const far = found.output.flatMap(([x, y], q) => (
    Math.max(Math.abs(x), Math.abs(y)) > 5 ? [q + 1] : []));
  byId("plane-outside").textContent = far.length
    ? `Outside of the picture: out ${far.join(", out ")}; the table has them.` : "";
  for (const kind of ["key", "query"]) {
    points[kind].forEach(([x, y], i) => {
      const off = kind === "key" && i >= chosen.valid_len;
      const name = `${kind} ${i + 1}`;
      const group = shape("g", { transform: `translate(${x} ${-y})`, tabindex: "0", role: "button",
        "aria-label": `${name} at ${x.toFixed(1)}, ${y.toFixed(1)}. Arrow keys move it.`,
        "data-point": name }, plane);
      shape("circle", { r: 0.38, class: "ring" }, group);
      if (kind === "key") shape("circle", { r: 0.2, class: off ? "key off" : "key" }, group);
      else shape("rect", { x: -0.2, y: -0.2, width: 0.4, height: 0.4, class: "query" }, group);
      label(x, y, `${kind[0]}${i + 1}`);
      if (name === focused) group.focus();
    });
  }
}

// Points are named above and to the right, outputs below and to the left: they may meet.
function label(x, y, text, output) {
  const place = output ? { x: x - 0.24, y: -y + 0.42, "text-anchor": "end" }
    : { x: x + 0.26, y: -y - 0.22 };
  shape("text", place, plane).textContent = text;
}

function place(name, x, y) {
  const [kind, number] = name.split(" ");
  const inside = (value) => Math.min(Math.max(value, -EDGE), EDGE);
  points[kind][Number(number) - 1] = [inside(x), inside(y)];
  byId("plane-said").textContent =
    `${name}: ${inside(x).toFixed(1)}, ${inside(y).toFixed(1)}`;
  refreshSoon();
}

plane.addEventListener("pointerdown", (event) => {
  const group = event.target.closest("[data-point]");
  if (!group) return;
  moved = group.dataset.point;
  plane.setPointerCapture(event.pointerId);
});
plane.addEventListener("pointermove", (event) => {
  if (!moved) return;
  const box = plane.getBoundingClientRect();
  place(moved, ((event.clientX - box.left) / box.width) * 10 - 5,
    5 - ((event.clientY - box.top) / box.height) * 10);
});
for (const kind of ["pointerup", "pointercancel"]) {
  plane.addEventListener(kind, () => { moved = null; });
}
plane.addEventListener("keydown", (event) => {
  const step = MOVES[event.key];
  const group = event.target.closest("[data-point]");
  if (!step || !group) return;
  event.preventDefault();
  const [kind, number] = group.dataset.point.split(" ");
  const [x, y] = points[kind][Number(number) - 1];
  place(group.dataset.point, x + 0.2 * step[1], y - 0.2 * step[0]);
});

// Why 1/sqrt d -----------------------------------------------------------------------------------

// Inputs only: numbers that look random and are always the same.
function noise(seed) {
  let state = seed;
  const uniform = () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return (state + 0.5) / 4294967296;
  };
  return () => Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform());
}

let askedBars = 0;
async function refreshBars() {
  const number = ++askedBars;
  const d = 2 ** Number(byId("d").value);
  byId("d-shown").textContent = d;
  const next = noise(7);
  const vector = () => Array.from({ length: d }, next);
  const query = [vector()], key = Array.from({ length: 8 }, vector);
  try {
    for (const [id, scaled] of [["bars-scaled", true], ["bars-plain", false]]) {
      const found = await ask("/api/attend", { query, key, score: "dot", scaled });
      if (number !== askedBars) return;
      drawBars(byId(id), found.weights[0]);
    }
  } catch (error) {
    byId("scores-error").textContent = error.message;
  }
}

function drawBars(box, weights) {
  box.setAttribute("aria-label",
    "Weights of eight keys: " + weights.map((weight) => weight.toFixed(2)).join(", "));
  box.replaceChildren(...weights.map((weight) => {
    const bar = make("div", {}, make("span", { text: weight.toFixed(2) }));
    bar.style.height = 120 * weight + "px";
    return bar;
  }));
}

for (const id of ["score", "regime", "temperature", "width", "scaled", "valid", "causal"]) {
  byId(id).addEventListener("input", refreshSoon);
}
byId("d").addEventListener("input", soon(30, refreshBars));
byId("tab-scores").addEventListener("click", () => { refresh(); refreshBars(); }, { once: true });
byId("tab-scores").addEventListener("focus", () => { refresh(); refreshBars(); }, { once: true });
