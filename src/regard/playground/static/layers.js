"use strict";
// Every layer and head of a Transformer, for the translation that is chosen: asked for when the
// section is opened, and anew for another translation.

const layersView = new AttentionView(byId("layers-view"));
const layered = { of: null, maps: {}, name: "cross" }; // of: the translation whose maps these are
const mapButtons = [...document.querySelectorAll("[data-map]")];

// The map of layers × heads × queries × keys, packed as rowsOf in translate.js reads a matrix.
function mapOf({ queries, keys, shape: [layers, heads, T, S], data }) {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const steps = new DataView(bytes.buffer);
  return { queries, keys, layers, heads, top: 1, weight: (layer, head, row, column) =>
    steps.getUint16(2 * (((layer * heads + head) * T + row) * S + column), true) / 65535 };
}

async function showLayers() {
  const one = translated.best[translated.chosen];
  if (!byId("layers").open || !one || layered.of === one) return;
  layered.of = one;
  byId("layers-error").textContent = "";
  try {
    const found = await ask("/api/layers",
      { source: translated.source, target: one.text });
    if (layered.of !== one) return; // another was chosen meanwhile
    layered.maps = found.maps;
    chooseMap(layered.name);
  } catch (error) {
    layered.of = null;
    byId("layers-error").textContent = error.message;
  }
}

function chooseMap(name) {
  layered.name = name;
  for (const button of mapButtons) {
    button.setAttribute("aria-pressed", String(button.dataset.map === name));
  }
  if (layered.maps[name]) layersView.show(mapOf(layered.maps[name]));
}

for (const button of mapButtons) {
  button.addEventListener("click", () => chooseMap(button.dataset.map));
}
byId("layers").addEventListener("toggle", showLayers);
window.addEventListener("translationchosen", showLayers);
