"""The page in headless Chromium, in front of a scripted Triton."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from client.gateway.pipeline import pipeline_from
from tests.unit.gateway.conftest import PLAN, Gateway, Start, Upstream

PICTURE = Path(__file__).parents[3] / "demo" / "picture.jpg"
MARKUP = "<img src=x onerror=document.title='owned'><b>bold</b>"
DECISION = '{"encoder":"clip_encoder_1","decoder":"llava_decoder","reason":"least pending images"}'

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium: make browser"),
]


class Page:
    """The gateway's page, open in a browser."""

    def __init__(self, browser: webdriver.Chrome, url: str) -> None:
        self.browser = browser
        browser.get(url)
        assert self.until(lambda: self.text("link") == "live")

    def element(self, name: str) -> WebElement:
        return self.browser.find_element(By.ID, name)

    def text(self, name: str) -> str:
        return self.element(name).text

    def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
        """Whether a condition comes true in time."""
        until = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def ask(self, words: str) -> None:
        self.element("question").send_keys(words)
        self.element("send").click()

    def is_answered(self) -> bool:
        return self.until(self.element("send").is_enabled)


def start_browser(tmp_path_factory: pytest.TempPathFactory) -> webdriver.Chrome:
    """A headless Chromium with an empty profile."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    profile = tmp_path_factory.mktemp("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """One Chromium for all tests of the module."""
    started = start_browser(tmp_path_factory)
    yield started
    started.quit()


@pytest.fixture
def page(browser: webdriver.Chrome, gateway: Gateway) -> Iterator[Page]:
    """The page; at the end the console may hold no complaint."""
    browser.get_log("browser")
    opened = Page(browser, gateway.url)
    yield opened
    complaints = [entry for entry in browser.get_log("browser") if "status of 4" not in entry["message"]]
    browser.get("about:blank")
    assert complaints == []


def test_a_picture_is_asked_about_and_the_answer_shown_with_its_decision(upstream: Upstream, page: Page) -> None:
    upstream.play(
        [upstream.chunk(" a ", decision=DECISION), upstream.late(upstream.chunk("red car", "stop")), upstream.final()]
    )

    page.element("files").send_keys(str(PICTURE))
    assert page.until(lambda: len(page.browser.find_elements(By.CSS_SELECTOR, "#pictures img")) == 1)
    page.ask("What is in the picture?")

    assert page.is_answered()
    assert page.text("answer") == "a red car"
    assert "3 tokens in, 2 out" in page.text("facts")
    assert page.until(lambda: "answered" in page.text("requests"))
    assert "clip_encoder_1 → llava_decoder" in page.text("requests")
    assert "least pending images" in page.text("requests")
    assert PICTURE.read_bytes() in upstream.tensors()["image"]
    assert page.element("said").get_attribute("textContent") == "The answer: a red car"


def test_an_answer_is_never_rendered_as_markup(upstream: Upstream, page: Page) -> None:
    told = json.dumps({"encoder": MARKUP, "encoders": [MARKUP], "decoder": MARKUP, "reason": MARKUP})
    upstream.play([upstream.chunk(progress="placed", decision=told), upstream.chunk(MARKUP, "stop"), upstream.final()])

    page.ask("What?")

    assert page.is_answered()
    assert page.text("answer") == MARKUP
    assert page.until(lambda: MARKUP in page.text("requests") and MARKUP in page.text("latest"))
    assert page.browser.find_elements(By.CSS_SELECTOR, "#answer *, .panel img, .panel b b, #latest *") == []
    assert page.browser.title == "vlm-relay"


@pytest.mark.parametrize("by_key", [False, True])
def test_stop_cancels_upstream_and_keeps_what_has_come(upstream: Upstream, page: Page, by_key: bool) -> None:
    upstream.play([upstream.chunk("a red"), upstream.silence()])
    page.ask("What?")
    assert page.until(lambda: page.text("answer") == "a red")

    if by_key:
        page.element("question").send_keys(Keys.ESCAPE)
    else:
        page.element("stop").click()

    assert upstream.cancelled.wait(30)
    assert page.is_answered()
    assert page.text("answer") == "a red"
    assert "stopped by you" in page.text("facts")
    assert page.until(lambda: "left" in page.text("requests"))


def test_an_error_is_told_in_words(upstream: Upstream, page: Page) -> None:
    upstream.play([upstream.fail("[UNAVAILABLE] the queue is full; retry after 1 s"), upstream.final()])

    page.ask("What?")

    assert page.until(lambda: page.text("error") != "")
    assert page.text("error") == "The server has no room right now: the queue is full; retry after 1 s"
    assert page.until(lambda: "failed" in page.text("requests"))


def test_an_error_in_the_middle_keeps_what_has_come(upstream: Upstream, page: Page) -> None:
    upstream.play([upstream.chunk("a red"), upstream.fail("[INTERNAL] the decoder broke"), upstream.final()])

    page.ask("What?")

    assert page.until(lambda: page.text("error") == "the decoder broke")
    assert page.text("answer") == "a red"


def test_all_can_be_done_with_the_keyboard(upstream: Upstream, page: Page) -> None:
    upstream.answers("yes")
    body = page.browser.find_element(By.TAG_NAME, "body")
    seen = []
    for _ in range(6):
        body.send_keys(Keys.TAB)
        focused = page.browser.switch_to.active_element
        seen.append(focused.get_attribute("id") or focused.tag_name)

    page.element("question").send_keys("What?", Keys.CONTROL, Keys.ENTER)

    assert seen == ["a", "files", "question", "summary", "send", "div"]
    assert page.is_answered()
    assert page.until(lambda: page.text("answer") == "yes")


def test_the_pipeline_is_drawn_and_a_request_moves_through_it(
    browser: webdriver.Chrome, start: Start, upstream: Upstream
) -> None:
    decision = (
        '{"encoder":"clip_encoder","encoders":["clip_encoder"],"decoder":"llava_decoder","reason":"the only one"}'
    )
    gates = [threading.Event() for _ in range(4)]
    steps = [
        upstream.chunk(progress="placed", decision=decision),
        upstream.chunk(progress="encoded"),
        upstream.chunk("a car", "stop"),
    ]
    upstream.play([*(upstream.held(*each) for each in zip(gates, steps, strict=False)), upstream.final()])
    page = Page(browser, start(pipeline=pipeline_from(PLAN)).url)

    def place() -> str:
        """Where the request's chip is."""
        found = page.browser.find_elements(By.CSS_SELECTOR, ".replica:has(.chip)")
        return found[0].get_attribute("data-replica") or "" if found else ""

    assert page.until(lambda: "cuda:0 · NVIDIA L40S" in page.text("stage-encode"))
    assert "cuda:1" in page.text("stage-decode")
    assert "NV4" in (page.element("wires").get_attribute("textContent") or "")
    assert "cuda:0 – cuda:1: NV4, about 100 GB/s" in (page.element("link-list").get_attribute("textContent") or "")
    page.element("files").send_keys(str(PICTURE))
    assert page.until(lambda: len(page.browser.find_elements(By.CSS_SELECTOR, "#pictures img")) == 1)
    page.ask("What?")
    seen = []
    for gate, name in zip(gates, ["wait", "clip_encoder", "llava_decoder"], strict=False):
        assert page.until(lambda name=name: place() == name), (name, place())
        seen.append(page.text("latest"))
        gate.set()
    assert page.is_answered()
    assert page.until(lambda: place() == "")
    assert seen[0] == ""
    assert seen[1].endswith(": the only one")


