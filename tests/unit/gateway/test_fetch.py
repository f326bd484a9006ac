"""Images by address: only from listed hosts, only from the open network unless told otherwise, within bounds."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from client.errors import InvalidRequest
from client.gateway.addresses import AddressRefused, checked, host_from, is_public
from client.gateway.fetch import ImageFetcher, PublicOnly
from client.gateway.settings import Settings
from tests.unit.gateway.conftest import Start, Upstream

IMAGE = b"\x89PNG and the rest"


class Site(ThreadingHTTPServer):
    """A web server with a few paths; notes what it was asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str]] = []
        self.ending = threading.Event()

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.asked.append((self.headers["Host"], self.path))
        kind, _, rest = self.path[1:].partition("/")
        if kind == "to":
            self.send_response(302)
            self.send_header("Location", rest)
            self.end_headers()
            return
        self.send_response(404 if kind == "missing" else 200)
        self.end_headers()
        if kind == "slow":
            self.server.ending.wait(20)
        for _ in range(int(rest) if kind == "large" else 1):
            self.wfile.write(IMAGE if kind == "image" else bytes(2**20 if kind == "large" else 0))

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def site() -> Iterator[Site]:
    """A running web server."""
    running = Site()
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield running
    running.ending.set()
    running.shutdown()
    running.server_close()
    thread.join()


class Names(AbstractResolver):
    """Answers from a table, and counts the questions."""

    def __init__(self, table: dict[str, list[str]]) -> None:
        self._table = table
        self.asked: list[str] = []

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_INET) -> list[ResolveResult]:
        self.asked.append(host)
        return [
            ResolveResult(hostname=host, host=each, port=port, family=socket.AF_INET, proto=0, flags=0)
            for each in self._table[host]
        ]

    async def close(self) -> None:
        """Nothing."""


def _part(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_an_image_of_a_listed_host_reaches_the_server_as_if_it_had_been_sent(
    upstream: Upstream, start: Start, site: Site
) -> None:
    upstream.answers("a car")
    gateway = start(image_hosts=frozenset({f"127.0.0.1:{site.port}"}), allows_private_image_hosts=True)
    url = f"http://127.0.0.1:{site.port}/image/a.png"

    response = gateway.chat([_part(url), {"type": "text", "text": "What?"}, _part(url)])

    assert response.status_code == 200
    assert upstream.tensors()["image"].count(IMAGE) == 2
    assert len(site.asked) == 1  # the same one is fetched once


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("http://other.example/a.png", "not fetched from other.example:80"),
        ("https://127.0.0.1:{port}0/a.png", "not a web address"),
        ("http://127.0.0.1:{port}/missing", "answers 404"),
        ("http://127.0.0.1:{port}/empty", "is empty"),
        ("http://127.0.0.1:{port}/large/3", "larger than the 2 MiB"),
        ("http://127.0.0.1:{port}/slow", "within 0.3 s"),
        ("http://127.0.0.1:{port}/to/http://other.example/a", "not fetched from other.example:80"),
        ("http://127.0.0.1:{port}/to/file:///etc/passwd", "not an http or https address"),
        ("http://127.0.0.1:{port}/to//to//to//to//to//image", "more than 3 redirects"),
        ("http://user@127.0.0.1:{port}/image", "user name"),
    ],
)
def test_what_cannot_be_fetched_is_a_400_that_says_why(
    upstream: Upstream, start: Start, site: Site, path: str, words: str
) -> None:
    hosts = frozenset({f"127.0.0.1:{site.port}"})
    timeout_s = 0.3 if path.endswith("/slow") else 20
    gateway = start(image_hosts=hosts, allows_private_image_hosts=True, max_image_mib=2, image_timeout_s=timeout_s)

    response = gateway.chat([_part(path.format(port=site.port))])

    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_image_url", "messages")
    assert "messages.0.content.0.image_url: " in error["message"]
    assert words in error["message"]
    assert upstream.requests == []


