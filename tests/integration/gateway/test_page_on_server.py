"""The page, the gateway and the real server together: a picture goes in, and Stop reaches the decoder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from selenium import webdriver

from client import RelayClient
from launcher.server import Server
from tests.integration.observe import PICTURE, QUESTION, generated_at_the_end, metric, wait_until
from tests.unit.gateway.conftest import Gateway
from tests.unit.gateway.test_page import Page, start_browser

pytestmark = [
    pytest.mark.server,
    pytest.mark.browser,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium: make browser"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """One Chromium for all tests of the module."""
    started = start_browser(tmp_path_factory)
    yield started
    started.quit()


@pytest.fixture
def page(browser: webdriver.Chrome, gateway: Gateway) -> Iterator[Page]:
    """The page of the gateway before the real server."""
    yield Page(browser, gateway.url)
    browser.get("about:blank")


def test_a_picture_is_answered_as_the_server_itself_answers(page: Page, server: Server) -> None:
    with RelayClient(f"127.0.0.1:{server.ports.grpc}") as client:
        direct = client.ask(QUESTION, images=[PICTURE], max_tokens=256).text

    page.element("files").send_keys(str(PICTURE.resolve()))
    page.ask(QUESTION)

    assert page.until(lambda: "in all" in page.text("facts"), 30)
    assert page.element("answer").get_attribute("textContent") == direct.lstrip()
    assert page.until(lambda: "clip_encoder → llava_decoder" in page.text("requests"))
    assert page.until(lambda: "KV cache" in page.text("pipeline"))


def test_stop_ends_the_decoding(page: Page, server: Server) -> None:
    page.browser.execute_script(
        "const real = window.fetch;"
        "window.fetch = (url, options) => real(url, options?.body"
        " ? {...options, body: JSON.stringify({...JSON.parse(options.body), ignore_eos: true, max_tokens: 1900})}"
        " : options);"
    )
    before = generated_at_the_end(server)
    page.browser.execute_script(  # at the first word, however slow this test is to see it
        "const stop = document.getElementById('stop'), answer = document.getElementById('answer');"
        "const observer = new MutationObserver(() => answer.textContent && (observer.disconnect(), stop.click()));"
        "observer.observe(answer, {childList: true, subtree: true, characterData: true});"
    )

    page.ask("Count from one to twenty.")

    assert page.until(lambda: "stopped by you" in page.text("facts"), 60)
    assert page.text("answer") != ""
    assert wait_until(lambda: metric(server, "vlm_relay_running_sequences") == 0)
    assert generated_at_the_end(server) - before < 1900
