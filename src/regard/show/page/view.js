"use strict";
// Draws an attention map into a page: as a heatmap, as lines between words, as a table.
// A map is {queries, keys, layers, heads, weight(layer, head, row, column), top}; top is the weight
// at the end of the color scale, and numbers below 0 have a second scale that ends at −top. Text is
// only set as textContent. The playground uses this file too.

const ROW = 28; // pixels of a word in the lines
const LABELS = 120; // at most so many pixels for a label in the heatmap
const MOST_LINES = 3000, MOST_ROWS = 400, MOST_COLUMNS = 100;
const SVG = "http://www.w3.org/2000/svg";
const RAMPS = {
  light: [[255, 255, 255], [186, 214, 235], [84, 158, 205], [21, 98, 161], [8, 48, 107]],
  dark: [[18, 21, 28], [58, 44, 84], [136, 60, 96], [217, 104, 66], [253, 222, 120]],
};
const RAMPS_OF_LESS = { // below 0
  light: [[255, 255, 255], [253, 219, 199], [244, 165, 130], [202, 73, 66], [103, 0, 31]],
  dark: [[18, 21, 28], [22, 52, 66], [24, 97, 112], [56, 158, 160], [150, 232, 214]],
};
const MOVES = {
  ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
};

// An element with attributes and children.
function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// The map of a page that regard.show wrote: weights as 16-bit steps, in base64.
function unpacked(data) {
  const [layers, heads, T, S] = data.shape;
  const bytes = Uint8Array.from(atob(data.weights), (letter) => letter.charCodeAt(0));
  const steps = new Uint16Array(bytes.buffer);
  const weight = (layer, head, row, column) =>
    data.low + (steps[((layer * heads + head) * T + row) * S + column] / 65535) *
      (data.high - data.low);
  return { queries: data.queries, keys: data.keys, layers, heads, weight, top: data.top };
}

// The end of the color scale: the rule of color_reach in regard/show/heatmaps.py.
function topOf(rows, keys) {
  const all = rows.flat();
  const [low, high] = all.reduce(([l, h], one) => [Math.min(l, one), Math.max(h, one)], [0, 0]);
  if (low < 0 || high > 1.0001) return Math.max(high, -low);
  if (keys <= 64 || high === 0) return 1;
  return Math.min(1, Math.max(high, 4 * all.reduce((sum, one) => sum + one, 0) / all.length));
}

// The map of one matrix, a list of rows. With end, such as "(end)": one more column of that name
// for what each row lacks to 1 (a translation's weights leave out the end of the sentence).
function ofRows(rows, queries, keys, end = null) {
  if (end !== null && rows.some((row) => row.some((one) => one !== 0))) {
    rows = rows.map((row) => [...row, Math.max(1 - row.reduce((sum, one) => sum + one, 0), 0)]);
    keys = [...keys, end];
  }
  return { queries, keys, layers: 1, heads: 1, top: topOf(rows, keys.length),
    weight: (l, h, row, column) => rows[row][column] };
}

function isDark() { return document.documentElement.dataset.theme === "dark"; }

function color(share) {
  const ramp = (share < 0 ? RAMPS_OF_LESS : RAMPS)[isDark() ? "dark" : "light"];
  const place = Math.min(Math.abs(share), 1) * (ramp.length - 1);
  const below = Math.min(Math.floor(place), ramp.length - 2);
  return ramp[below].map(
    (low, i) => Math.round(low + (place - below) * (ramp[below + 1][i] - low)));
}

// The share of the color scale's end that a weight is.
function shareOf(map, weight) { return weight / map.top; }

// A weight in the width of a cell: .31, 1.00, 46.3, 120, 1e+30.
function short(weight) {
  const size = Math.abs(weight);
  if (size >= 1e4) return weight.toExponential(0);
  return weight.toFixed(size < 10 ? 2 : size < 100 ? 1 : 0).replace(/^(-?)0\./, "$1.");
}

// A label with a dot for each control character, as regard/show/heatmaps.py writes it.
function printable(label) {
  return label.replace(/[\p{Cc}\p{Zl}\p{Zp}\u202a-\u202e\u2066-\u2069]/gu, "·");
}

