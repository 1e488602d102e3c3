"use strict";
// Reads the map from the page's own JSON and draws it. Text is only ever set as textContent.

const data = JSON.parse(document.getElementById("data").textContent);
const [layers, heads, T, S] = data.shape;
const steps = new Uint16Array(
  Uint8Array.from(atob(data.weights), (letter) => letter.charCodeAt(0)).buffer);
const at = { layer: 0, head: 0, view: "heatmap", row: -1, column: -1 };
const byId = (id) => document.getElementById(id);
const LABELS = 120; // pixels for a row's label, at most
const MOST_LINES = 3000, MOST_ROWS = 400;

function weight(row, column) {
  const place = ((at.layer * heads + at.head) * T + row) * S + column;
  return data.low + (steps[place] / 65535) * (data.high - data.low);
}

function part(row, column) { // 0 to 1, for color
  return weight(row, column) <= 0 ? 0 : weight(row, column) / data.high;
}

// Color ------------------------------------------------------------------------------------------

const dark = () => document.documentElement.dataset.theme === "dark";
const RAMPS = {
  light: [[255, 255, 255], [186, 214, 235], [84, 158, 205], [21, 98, 161], [8, 48, 107]],
  dark: [[18, 21, 28], [58, 44, 84], [136, 60, 96], [217, 104, 66], [253, 222, 120]],
};

function color(share) {
  const ramp = RAMPS[dark() ? "dark" : "light"];
  const place = Math.min(Math.max(share, 0), 1) * (ramp.length - 1);
  const below = Math.min(Math.floor(place), ramp.length - 2);
  return ramp[below].map(
    (low, i) => Math.round(low + (place - below) * (ramp[below + 1][i] - low)));
}

// Heatmap ----------------------------------------------------------------------------------------

const canvas = byId("cells");
let box = { left: 0, top: 0, cell: 0 };

function drawHeatmap() {
  const room = byId("pad").clientWidth || 800;
  const pen = canvas.getContext("2d");
  const scale = window.devicePixelRatio || 1;
  pen.font = "13px system-ui, sans-serif";
  const widest = (labels) =>
    labels.reduce((most, label) => Math.max(most, pen.measureText(label).width), 0);
  const left = Math.min(widest(data.queries) + 12, LABELS);
  const top = Math.min(widest(data.keys) + 12, LABELS);
  const fitting = Math.floor((room - left - 4) / Math.max(S, 1));
  const cell = Math.max(Math.min(fitting, 34), S > 100 || T > 100 ? 3 : 12);
  box = { left, top, cell };
  const width = left + S * cell + 2, height = top + T * cell + 2;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  pen.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  pen.fillStyle = style.getPropertyValue("--back");
  pen.fillRect(0, 0, width, height);
  for (let row = 0; row < T; row++) {
    for (let column = 0; column < S; column++) {
      const share = part(row, column);
      if (share === 0) continue;
      const [red, green, blue] = color(share);
      pen.fillStyle = `rgb(${red},${green},${blue})`;
      pen.fillRect(left + column * cell, top + row * cell, cell, cell);
      if (cell >= 30) {
        const bright = 0.299 * red + 0.587 * green + 0.114 * blue > 140;
        pen.fillStyle = bright ? "#000" : "#fff";
        pen.font = "11px system-ui, sans-serif";
        pen.textAlign = "center";
        pen.textBaseline = "middle";
        pen.fillText(weight(row, column).toFixed(2).replace(/^0/, ""),
          left + (column + 0.5) * cell, top + (row + 0.5) * cell);
      }
    }
  }
  pen.strokeStyle = style.getPropertyValue("--edge");
  pen.strokeRect(left - 0.5, top - 0.5, S * cell + 1, T * cell + 1);
  drawLabels(pen, style);
  if (at.row >= 0) {
    pen.strokeStyle = style.getPropertyValue("--on");
    pen.lineWidth = 3;
    pen.strokeRect(left + at.column * cell, top + at.row * cell, cell, cell);
  }
}

