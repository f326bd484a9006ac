"""Images fetched from allowed hosts, so that no address leads into the private network.

    address ─▶ host in the list? ─▶ resolved: public? ─▶ connect to that very address ─▶ bytes, within bounds
                     ▲                                                             │
                     └────────────────────── redirect, a few times ◀───────────────┘

What is checked is what is connected to: the name is resolved once, by `PublicOnly`. Nothing is fetched unless an
operator names hosts.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from typing import Self

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from client.gateway.addresses import AddressRefused, checked, is_public
from client.gateway.failure import Refused
from client.gateway.settings import MIB, Settings

MAX_REDIRECTS = 3
_CHUNK_BYTES = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "vlm-relay"}

Take = Callable[[int], None]
"""Takes so many bytes of the memory set aside for bodies; raises where there are none left."""


class PublicOnly(AbstractResolver):
    """Resolves names, and knows no name of which any address is private."""

    def __init__(self, inner: AbstractResolver) -> None:
        self._inner = inner

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The addresses of a host.

        Raises:
            AddressRefused: one of them is private: a name that is half inside is a trap.
        """
        found = await self._inner.resolve(host, port, family)
        if not all(is_public(each["host"]) for each in found):
            raise AddressRefused(f"{host} is an address of a private network")
        return found

    async def close(self) -> None:
        """Closes the resolver within."""
        await self._inner.close()


class ImageFetcher:
    """Fetches images for one gateway; used by one event loop. Enter it before use."""

    def __init__(self, settings: Settings, resolver: Callable[[], AbstractResolver] = aiohttp.ThreadedResolver) -> None:
        self._settings = settings
        self._new_resolver = resolver
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        if self._settings.image_hosts:
            inner = self._new_resolver()
            resolver = inner if self._settings.allows_private_image_hosts else PublicOnly(inner)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=self._settings.image_timeout_s),
                auto_decompress=False,  # a small file could unpack to a large one
                headers=_HEADERS,
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def fetch(self, addresses: Iterable[tuple[str, str]], take: Take) -> dict[str, bytes]:
        """The images by their addresses; each is given with its place in the request's body.

        Nothing is fetched, and nothing refused, where no host is allowed: then an address is refused with its body.

        Raises:
            Refused: one that cannot be had.
        """
        places = {address: where for where, address in addresses}  # the same twice is fetched once
        if self._session is None:
            return {}
        tasks = [asyncio.ensure_future(self._one(where, address, take)) for address, where in places.items()]
        try:
            return dict(zip(places, await asyncio.gather(*tasks), strict=True))
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, where: str, address: str, take: Take) -> bytes:
        try:
            return await self._follow(checked(address, self._settings.image_hosts), take)
        except AddressRefused as error:
            reason = str(error)
        except TimeoutError:
            reason = f"the image did not arrive within {self._settings.image_timeout_s:g} s"
        except aiohttp.ClientError as error:
            reason = f"the image cannot be fetched: {type(error).__name__}"  # its text names inner addresses
        raise Refused(f"{where}: {reason}", "messages", code="invalid_image_url")

    async def _follow(self, url: URL, take: Take) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            found = await self._get(url, take)
            if isinstance(found, bytes):
                return found
            url = checked(str(found), self._settings.image_hosts)
        raise AddressRefused(f"the image is behind more than {MAX_REDIRECTS} redirects")

    async def _get(self, url: URL, take: Take) -> bytes | URL:
        """The file, or the address that it is redirected to."""
        assert self._session is not None
        host = url.raw_host or ""
        if not self._settings.allows_private_image_hosts and _is_ip(host) and not is_public(host):
            raise AddressRefused(f"{host} is an address of a private network")  # no resolver sees it
        async with self._session.get(url, allow_redirects=False) as response:
            if response.status in _REDIRECTS:
                try:
                    return url.join(URL(response.headers.get("Location", "")))
                except ValueError:
                    raise AddressRefused("the image is redirected to what is no address") from None
            if response.status != 200:
                raise AddressRefused(f"{url.raw_host} answers {response.status}")
            return await self._read(response, take)

    async def _read(self, response: aiohttp.ClientResponse, take: Take) -> bytes:
        limit = self._settings.max_image_mib * MIB
        parts: list[bytes] = []
        num_bytes = 0
        async for part in response.content.iter_chunked(_CHUNK_BYTES):
            num_bytes += len(part)
            if num_bytes > limit:
                raise AddressRefused(f"the image is larger than the {self._settings.max_image_mib} MiB allowed")
            take(len(part))
            parts.append(part)
        if not parts:
            raise AddressRefused("the image is empty")
        return b"".join(parts)


def _is_ip(host: str) -> bool:
    try:
        is_public(host)
    except ValueError:
        return False
    return True
