"""One browser for each file of tests, and the playground with a model that writes backwards."""

import pytest


@pytest.fixture(scope="module")
def browser():
    from playground.browser import chromium

    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def address():
    from playground.fakes import Reverser, served
    from regard.playground.server import Playground

    # As if it were the bundled model, which the page opens with.
    models = [{"name": "backwards", "languages": ["en", "fr"]}]
    with served(Playground(Reverser(), models=models).app()) as found:
        yield found


@pytest.fixture
def page(browser, address):
    from playground.browser import quiet_page

    with quiet_page(browser) as found:
        found.goto(address)
        yield found


@pytest.fixture
def phone(browser, address):
    from playground.browser import quiet_page

    with quiet_page(browser, viewport={"width": 400, "height": 800}, has_touch=True) as found:
        found.goto(address)
        yield found
