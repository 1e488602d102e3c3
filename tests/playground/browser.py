"""A real browser for the tests: Chromium through Playwright, what it complained of, and axe."""

import contextlib
import os
import shutil

import pytest

EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
HOW = (
    "install it with your system's package manager (apt install chromium) "
    "or with: python -m playwright install chromium"
)

AXE = """async () => {
  const found = await axe.run(document, {resultTypes: ["violations"]});
  return found.violations.map(v => ({id: v.id, impact: v.impact, help: v.help,
    nodes: v.nodes.map(n => n.html.slice(0, 160) + " " + (n.failureSummary || ""))}));
}"""


def executable(own: str) -> str | None:
    """Where Chromium is: the system's, or the one that Playwright has downloaded."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    return own if os.path.exists(own) else None


@contextlib.contextmanager
def chromium():
    """The browser; where there is none, the test is skipped and says what to install."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="needs Playwright: pip install playwright"
    )
    with api.sync_playwright() as playwright:
        path = executable(playwright.chromium.executable_path)
        if path is None:
            pytest.skip(f"needs Chromium, and none of {', '.join(NAMES)} is here; {HOW}")
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@contextlib.contextmanager
def quiet_page(browser, **options):
    """A page that must come through the test without a word on its console."""
    options = {"viewport": {"width": 1200, "height": 900}, "color_scheme": "light"} | options
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(30_000)
    said = []
    page.on("console", lambda one: said.append(one.text) if one.type != "log" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append("a dialog opened"), dialog.dismiss()))
    page.on("requestfailed", lambda one: said.append(f"failed: {one.url}"))
    yield page
    assert said == []
    context.close()


def accessibility(page) -> list[dict]:
    """What axe finds serious or critical."""
    base = pytest.importorskip(
        "axe_playwright_python.base", reason="needs axe: pip install axe-playwright-python"
    )
    page.evaluate(base.AXE_SCRIPT)
    return [one for one in page.evaluate(AXE) if one["impact"] in ("serious", "critical")]


def overflow(page) -> int:
    """Pixels by which the page is wider than the window."""
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


def open_scores(page):
    page.click("#tab-scores")
    page.wait_for_selector("#plane [data-point]")
    page.wait_for_selector("#bars-plain div")


def weights(page):
    """What the page draws, as a table of numbers."""
    table = page.locator("#scores-view [data-view=table]")
    if table.get_attribute("aria-pressed") != "true":
        table.click()
    return page.eval_on_selector_all(  # at one moment: the table is made anew at every answer
        "#scores-view tbody tr",
        "rows => rows.map(r => [...r.querySelectorAll('td')].map(d => Number(d.textContent)))",
    )
