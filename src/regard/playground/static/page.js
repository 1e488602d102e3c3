"use strict";
// The page's frame: tabs, theme, and how the API is asked. Nothing is computed here.

async function ask(path, body) {
  const answer = await fetch(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
  });
  let content;
  try {
    content = await answer.json();
  } catch {
    throw new Error(`The server answered ${answer.status} without an explanation.`);
  }
  if (!answer.ok) throw new Error(content.error || `The server answered ${answer.status}.`);
  return content;
}

// Calls a function after things have been quiet for a moment; the latest call wins.
function soon(milliseconds, action) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(action, milliseconds);
  };
}

const byId = (id) => document.getElementById(id);
const tabs = [...document.querySelectorAll('[role="tab"]')];

function chooseTab(chosen, focus) {
  for (const tab of tabs) {
    const own = tab === chosen;
    tab.setAttribute("aria-selected", String(own));
    tab.tabIndex = own ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !own;
  }
  if (focus) chosen.focus();
  window.dispatchEvent(new Event("resize")); // what was hidden can be measured now
}

tabs.forEach((tab, index) => {
  tab.addEventListener("click", () => chooseTab(tab, false));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) chooseTab(tabs[(index + step + tabs.length) % tabs.length], true);
  });
});

themeButton(byId("theme"));
