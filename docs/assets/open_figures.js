// Figures open at full size: a click, or Enter, shows the figure in a dialog; Escape closes it.
document.addEventListener("DOMContentLoaded", () => {
  const dialog = document.createElement("dialog");
  dialog.className = "full-size";
  const close = document.createElement("button");
  close.textContent = "Close";
  const place = document.createElement("div");
  place.tabIndex = 0; // scrolls by keyboard where the figure is larger than the window
  dialog.append(close, place);
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  document.body.append(dialog);

  const open = (figure) => {
    const copy = figure.cloneNode(true);
    copy.removeAttribute("tabindex");
    copy.removeAttribute("role");
    const picture = copy.matches("img") ? copy : copy.querySelector("svg");
    // At least its own size, and as large as the window where that is larger.
    const natural = figure.matches("img")
      ? figure.naturalWidth : figure.querySelector("svg").viewBox.baseVal.width * 1.34;
    picture.style.width = `max(${Math.round(natural)}px, 94vw)`;
    if (window.innerWidth > window.innerHeight) picture.style.maxHeight = "";
    picture.style.height = "auto";
    place.replaceChildren(copy);
    dialog.showModal();
    dialog.scrollTo(0, 0);
  };
  for (const figure of document.querySelectorAll("figure.drawn, img.shot")) {
    figure.tabIndex = 0;
    figure.title = "Open at full size";
    if (figure.matches("figure")) figure.setAttribute("aria-label", "Figure: Enter opens it at full size");
    figure.addEventListener("click", () => open(figure));
    figure.addEventListener("keydown", (event) => {
      if (event.key === "Enter") open(figure);
    });
  }
});
