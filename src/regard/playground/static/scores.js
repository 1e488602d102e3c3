"use strict";
// Scores: points in the plane. Their scores, weights and outputs come from the API, as does the
// background, which says for every place which key would win there.

const EDGE = 4.7;
const points = {
  query: [[2.2, 1.4], [-2.4, 0.6], [0.4, -2.6]],
  key: [[3, 2.6], [-3, 2.2], [-1.6, -2.4], [2.6, -1.8], [0.2, 3.4]],
};
const SCORES = {
  dot: "Dot product: a(q, k) = q·k/√d. Long keys in the query's direction win, however far they are.",
  gaussian: "Gaussian: a(q, k) = −|q−k|²/2w². The nearest key wins; the width w says how far is far.",
  bilinear: "Bilinear: a(q, k) = qᵀMk. A dot product after a learned turn M; here M is random.",
  additive: "Additive (Bahdanau): a(q, k) = wᵀtanh(W₁q + W₂k). A small network; here it is random.",
};
const CONVEX = "the convex hull of the keys. The weights are not negative and sum to 1, so that no " +
  "output can leave it.";
const REGIMES = {
  softmax: ["Softmax: every key gets some weight; all sum to 1.", CONVEX],
  sparsemax: ["Sparsemax: sums to 1, and keys with low scores get exactly 0.", CONVEX],
  kernel: ["Kernel: f(a)/Σf(a) with f = max(0, 1 + a). Sums to 1, as in Nadaraya–Watson.", CONVEX],
  cone: ["Cone: f(a) itself, which is not negative, and no sum is enforced.",
    "the cone of the keys. The weights are not negative but may sum to anything, so that outputs may " +
    "lie outside of the hull of the keys."],
  hard: ["Hard: the key with the highest score gets 1: a look-up in a database.",
    "the convex hull of the keys. The output is always one of the keys."],
  uniform: ["Uniform: the same weight for each key, whatever the scores: average pooling.",
    "the convex hull of the keys. The output is its keys' mean, wherever the query is."],
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
  byId("scaled").disabled = chosen.score !== "dot";
  byId("score-said").textContent = SCORES[chosen.score];
  const [regime, outline] = REGIMES[chosen.regime];
  byId("regime-said").textContent = regime;
  byId("hull-said").textContent = outline;
  try {
    const found = await ask("/api/attend", { ...points, ...chosen, map: true });
    if (number !== asked) return; // something newer is under way
    byId("scores-error").textContent = "";
    drawPlane(found, chosen);
    const names = (count, letter) => Array.from({ length: count }, (_, i) => letter + (i + 1));
    const view = scoresView.at.view;
    drawNumbers(found);
    const map = ofRows(found.weights, names(points.query.length, "q"),
      names(points.key.length, "k"));
    scoresView.show({ ...map, top: Math.max(map.top, 1) });
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
    make("caption", { class: "hint", text: "Scores a(q, k), and the output of each query" }),
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
  drawWinners(found.map);
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
      if (kind === "key") shape("circle", { r: 0.2, class: `key key-${i}${off ? " off" : ""}` }, group);
      else shape("rect", { x: -0.2, y: -0.2, width: 0.4, height: 0.4, class: "query" }, group);
      label(x, y, `${kind[0]}${i + 1}`);
      if (name === focused) group.focus();
    });
  }
}

// The background: the color of the winning key, the stronger the larger its weight.
function drawWinners({ size, winner, share }) {
  const canvas = byId("winners"), pen = canvas.getContext("2d");
  canvas.width = canvas.height = size;
  const style = getComputedStyle(document.documentElement);
  const colors = points.key.map((_, k) => style.getPropertyValue(`--key-${k}`).trim().slice(1)
    .match(/../g).map((pair) => parseInt(pair, 16)));
  const [of, strength] = [winner, share].map((data) => atob(data));
  const image = pen.createImageData(size, size);
  for (let i = 0; i < of.length; i++) {
    const color = colors[of.charCodeAt(i)] ?? [0, 0, 0]; // a tie stays clear
    image.data.set(color, 4 * i);
    image.data[4 * i + 3] = of.charCodeAt(i) < colors.length ? 0.42 * strength.charCodeAt(i) : 0;
  }
  pen.putImageData(image, 0, 0);
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
window.addEventListener("themechange", () => { if (!byId("scores").hidden) refreshSoon(); });
for (const kind of ["click", "focus"]) {
  byId("tab-scores").addEventListener(kind, () => { refresh(); refreshBars(); }, { once: true });
}
