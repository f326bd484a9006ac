"""Where the images of a request are, when they are addresses; and which addresses may be asked. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

from yarl import URL

from client.errors import InvalidRequest

DEFAULT_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?|\[[0-9a-f:.]+\]")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # the last 32 bits are an IPv4 address, RFC 6052


class AddressRefused(Exception):
    """An image's address that is not asked; the message says why."""


def host_from(text: str) -> str:
    """An entry of the list of allowed hosts, as `host` (ports 80 and 443) or `host:port`, in lower case.

    Raises:
        InvalidRequest: a pattern, a URL, or anything else that is not one host.
    """
    host, port = text.strip().lower(), ""
    if found := re.fullmatch(r"(.*?):(\d{1,5})", host):
        host, port = found.groups()
    if not _HOST.fullmatch(host) or (port and not 0 < int(port) < 65536):
        raise InvalidRequest(f"an image host must be HOST or HOST:PORT, without patterns, not {text!r}")
    return f"{host}:{int(port)}" if port else host


def checked(address: str, hosts: Collection[str]) -> URL:
    """The address, when its host and port stand in the list.

    Raises:
        AddressRefused: they do not, or it is no http(s) address.
    """
    try:
        url = URL(address)
        host, port = url.raw_host or "", url.port
    except ValueError:
        raise AddressRefused("not a web address") from None
    if url.scheme not in DEFAULT_PORTS or not host or port is None:
        raise AddressRefused("not an http or https address")
    if url.user is not None or url.password is not None:
        raise AddressRefused("an address with a user name or password is not asked")
    shown = f"[{host}]" if ":" in host else host
    allowed = {f"{shown}:{port}"} | ({shown} if port == DEFAULT_PORTS[url.scheme] else set())
    if allowed.isdisjoint(hosts):
        raise AddressRefused(f"images are not fetched from {shown}:{port}; allowed: {', '.join(sorted(hosts))}")
    return url


def is_public(address: str) -> bool:
    """Whether an IP address is one of the open network, also where it wraps another one."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None and not is_public(str(inner)):
            return False
    return found.is_global and not found.is_multicast and not found.is_reserved