function drawLabels(pen, style) {
  const { left, top, cell } = box;
  const every = Math.ceil(14 / cell);
  pen.font = "13px system-ui, sans-serif";
  pen.textBaseline = "middle";
  pen.fillStyle = style.getPropertyValue("--text");
  pen.textAlign = "right";
  for (let row = 0; row < T; row += every) {
    pen.fillText(clipped(pen, data.queries[row], left - 10), left - 6, top + (row + 0.5) * cell);
  }
  pen.textAlign = "left";
  for (let column = 0; column < S; column += every) {
    pen.save();
    pen.translate(left + (column + 0.5) * cell, top - 6);
    pen.rotate(-Math.PI / 2);
    pen.fillText(clipped(pen, data.keys[column], top - 10), 0, 0);
    pen.restore();
  }
}

function clipped(pen, label, room) {
  if (pen.measureText(label).width <= room) return label;
  let end = label.length;
  while (end > 0 && pen.measureText(label.slice(0, end) + "…").width > room) end--;
  return label.slice(0, end) + "…";
}

function say(row, column) {
  at.row = row;
  at.column = column;
  byId("said").textContent = row < 0 ? "" :
    `“${data.queries[row]}” looks at “${data.keys[column]}”: ${weight(row, column).toFixed(4)}`;
}

canvas.addEventListener("pointermove", (event) => {
  const column = Math.floor((event.offsetX - box.left) / box.cell);
  const row = Math.floor((event.offsetY - box.top) / box.cell);
  const inside = row >= 0 && row < T && column >= 0 && column < S;
  if (inside && (row !== at.row || column !== at.column)) {
    say(row, column);
    drawHeatmap();
  }
});

byId("pad").addEventListener("keydown", (event) => {
  const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const step = move[event.key];
  if (!step || T === 0 || S === 0) return;
  event.preventDefault();
  const bound = (number, count) => Math.min(Math.max(number, 0), count - 1);
  if (at.row < 0) say(0, 0);
  else say(bound(at.row + step[0], T), bound(at.column + step[1], S));
  drawHeatmap();
});

// Lines ------------------------------------------------------------------------------------------

const ROW = 28;

function drawLines() {
  const pairs = byId("pairs");
  pairs.replaceChildren();
  pairs.style.height = Math.max(T, S) * ROW + "px";
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("width", "100%");
  svg.setAttribute("height", "100%");
  svg.setAttribute("aria-hidden", "true");
  pairs.append(svg);
  const found = [];
  for (let row = 0; row < T; row++) {
    for (let column = 0; column < S; column++) {
      const share = part(row, column);
      if (share > 0.02) found.push([share, row, column]);
    }
  }
  found.sort((one, other) => other[0] - one[0]);
  for (const [share, row, column] of found.slice(0, MOST_LINES)) {
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    line.setAttribute("x1", "35%");
    line.setAttribute("x2", "65%");
    line.setAttribute("y1", (column + 0.5) * ROW);
    line.setAttribute("y2", (row + 0.5) * ROW);
    line.setAttribute("stroke-width", (0.5 + 3.5 * share).toFixed(2));
    line.setAttribute("stroke-opacity", (0.08 + 0.92 * share).toFixed(3));
    line.dataset.row = row;
    line.dataset.column = column;
    svg.append(line);
  }
  pairs.append(words("keys", data.keys), words("queries", data.queries));
}

function words(side, labels) {
  const list = document.createElement("ol");
  list.className = side;
  list.setAttribute("aria-label", side === "keys" ? "What is looked at" : "What looks");
  labels.forEach((label, index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = label === "" ? "∅" : label;
    for (const kind of ["pointerenter", "focus"]) {
      button.addEventListener(kind, () => highlight(side, index));
    }
    for (const kind of ["pointerleave", "blur"]) {
      button.addEventListener(kind, () => highlight(null, -1));
    }
    const item = document.createElement("li");
    item.append(button);
    list.append(item);
  });
  return list;
}