def test_every_field_has_a_label_and_every_button_a_name(page: Page) -> None:
    page.element("more").find_element(By.TAG_NAME, "summary").click()

    shown = "input, textarea, button, meter:not([hidden]), [role=region], [role=group], svg:not([aria-hidden])"
    fields = page.browser.find_elements(By.CSS_SELECTOR, shown)
    assert [field.get_attribute("outerHTML") for field in fields if not field.accessible_name] == []


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_is_wider_than_the_screen(upstream: Upstream, page: Page, width: int) -> None:
    upstream.answers("x" * 500, "yes")
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    page.ask("What?")

    assert page.is_answered()
    assert page.until(lambda: "answered" in page.text("requests"))
    assert page.browser.execute_script("return document.documentElement.scrollWidth") <= width
    page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_dropped_picture_is_shown_and_can_be_removed(page: Page) -> None:
    page.browser.execute_script(
        "const data = new DataTransfer();"
        "data.items.add(new File([new Uint8Array([1, 2])], 'dropped.png', {type: 'image/png'}));"
        "data.items.add(new File(['x'], 'notes.txt', {type: 'text/plain'}));"
        "document.getElementById('drop').dispatchEvent("
        "  new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true}));"
    )
    assert page.until(lambda: page.text("error") == "notes.txt is not a picture.")
    (remove,) = page.browser.find_elements(By.CSS_SELECTOR, "#pictures button")
    name = remove.accessible_name

    remove.click()

    assert name == "Remove dropped.png"
    assert page.browser.find_elements(By.CSS_SELECTOR, "#pictures img") == []


def test_a_key_given_under_options_opens_the_api_and_the_panel(
    browser: webdriver.Chrome, start: Start, upstream: Upstream
) -> None:
    upstream.answers("yes")
    browser.get(start(api_keys=frozenset({"secret"})).url)
    page = Page.__new__(Page)
    page.browser = browser
    assert page.until(lambda: "needs the API key" in page.text("link"))

    page.browser.find_element(By.TAG_NAME, "summary").click()
    page.element("key").send_keys("secret")
    page.ask("What?")

    assert page.is_answered()
    assert page.text("answer") == "yes"
    assert page.until(lambda: page.text("link") == "live")
    browser.get("about:blank")
