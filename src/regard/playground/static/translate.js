"use strict";
// Translate: a translation, the lines between its words and the source's, and how each word came
// about. It opens with an example that was computed beforehand, so that there is something to see
// while the server still compiles.

const MOMENT = 1100; // milliseconds of one stage while playing
const translated = { source: "", best: [], chosen: 0, step: null }; // step: 1 to T + 1; null: all
const sides = { names: ["English", "French"], codes: ["en", "fr"] }; // of the model that comes along
const translateView = new AttentionView(byId("translate-view"));
translateView.at.view = "lines";
let playing = 0; // the timer of the next stage; 0: stopped

byId("translate-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = byId("translate-form").querySelector("button");
  if (button.disabled) return;
  byId("translate-error").textContent = "";
  button.disabled = true;
  button.textContent = "Translating …";
  try {
    const beam = Number(byId("beam").value);
    const text = byId("text").value;
    const found = await ask("/api/translate", { text: [text], beam, n_best: beam, weights: true,
      next_words: 5 });
    showTranslations(text, found.translations[0]);
  } catch (error) {
    byId("translate-error").textContent = error.message;
  } finally {
    button.disabled = false;
    button.textContent = "Translate";
  }
});

byId("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("translate-form").requestSubmit();
});

function showTranslations(source, best) {
  stop();
  translated.source = source;
  translated.best = best.map((one) => {
    const rows = rowsOf(one.weights);
    return { ...one, rows, keys: [...one.source_words, "(end)"],
      // What a row lacks of 1 is the weight on the end of the source, which is no word.
      withEnd: rows.map((row) => [...row, Math.max(0, 1 - row.reduce((sum, x) => sum + x, 0))]) };
  });
  byId("result").hidden = false;
  chooseHypothesis(0);
}

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
  byId("hypotheses").replaceChildren(...translated.best.map((other, i) => {
    const button = make("button", { type: "button", "aria-pressed": String(i === index) },
      make("span", { text: other.text || "(nothing)", lang: sides.codes[1] }),
      make("small", { text: other.score === null ? "" : `score ${other.score.toFixed(2)}` }));
    button.addEventListener("click", () => { stop(); chooseHypothesis(i); });
    return make("li", {}, button);
  }));
  translateView.show({ ...ofRows(one.withEnd, one.target_words, one.keys), top: 1 });
  byId("step").max = one.target_words.length + 1;
  window.dispatchEvent(new Event("translationchosen")); // layers.js listens
  goTo(null);
}

// Steps ------------------------------------------------------------------------------------------

// Shows one step, or all words (null). `stage` is what lights up: both where nothing is played.
function goTo(step, stage = "attention decoder") {
  const one = translated.best[translated.chosen];
  const T = one.target_words.length;
  translated.step = step === null ? null : Math.min(Math.max(step, 1), T + 1);
  const now = translated.step, word = now === null || now > T ? -1 : now - 1;
  byId("step").value = now ?? T + 1;
  byId("step-back").disabled = now === 1;
  byId("step-on").disabled = now === null || now === T + 1;
  byId("step-all").disabled = now === null;
  const name = word < 0 ? "the end of the sentence" : `“${one.target_words[word]}”`;
  byId("step-said").textContent = now === null ? `All ${T} words. Step through them:`
    : `Step ${now} of ${T + 1}: ${name}`;
  const [read, written] = sides.names;
  byId("lines-said").textContent = word < 0
    ? `The ${written} words on the right look at the ${read} words on the left. A line shows which ` +
      `${read} words a ${written} word looked at when it was written: the thicker, the larger the ` +
      "weight. Play shows it word by word."
    : `To write ${name}, the model looks at these ${read} words. The thicker the line, the ` +
      "larger the weight.";
  for (const name of ["encoder", "attention", "decoder"]) {
    byId(`stage-${name}`).classList.toggle("lit", now !== null && stage.includes(name));
  }
  const known = stage.includes("decoder");
  drawText(one, word);
  drawMachine(one, now, word, known);
  drawLooks(now);
  Object.assign(translateView.at, { row: word, column: word < 0 ? -1 : most(one.withEnd[word]) });
  translateView.pinned = word < 0 ? null : ["queries", word];
  translateView.upTo(word < 0 ? null : now);
}

const most = (row) => row.indexOf(Math.max(...row));

// The translation with its current word marked; its words are found in the text one by one.
function drawText(one, word) {
  const parts = [];
  let from = 0;
  one.target_words.forEach((written, i) => {
    const at = one.text.indexOf(written, from);
    if (at < 0) return;
    parts.push(one.text.slice(from, at), i === word ? make("mark", { text: written }) : written);
    from = at + written.length;
  });
  parts.push(one.text.slice(from));
  byId("translation").replaceChildren(...(one.text ? parts : ["(nothing)"]));
}