function highlight(side, index) {
  const near = new Set();
  for (const line of document.querySelectorAll("#pairs line")) {
    const own = side === "keys" ? line.dataset.column : line.dataset.row;
    const shown = side === null || Number(own) === index;
    line.style.display = shown ? "" : "none";
    if (shown) near.add(side === "keys" ? Number(line.dataset.row) : Number(line.dataset.column));
  }
  const other = side === "keys" ? "queries" : "keys";
  document.querySelectorAll(`#pairs ol.${other} button`).forEach((button, i) =>
    button.classList.toggle("far", side !== null && !near.has(i)));
  if (side === null) {
    document.querySelectorAll("#pairs button.far").forEach((b) => b.classList.remove("far"));
    byId("said").textContent = "";
    return;
  }
  const value = (i) => (side === "keys" ? weight(i, index) : weight(index, i));
  const most = [...near].sort((a, b) => value(b) - value(a)).slice(0, 4);
  const labels = side === "keys" ? data.queries : data.keys;
  byId("said").textContent =
    `“${data[side][index]}” ${side === "keys" ? "is looked at by" : "looks at"} ` +
    (most.map((i) => `“${labels[i]}” ${value(i).toFixed(2)}`).join(", ") || "nothing");
}

// Table ------------------------------------------------------------------------------------------

function drawTable() {
  const table = document.createElement("table");
  const caption = document.createElement("caption");
  caption.className = "hint";
  caption.textContent = T * S > MOST_ROWS * 100 ? "The first rows and columns." : "";
  table.append(caption);
  const columns = Math.min(S, 100);
  const head = table.createTHead().insertRow();
  const cell = (row, tag, text) => {
    const made = document.createElement(tag);
    made.textContent = text;
    row.append(made);
    return made;
  };
  cell(head, "td", "");
  for (let column = 0; column < columns; column++) {
    cell(head, "th", data.keys[column]).scope = "col";
  }
  const body = table.createTBody();
  for (let row = 0; row < Math.min(T, MOST_ROWS); row++) {
    const line = body.insertRow();
    cell(line, "th", data.queries[row]).scope = "row";
    for (let column = 0; column < columns; column++) {
      cell(line, "td", weight(row, column).toFixed(3));
    }
  }
  document.querySelector("#table .scroll").replaceChildren(table);
}

// The page ---------------------------------------------------------------------------------------

const DRAW = { heatmap: drawHeatmap, lines: drawLines, table: drawTable };

function show() {
  for (const name of Object.keys(DRAW)) byId(name).hidden = name !== at.view;
  for (const button of document.querySelectorAll("[data-view]")) {
    button.setAttribute("aria-pressed", String(button.dataset.view === at.view));
  }
  byId("layer").textContent = `Layer ${at.layer + 1} of ${layers}`;
  byId("head").textContent = `Head ${at.head + 1} of ${heads}`;
  DRAW[at.view]();
}

for (const button of document.querySelectorAll("[data-view]")) {
  button.addEventListener("click", () => { at.view = button.dataset.view; show(); });
}
for (const [group, name, count] of [["layers", "layer", layers], ["heads", "head", heads]]) {
  byId(group).hidden = count < 2;
  for (const button of byId(group).querySelectorAll("button")) {
    button.addEventListener("click", () => {
      at[name] = (at[name] + Number(button.dataset.step) + count) % count;
      if (at.row >= 0) say(at.row, at.column);
      show();
    });
  }
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = name === "dark" ? "Light" : "Dark";
  byId("theme").setAttribute("aria-label",
    name === "dark" ? "Change to the light theme" : "Change to the dark theme");
}
theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
byId("theme").addEventListener("click", () => { theme(dark() ? "light" : "dark"); show(); });
window.addEventListener("resize", () => { if (at.view === "heatmap") drawHeatmap(); });
show();
