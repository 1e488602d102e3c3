"use strict";
// Your own: a matrix that was pasted, or a file that AttentionMap.save wrote.

const ownView = new AttentionView(byId("own-view"));
const LARGEST_FILE = 50e6;

function showOwn(map, title) {
  byId("own-error").textContent = "";
  byId("own-title").textContent = title;
  ownView.show(map);
  drawHeads(map);
}

// A small heatmap of every head of the layer, to choose from.
function drawHeads(map) {
  const many = map.heads > 1;
  byId("own-heads").hidden = !many;
  byId("own-heads").replaceChildren(...(many ? Array.from({ length: map.heads }, (_, head) => {
    const button = make("button", { type: "button",
      "aria-pressed": String(head === ownView.at.head) }, thumbnail(map, ownView.at.layer, head),
    make("div", { text: `Head ${head + 1}` }));
    button.addEventListener("click", () => {
      ownView.at.head = head;
      ownView.choose(ownView.at.view);
      drawHeads(map);
    });
    return button;
  }) : []));
}
// The arrows beside the view change layer and head too.
byId("own-view").addEventListener("click", () => { if (ownView.map) drawHeads(ownView.map); });
window.addEventListener("themechange", () => { if (ownView.map) drawHeads(ownView.map); });

byId("own-form").addEventListener("submit", (event) => {
  event.preventDefault();
  showPasted();
});

function showPasted() {
  try {
    const lines = (id) => byId(id).value.split("\n").map((line) => line.trim()).filter(Boolean);
    const queries = lines("own-queries"), keys = lines("own-keys");
    const rows = lines("own-weights").map((line) => line.split(/[\s,;]+/).map(Number));
    checkRows(rows, queries, keys);
    showOwn(ofRows(rows, queries, keys), "");
  } catch (error) {
    byId("own-error").textContent = error.message;
  }
}

function checkRows(rows, queries, keys) {
  if (rows.length !== queries.length) {
    throw new Error(`There are ${rows.length} rows of weights for ${queries.length} queries.`);
  }
  rows.forEach((row, i) => {
    if (row.length !== keys.length) {
      throw new Error(`Row ${i + 1} has ${row.length} weights for ${keys.length} keys.`);
    }
    if (!row.every(Number.isFinite)) throw new Error(`Row ${i + 1} has an entry that is not a number.`);
  });
}

byId("own-file").addEventListener("change", async () => {
  const file = byId("own-file").files[0];
  if (!file) return;
  try {
    if (file.size > LARGEST_FILE) throw new Error("The file is over 50 MB.");
    const content = JSON.parse(await file.text());
    if (content.format !== "regard attention map" || content.version !== 1) {
      throw new Error("This is not an AttentionMap that this version of regard wrote.");
    }
    const { weights, query_labels: queries, key_labels: keys, title } = content;
    for (const layer of weights) for (const rows of layer) checkRows(rows, queries, keys);
    const signed = content.signed === true; // a difference of two maps
    const high = weights.flat(3).reduce((most, one) => Math.max(most, Math.abs(one)), signed ? 0 : 1) || 1;
    showOwn({ queries: queries.map(String), keys: keys.map(String), layers: weights.length,
      heads: weights[0].length, top: high,
      weight: (layer, head, row, column) => weights[layer][head][row][column] }, String(title));
  } catch (error) {
    // A file that save() did not write fails somewhere above, with an error of the browser's own.
    const damaged = error instanceof TypeError || error instanceof SyntaxError;
    byId("own-error").textContent = damaged
      ? "This file is damaged, or not an AttentionMap." : error.message;
  } finally {
    byId("own-file").value = ""; // so that the same file can be chosen again
  }
});
showPasted(); // the example that the form opens with
