"""The dashboard in a real browser: Debian's Chromium, driven by playwright."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from server_fakes import FakeEngine, LiveServer, make_tokenizer

from pippin import config

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        if os.environ.get("CI"):
            pytest.fail(f"CI must test the dashboard, and {CHROMIUM} is missing")
        pytest.skip(f"{CHROMIUM} is missing: apt-get install chromium")
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=str(CHROMIUM), args=list(FLAGS))
        yield made
        made.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Fails the test for anything that the page's console calls an error."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    made = context.new_page()
    made.set_default_timeout(60_000)
    errors: list[str] = []
    made.on("pageerror", lambda error: errors.append(str(error)))
    yield made
    context.close()
    assert errors == []


def serve(**sections: dict[str, object]) -> LiveServer:
    values = {"model": {"model": "fake"}, **sections}
    return LiveServer(config.build(values), FakeEngine(), make_tokenizer())


@pytest.fixture
def server() -> Iterator[LiveServer]:
    made = serve()
    yield made
    made.close()


def test_a_chat_streams_in_and_the_figures_move(page: Page, server: LiveServer) -> None:
    page.goto(server.base)
    expect(page.locator("#state")).to_have_attribute("data-state", "good", timeout=60_000)
    expect(page.locator("#running")).to_have_text("0", timeout=60_000)
    page.locator("#prompt").fill("Hello")
    page.locator("#prompt").press("Enter")
    answer = page.locator("#messages .assistant")
    expect(answer).not_to_be_empty(timeout=60_000)
    expect(page.locator("#send")).to_be_enabled(timeout=60_000)
    assert page.locator("#problem").is_hidden()


def test_it_fits_a_narrow_screen(page: Page, server: LiveServer) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(server.base)
    expect(page.locator("#state")).to_have_attribute("data-state", "good", timeout=60_000)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_it_asks_for_the_key(page: Page) -> None:
    server = serve(server={"api_key": ("secret",)})
    try:
        page.goto(server.base)
        expect(page.locator("#key-dialog")).to_be_visible(timeout=60_000)
        page.locator("#key").fill("secret")
        page.locator("#key").press("Enter")
        expect(page.locator("#facts")).to_contain_text("fake", timeout=60_000)
        expect(page.locator("#key-dialog")).to_be_hidden(timeout=60_000)
    finally:
        server.close()