// One head as a small picture, a pixel for each weight.
function thumbnail(map, layer, head) {
  const T = map.queries.length, S = map.keys.length;
  const canvas = make("canvas", { width: S, height: T, "aria-hidden": "true" });
  if (T === 0 || S === 0) return canvas;
  const pen = canvas.getContext("2d"), image = pen.createImageData(S, T);
  for (let i = 0; i < T * S; i++) {
    const share = shareOf(map, map.weight(layer, head, Math.floor(i / S), i % S));
    image.data.set([...color(share), 255], 4 * i);
  }
  pen.putImageData(image, 0, 0);
  return canvas;
}

function themeButton(button) {
  const change = (name) => {
    document.documentElement.dataset.theme = name;
    button.textContent = name === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Change to the ${name === "dark" ? "light" : "dark"} theme`);
    window.dispatchEvent(new Event("themechange"));
  };
  button.addEventListener("click", () => change(isDark() ? "light" : "dark"));
  change(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

class AttentionView {
  constructor(root) {
    this.at = { layer: 0, head: 0, view: "heatmap", row: -1, column: -1 };
    this.rows = null; // how many rows are shown; null: all
    this.pinned = null; // the word that was clicked: [side, index]
    this.box = { left: 0, top: 0, cell: 0 };
    this._build(root);
    this.root = root;
    root.hidden = true; // until there is a map to show
    window.addEventListener("resize", () => { if (this.map) this._draw(); });
    window.addEventListener("themechange", () => { if (this.map) this._draw(); });
  }

  // Shows a map; what was looked at stays where that is possible.
  show(map) {
    this.map = { ...map, queries: map.queries.map(printable), keys: map.keys.map(printable) };
    this.root.hidden = false;
    Object.assign(this.at, { layer: 0, head: 0, row: -1, column: -1 });
    this.rows = this.pinned = null;
    this.layerGroup.hidden = map.layers < 2;
    this.headGroup.hidden = map.heads < 2;
    this.buttons.heads.hidden = map.layers * map.heads < 2;
    if (this.at.view === "heads" && this.buttons.heads.hidden) this.at.view = "heatmap";
    this.said.textContent = "";
    this._draw();
  }

  // Shows the first rows only: decoding, step by step. null: all.
  upTo(rows) {
    this.rows = rows;
    this._draw();
  }

  choose(view) {
    this.at.view = view;
    this._draw();
  }

  weight(row, column) {
    if (this.rows !== null && row >= this.rows) return 0;
    return this.map.weight(this.at.layer, this.at.head, row, column);
  }

  share(row, column) { return shareOf(this.map, this.weight(row, column)); }

  // Building ------------------------------------------------------------------------------------

  _build(root) {
    const views = make("div", { class: "group", role: "group", "aria-label": "How to draw it" });
    this.buttons = {};
    for (const [name, text] of [["heatmap", "Heatmap"], ["lines", "Lines"], ["table", "Table"],
      ["heads", "All heads"]]) {
      this.buttons[name] = make("button", { type: "button", text, "data-view": name });
      this.buttons[name].addEventListener("click", () => this.choose(name));
      views.append(this.buttons[name]);
    }
    this.layerGroup = this._stepper("layer", "Layer");
    this.headGroup = this._stepper("head", "Head");
    this.said = make("p", { class: "said", role: "status" });
    this.canvas = make("canvas");
    this.pad = make("div", { class: "scroll", tabindex: "0", role: "application",
      "aria-label": "Weights. Arrow keys move from cell to cell." }, this.canvas);
    this.pairs = make("div", { class: "pairs" });
    this.tableBox = make("div", { class: "scroll", tabindex: "0", role: "group",
      "aria-label": "Table of weights" });
    this.headsBox = make("div", { class: "scroll", tabindex: "0", role: "group",
      "aria-label": "A small picture of every head" });
    this.sections = {
      heatmap: make("section", { "aria-label": "Heatmap" }, this.pad,
        make("p", { class: "hint", text: "Point at a cell, or click and use the arrow keys." })),
      lines: make("section", { "aria-label": "Lines" },
        make("div", { class: "scroll" }, this.pairs),
        make("p", { class: "hint", text: "Point at a word to see only its lines; click to keep them." })),
      table: make("section", { "aria-label": "Table" }, this.tableBox),
      heads: make("section", { "aria-label": "All heads" }, this.headsBox,
        make("p", { class: "hint", text: "Every layer and head, on one color scale. Click one to open it." })),
    };
    root.append(make("div", { class: "bar" }, views, this.layerGroup, this.headGroup), this.said,
      ...Object.values(this.sections));
    this.canvas.addEventListener("pointermove", (event) => this._pointed(event));
    this.pad.addEventListener("keydown", (event) => this._keyed(event));
  }

  _stepper(name, title) {
    const shown = make("output");
    const step = (by, label, text) => {
      const button = make("button", { type: "button", "aria-label": `${label} ${name}`, text });
      button.addEventListener("click", () => {
        const count = this.map[name + "s"];
        this.at[name] = (this.at[name] + by + count) % count;
        if (this.at.row >= 0) this._say(this.at.row, this.at.column);
        this._draw();
      });
      return button;
    };
    const group = make("div", { class: "group", role: "group", "aria-label": title },
      step(-1, "Previous", "‹"), shown, step(1, "Next", "›"));
    group.say = () => {
      shown.textContent = `${title} ${this.at[name] + 1} of ${this.map[name + "s"]}`;
    };
    return group;
  }

  _draw() {
    for (const [name, section] of Object.entries(this.sections)) {
      section.hidden = name !== this.at.view;
      this.buttons[name].setAttribute("aria-pressed", String(name === this.at.view));
    }
    this.layerGroup.say();
    this.headGroup.say();
    ({ heatmap: () => this._heatmap(), lines: () => this._lines(),
      table: () => this._table(), heads: () => this._heads() })[this.at.view]();
  }

  // Heatmap -------------------------------------------------------------------------------------

  _heatmap() {
    const { queries, keys } = this.map;
    const pen = this.canvas.getContext("2d");
    const scale = window.devicePixelRatio || 1;
    const T = queries.length, S = keys.length;
    pen.font = "13px system-ui, sans-serif";
    const widest = (labels) =>
      labels.reduce((most, label) => Math.max(most, pen.measureText(label).width), 0);
    // Whole pixels, or the browser scales the picture and the numbers blur.
    const left = Math.min(Math.ceil(widest(queries)) + 12, LABELS);
    const top = Math.min(Math.ceil(widest(keys)) + 12, LABELS);
    const fitting = Math.floor(((this.pad.clientWidth || 800) - left - 4) / Math.max(S, 1));
    const cell = Math.max(Math.min(fitting, 34), S > 100 || T > 100 ? 3 : 12);
    this.box = { left, top, cell };
    const width = left + S * cell + 2, height = top + T * cell + 2;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.width = width + "px";
    this.canvas.style.height = height + "px";
    pen.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    pen.fillStyle = style.getPropertyValue("--back");
    pen.fillRect(0, 0, width, height);
    for (let row = 0; row < T; row++) {
      for (let column = 0; column < S; column++) this._cell(pen, row, column);
    }
    pen.strokeStyle = style.getPropertyValue("--edge");
    pen.strokeRect(left - 0.5, top - 0.5, S * cell + 1, T * cell + 1);
    this._labels(pen, style);
    if (this.at.row >= 0) {
      pen.strokeStyle = style.getPropertyValue("--on");
      pen.lineWidth = 3;
      pen.strokeRect(left + this.at.column * cell, top + this.at.row * cell, cell, cell);
    }
  }

  _cell(pen, row, column) {
    const share = this.share(row, column);
    if (share === 0) return;
    const { left, top, cell } = this.box;
    const [red, green, blue] = color(share);
    pen.fillStyle = `rgb(${red},${green},${blue})`;
    pen.fillRect(left + column * cell, top + row * cell, cell, cell);
    if (cell < 30) return;
    const bright = 0.299 * red + 0.587 * green + 0.114 * blue > 140;
    pen.fillStyle = bright ? "#000" : "#fff";
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.fillText(short(this.weight(row, column)), left + (column + 0.5) * cell,
      top + (row + 0.5) * cell);
  }

  _labels(pen, style) {
    const { left, top, cell } = this.box;
    const { queries, keys } = this.map;
    const every = Math.ceil(14 / cell);
    pen.font = "13px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.fillStyle = style.getPropertyValue("--text");
    pen.textAlign = "right";
    for (let row = 0; row < queries.length; row += every) {
      if (this.rows !== null && row >= this.rows) break;
      pen.fillText(clipped(pen, queries[row], left - 10), left - 6, top + (row + 0.5) * cell);
    }
    pen.textAlign = "left";
    for (let column = 0; column < keys.length; column += every) {
      pen.save();
      pen.translate(left + (column + 0.5) * cell, top - 6);
      pen.rotate(-Math.PI / 2);
      pen.fillText(clipped(pen, keys[column], top - 10), 0, 0);
      pen.restore();
    }
  }

  _say(row, column) {
    Object.assign(this.at, { row, column });
    const { queries, keys } = this.map;
    this.said.textContent =
      `“${queries[row]}” looks at “${keys[column]}”: ${this.weight(row, column).toFixed(4)}`;
  }

  _pointed(event) {
    const { left, top, cell } = this.box;
    const column = Math.floor((event.offsetX - left) / cell);
    const row = Math.floor((event.offsetY - top) / cell);
    const inside = row >= 0 && row < this.map.queries.length && column >= 0 &&
      column < this.map.keys.length;
    if (inside && (row !== this.at.row || column !== this.at.column)) {
      this._say(row, column);
      this._heatmap();
    }
  }

  _keyed(event) {
    const step = MOVES[event.key];
    const T = this.map.queries.length, S = this.map.keys.length;
    if (!step || T === 0 || S === 0) return;
    event.preventDefault();
    const bound = (number, count) => Math.min(Math.max(number, 0), count - 1);
    if (this.at.row < 0) this._say(0, 0);
    else this._say(bound(this.at.row + step[0], T), bound(this.at.column + step[1], S));
    this._heatmap();
  }

  // Lines ---------------------------------------------------------------------------------------

  _lines() {
    const { queries, keys } = this.map;
    this.pairs.replaceChildren();
    this.pairs.style.height = Math.max(queries.length, keys.length) * ROW + "px";
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("width", "100%");
    svg.setAttribute("height", "100%");
    svg.setAttribute("aria-hidden", "true");
    const found = [];
    for (let row = 0; row < queries.length; row++) {
      for (let column = 0; column < keys.length; column++) {
        const share = this.share(row, column);
        if (Math.abs(share) > 0.02) found.push([share, row, column]);
      }
    }
    found.sort((one, other) => Math.abs(other[0]) - Math.abs(one[0]));
    for (const [signed, row, column] of found.slice(0, MOST_LINES)) {
      const share = Math.min(Math.abs(signed), 1);
      const line = document.createElementNS(SVG, "line");
      if (signed < 0) line.setAttribute("class", "less");
      line.setAttribute("x1", "35%");
      line.setAttribute("x2", "65%");
      line.setAttribute("y1", (column + 0.5) * ROW);
      line.setAttribute("y2", (row + 0.5) * ROW);
      line.setAttribute("stroke-width", (0.5 + 3.5 * share).toFixed(2));
      line.setAttribute("stroke-opacity", (0.08 + 0.92 * share).toFixed(3));
      line.dataset.queries = row;
      line.dataset.keys = column;
      svg.append(line);
    }
    const shown = this.rows === null ? queries : queries.slice(0, this.rows);
    this.pairs.append(svg, this._words("keys", keys), this._words("queries", shown));
    if (this.pinned) this._highlight(...this.pinned);
  }

  _words(side, labels) {
    const list = make("ol", { class: side,
      "aria-label": side === "keys" ? "What is looked at" : "What looks" });
    labels.forEach((label, index) => {
      const button = make("button", { type: "button", text: label === "" ? "∅" : label,
        "aria-pressed": "false" });
      const away = () => (this.pinned ? this._highlight(...this.pinned) : this._highlight(null, -1));
      button.addEventListener("pointerenter", () => this._highlight(side, index));
      button.addEventListener("pointerleave", away);
      button.addEventListener("focus", () => this._highlight(side, index));
      button.addEventListener("blur", away);
      button.addEventListener("click", () => {
        const same = this.pinned && this.pinned[0] === side && this.pinned[1] === index;
        this.pinned = same ? null : [side, index];
        for (const other of this.pairs.querySelectorAll("button")) {
          other.setAttribute("aria-pressed", String(other === button && !same));
        }
        this._highlight(side, index);
      });
      list.append(make("li", {}, button));
    });
    return list;
  }

  _highlight(side, index) {
    const other = side === "keys" ? "queries" : "keys";
    const near = new Set();
    for (const line of this.pairs.querySelectorAll("line")) {
      const shown = side === null || Number(line.dataset[side]) === index;
      line.style.display = shown ? "" : "none";
      if (shown && side !== null) near.add(Number(line.dataset[other]));
    }
    for (const kind of ["keys", "queries"]) {
      this.pairs.querySelectorAll(`ol.${kind} button`).forEach((button, i) => {
        const close = kind === other ? near.has(i) : i === index;
        button.classList.toggle("near", side !== null && close);
        button.classList.toggle("far", side !== null && !close);
      });
    }
    if (side === null) {
      this.said.textContent = "";
      return;
    }
    const value = (i) => (side === "keys" ? this.weight(i, index) : this.weight(index, i));
    const most = [...near].sort((a, b) => Math.abs(value(b)) - Math.abs(value(a))).slice(0, 4);
    this.said.textContent =
      `“${this.map[side][index]}” ${side === "keys" ? "is looked at by" : "looks at"} ` +
      (most.map((i) => `“${this.map[other][i]}” ${value(i).toFixed(2)}`).join(", ") || "nothing");
  }

  // All heads -----------------------------------------------------------------------------------

  _heads() {
    const { layers, heads } = this.map;
    const rows = Array.from({ length: layers }, (_, layer) => {
      const cells = Array.from({ length: heads }, (_, head) => {
        const here = layer === this.at.layer && head === this.at.head;
        const button = make("button", { type: "button", "aria-pressed": String(here),
          "aria-label": `Layer ${layer + 1}, head ${head + 1}` }, thumbnail(this.map, layer, head));
        button.addEventListener("click", () => {
          Object.assign(this.at, { layer, head });
          this.choose("heatmap");
        });
        return make("td", {}, button);
      });
      return make("tr", {}, make("th", { scope: "row", text: `Layer ${layer + 1}` }), ...cells);
    });
    const names = Array.from({ length: heads }, (_, head) =>
      make("th", { scope: "col", text: `Head ${head + 1}` }));
    this.headsBox.replaceChildren(make("table", { class: "heads" },
      make("thead", {}, make("tr", {}, make("td"), ...names)), make("tbody", {}, ...rows)));
  }

  // Table ---------------------------------------------------------------------------------------

  _table() {
    const { queries, keys } = this.map;
    const columns = Math.min(keys.length, MOST_COLUMNS);
    const rows = Math.min(queries.length, MOST_ROWS, this.rows ?? Infinity);
    const cut = columns < keys.length || rows < queries.length && this.rows === null;
    const head = make("tr", {}, make("td"));
    for (let column = 0; column < columns; column++) {
      head.append(make("th", { scope: "col", text: keys[column] }));
    }
    const body = make("tbody");
    for (let row = 0; row < rows; row++) {
      const line = make("tr", {}, make("th", { scope: "row", text: queries[row] }));
      for (let column = 0; column < columns; column++) {
        line.append(make("td", { text: this.weight(row, column).toFixed(3) }));
      }
      body.append(line);
    }
    const caption = make("caption", { class: "hint",
      text: cut ? `The first ${rows} rows and ${columns} columns.` : "Weights" });
    this.tableBox.replaceChildren(
      make("table", { class: "weights" }, caption, make("thead", {}, head), body));
  }
}

function clipped(pen, label, room) {
  if (pen.measureText(label).width <= room) return label;
  let end = label.length;
  while (end > 0 && pen.measureText(label.slice(0, end) + "…").width > room) end--;
  return label.slice(0, end) + "…";
}
