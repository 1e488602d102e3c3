"use strict";
// Translate: the translation, the beam's other hypotheses, and each one's look at every step.

const translated = { best: [], chosen: 0, step: 0 };
const translateView = new AttentionView(byId("translate-view"));
translateView.at.view = "lines";

byId("translate-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = event.submitter || byId("translate-form").querySelector("button");
  byId("translate-error").textContent = "";
  button.disabled = true;
  try {
    const beam = Number(byId("beam").value);
    const found = await ask("/api/translate", { text: [byId("text").value], beam, n_best: beam,
      weights: true });
    translated.best = found.translations[0].map(
      (one) => ({ ...one, weights: rowsOf(one.weights) }));
    byId("result").hidden = false;
    chooseHypothesis(0);
  } catch (error) {
    byId("translate-error").textContent = error.message;
  } finally {
    button.disabled = false;
  }
});

// Weights as the API packs them: 16-bit integers in base64, 65535 for 1.
function rowsOf({ shape: [T, S], data }) {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const steps = new DataView(bytes.buffer);
  return Array.from({ length: T }, (_, row) => Array.from({ length: S },
    (_, column) => steps.getUint16(2 * (row * S + column), true) / 65535));
}

function chooseHypothesis(index) {
  translated.chosen = index;
  const one = translated.best[index];
  byId("translation").textContent = one.text || "(nothing)";
  byId("hypotheses").replaceChildren(...translated.best.map((other, i) => {
    const button = make("button", { type: "button", "aria-pressed": String(i === index), lang: "fr" },
      make("span", { text: other.text || "(nothing)" }),
      make("small", { text: other.score === null ? "" : other.score.toFixed(2) }));
    button.addEventListener("click", () => chooseHypothesis(i));
    return make("li", {}, button);
  }));
  translateView.show(ofRows(one.weights, one.target_words, one.source_words));
  byId("step").max = one.target_words.length;
  goTo(one.target_words.length);
}

function goTo(step) {
  const one = translated.best[translated.chosen];
  translated.step = Math.min(Math.max(step, 0), one.target_words.length);
  byId("step").value = translated.step;
  byId("step-back").disabled = translated.step === 0;
  byId("step-on").disabled = translated.step === one.target_words.length;
  byId("written").textContent = one.target_words.slice(0, translated.step).join(" ");
  byId("looks").replaceChildren(...translated.best.map((other, i) => {
    const word = translated.step - 1;
    const written = word >= 0 && word < other.target_words.length;
    const row = make("tr", i === translated.chosen ? { class: "chosen" } : {},
      make("td", { lang: "fr", text: written ? other.target_words[word] : "–" }),
      make("td", { text: written ? looksAt(other, word) : "–" }));
    return row;
  }));
  const all = translated.step === one.target_words.length;
  translateView.upTo(all ? null : translated.step);
}

function looksAt(one, word) {
  const row = one.weights[word];
  const order = row.map((weight, i) => [weight, i]).sort((a, b) => b[0] - a[0]).slice(0, 3);
  return order.filter(([weight]) => weight >= 0.05)
    .map(([weight, i]) => `${one.source_words[i]} ${weight.toFixed(2)}`).join(", ") || "nothing";
}

byId("step").addEventListener("input", () => goTo(Number(byId("step").value)));
byId("step-back").addEventListener("click", () => goTo(translated.step - 1));
byId("step-on").addEventListener("click", () => goTo(translated.step + 1));

// Which model, and whether it is compiled yet; asked for again until it is.
async function sayModel() {
  try {
    const found = await (await fetch("/api/models")).json();
    const name = found.models.length ? found.models[0].name
      : "There is no model here; Scores and Your own work.";
    const starting = found.models.length > 0 && found.status === "starting";
    byId("model").textContent = starting ? `${name}: being compiled …` : name;
    if (starting) setTimeout(sayModel, 2000);
  } catch {
    byId("model").textContent = "";
  }
}
sayModel();