function drawMachine(one, now, word, known) {
  const row = word < 0 ? null : one.withEnd[word];
  byId("read").replaceChildren(...one.keys.slice(0, row ? undefined : -1).map((text, i) => {
    const chip = make("span", { text });
    if (row) chip.style.setProperty("--share", `${Math.round(100 * row[i])}%`);
    return chip;
  }));
  const order = row ? row.map((share, i) => [one.keys[i], share]).sort((a, b) => b[1] - a[1]) : [];
  drawShares(byId("weights-now"), order.slice(0, 3).filter(([, share]) => share >= 0.01));
  const last = now === null ? one.target_words.length : Math.min(now, one.target_words.length + 1);
  const shown = one.target_words.slice(0, now === null ? last : last - 1)
    .map((text) => make("span", { text }));
  if (now !== null) {
    const text = known ? one.target_words[word] ?? "(end)" : "?";
    shown.push(make("span", { class: "now", text }));
  }
  byId("written").replaceChildren(...shown);
  const next = now === null || !known ? [] : (one.next_words ?? [])[now - 1] ?? [];
  drawShares(byId("next"), next.map(([text, share]) => [text || "(end)", share]));
}

// A list of words with bars; the line in front of it is hidden where there are none.
function drawShares(list, shares) {
  list.previousElementSibling.hidden = shares.length === 0;
  list.replaceChildren(...shares.map(([text, share]) => {
    const bar = make("i", { "aria-hidden": "true" });
    bar.style.setProperty("--share", `${100 * Math.min(share, 1)}%`);
    const percent = share < 0.01 ? "< 1 %" : `${Math.round(100 * share)} %`;
    return make("li", {}, make("span", { text }), bar, make("b", { text: percent }));
  }));
}

function drawLooks(now) {
  const many = translated.best.length > 1;
  byId("looks-said").textContent = now === null ? "Choose a step to compare the translations there."
    : many ? `Each translation at step ${now}:` : `The translation at step ${now}:`;
  byId("looks").replaceChildren(...(now === null ? [] : translated.best).map((other, i) => {
    const written = now <= other.target_words.length;
    return make("tr", i === translated.chosen ? { class: "chosen" } : {},
      make("td", { lang: sides.codes[1], text: written ? other.target_words[now - 1] : "(end)" }),
      make("td", { text: written ? looksAt(other, now - 1) : "–" }));
  }));
}

function looksAt(one, word) {
  const order = one.withEnd[word].map((weight, i) => [weight, i]).sort((a, b) => b[0] - a[0]);
  return order.slice(0, 3).filter(([weight]) => weight >= 0.05)
    .map(([weight, i]) => `${one.keys[i]} ${weight.toFixed(2)}`).join(", ") || "nothing";
}

// Playing ----------------------------------------------------------------------------------------

function stop() {
  clearTimeout(playing);
  playing = 0;
  byId("play").textContent = "▶ Play";
}

// Encoder once; then attention and decoder in turn for each word; at last all lines again.
function play(step, stage) {
  const T = translated.best[translated.chosen].target_words.length;
  if (step > T + 1) {
    stop();
    goTo(null);
    return;
  }
  goTo(step, stage);
  const next = { encoder: [step, "attention"], attention: [step, "decoder attention"] }[stage]
    ?? [step + 1, "attention"];
  playing = setTimeout(() => play(...next), MOMENT);
}

byId("play").addEventListener("click", () => {
  if (playing) {
    stop();
    return;
  }
  const T = translated.best[translated.chosen].target_words.length;
  const again = translated.step === null || translated.step > T;
  byId("play").textContent = "❚❚ Pause";
  play(again ? 1 : translated.step, again ? "encoder" : "attention");
});
function by(steps) {
  stop();
  const T = translated.best[translated.chosen].target_words.length;
  goTo((translated.step ?? T + 2) + steps);
}
byId("step").addEventListener("input", () => { stop(); goTo(Number(byId("step").value)); });
byId("step-back").addEventListener("click", () => by(-1));
byId("step-on").addEventListener("click", () => by(1));
byId("step-all").addEventListener("click", () => { stop(); goTo(null); });

// The start --------------------------------------------------------------------------------------

// Which model, and whether it is compiled yet; asked for again until it is. The page is written for
// the model that comes with regard, which made the example: another has neither its languages nor
// its translation.
async function sayModel(first) {
  try {
    const found = await (await fetch("/api/models")).json();
    const another = found.models.length > 0 && !found.models[0].languages;
    if (first && another) forgetLanguages();
    else if (first) showExample();
    const name = found.models.length ? `Model: ${found.models[0].name}`
      : "There is no model here: the example below is from the one that comes with regard.";
    byId("layers").hidden = found.models[0]?.architecture !== "transformer";
    const starting = found.models.length > 0 && found.status === "starting";
    byId("model").textContent = starting ? `${name}, being compiled …` : name;
    if (starting) setTimeout(() => sayModel(false), 2000);
  } catch {
    byId("model").textContent = "";
  }
}

function forgetLanguages() {
  Object.assign(sides, { names: ["source", "target"], codes: ["", ""] });
  for (const one of document.querySelectorAll("[data-side]")) {
    one.textContent = sides.names[one.dataset.side];
  }
  for (const one of document.querySelectorAll("[data-lang]")) one.lang = "";
  if (byId("text").value === byId("text").defaultValue) byId("text").value = "";
}

async function showExample() {
  try {
    const example = await (await fetch("/example.json")).json();
    if (translated.best.length === 0) showTranslations(byId("text").defaultValue, example);
  } catch {
    byId("result").hidden = true; // the page works without it
  }
}
sayModel(true);