def test_a_redirect_to_a_listed_host_is_followed(upstream: Upstream, start: Start, site: Site) -> None:
    upstream.answers("a car")
    gateway = start(image_hosts=frozenset({f"127.0.0.1:{site.port}"}), allows_private_image_hosts=True)

    response = gateway.chat([_part(f"http://127.0.0.1:{site.port}/to//image/a.png")])

    assert response.status_code == 200
    assert [path for _, path in site.asked] == ["/to//image/a.png", "/image/a.png"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_listed_host_in_the_private_network_is_not_asked_unless_told_so(
    upstream: Upstream, start: Start, site: Site, host: str
) -> None:
    gateway = start(image_hosts=frozenset({f"{host}:{site.port}"}))

    response = gateway.chat([_part(f"http://{host}:{site.port}/image/a.png")])

    assert response.status_code == 400
    assert "private network" in response.json()["error"]["message"]
    assert site.asked == []


def test_fetched_images_count_into_the_memory_of_all_bodies(upstream: Upstream, start: Start, site: Site) -> None:
    hosts = frozenset({f"127.0.0.1:{site.port}"})
    gateway = start(image_hosts=hosts, allows_private_image_hosts=True, max_bodies_mib=1)

    refused = gateway.chat([_part(f"http://127.0.0.1:{site.port}/large/2")])
    upstream.answers("yes")
    after = gateway.chat("What?")

    assert (refused.status_code, after.status_code) == (429, 200)


def test_a_name_is_resolved_once_and_connected_to_where_it_was_checked(site: Site) -> None:
    names = Names({"pictures.example": ["127.0.0.1"]})
    hosts = frozenset({f"pictures.example:{site.port}"})
    settings = Settings(image_hosts=hosts, allows_private_image_hosts=True)
    address = f"http://pictures.example:{site.port}/image/a.png"

    async def fetch() -> dict[str, bytes]:
        async with ImageFetcher(settings, lambda: names) as fetcher:
            return await fetcher.fetch([("here", address)], lambda _: None)

    assert asyncio.run(fetch()) == {address: IMAGE}
    assert names.asked == ["pictures.example"]
    assert site.asked == [(f"pictures.example:{site.port}", "/image/a.png")]


def test_a_name_with_one_private_address_among_its_addresses_is_refused() -> None:
    resolver = PublicOnly(Names({"half.example": ["93.184.216.34", "10.0.0.1"], "open.example": ["93.184.216.34"]}))

    with pytest.raises(AddressRefused, match="private network"):
        asyncio.run(resolver.resolve("half.example", 80))
    assert len(asyncio.run(resolver.resolve("open.example", 80))) == 1


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),  # where clouds keep their credentials
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("2002:0a00:0001::1", False),  # 6to4 of 10.0.0.1
        ("64:ff9b::10.0.0.1", False),  # NAT64 of 10.0.0.1
        ("ff02::1", False),
    ],
)
def test_what_is_public(address: str, expected: bool) -> None:
    assert is_public(address) is expected


@pytest.mark.parametrize(
    ("address", "is_allowed"),
    [
        ("https://a.example/x.png", True),
        ("HTTP://A.EXAMPLE/x.png", True),
        ("http://a.example:80/x.png", True),
        ("http://a.example:8080/x.png", False),
        ("http://b.example:8080/x.png", True),
        ("http://b.example/x.png", False),
        ("http://sub.a.example/x.png", False),
        ("http://a.example.evil.example/x.png", False),
        ("http://evil.example/a.example", False),
        ("http://evil.example#a.example", False),
        ("http://a.example@evil.example/", False),
        ("http://evil.example\\@a.example/", False),
        ("http://a.example:99999/", False),
        ("http:///x.png", False),
        ("ftp://a.example/x.png", False),
        ("", False),
    ],
)
def test_only_the_very_hosts_of_the_list_are_allowed(address: str, is_allowed: bool) -> None:
    hosts = {"a.example", "b.example:8080"}

    if is_allowed:
        assert checked(address, hosts).host in ("a.example", "b.example")
    else:
        with pytest.raises(AddressRefused):
            checked(address, hosts)


@pytest.mark.parametrize(
    ("text", "expected"), [("A.example", "a.example"), ("a.example:080", "a.example:80"), ("[::1]:9", "[::1]:9")]
)
def test_a_host_of_the_list_is_written_one_way(text: str, expected: str) -> None:
    assert host_from(text) == expected


@pytest.mark.parametrize("text", ["*.example", "http://a.example", "a.example/x", "", "a b", "a.example:0", ".example"])
def test_a_host_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="image host"):
        host_from(text)
