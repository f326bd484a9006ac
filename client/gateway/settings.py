"""What an operator can set, with the defaults and their reasons."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from client.channel import DEFAULT_ADDRESS, address_from
from client.errors import InvalidRequest
from client.gateway.addresses import host_from

if TYPE_CHECKING:
    from client.gateway.pipeline import Pipeline  # pydantic: not needed to say that the extra is missing

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Settings:
    """The gateway's settings.

    Raises:
        InvalidRequest: a value out of range; the message names it.
    """

    url: str = DEFAULT_ADDRESS  # the server's gRPC port
    model: str = "llava"  # Triton's name of the model, and the name that clients ask for
    api_keys: frozenset[str] = field(default=frozenset(), repr=False)  # empty: everybody may ask
    max_body_mib: int = 64  # three images of 20 MiB as base64 need more: lower max_image_mib or raise this
    max_bodies_mib: int = 1024  # of all requests together, so that memory is bounded
    body_timeout_s: float = 60.0  # a body that comes slower holds its memory for nothing
    max_images: int = 8  # the server's own default limit
    max_image_mib: int = 20  # the server's own default limit
    max_in_flight: int = 1024  # above the server's 128 served and 512 waiting: it refuses first
    deadline_s: float = 600.0  # for a request that sets none: nobody waits longer for an HTTP answer
    drain_s: float = 30.0  # at stop, how long running answers may take to finish
    health_cache_s: float = 5.0  # a probe asks every few seconds, from several places
    health_timeout_s: float = 10.0
    image_hosts: frozenset[str] = frozenset()  # `host` or `host:port`; none: no address of an image is asked
    allows_private_image_hosts: bool = False  # a listed host may be inside: an image store of the operator's own
    image_timeout_s: float = 10.0  # for one image, redirects and all
    metrics_url: str | None = None  # Triton's metrics, for the live panel
    gauges_every_s: float = 1.0
    is_traced: bool = False  # spans go to the collector that the environment names
    pipeline: Pipeline | None = None  # what the live panel draws; None: what the gauges and decisions name

    def __post_init__(self) -> None:
        address_from(self.url)
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
                raise InvalidRequest(f"{each.name} must be above 0, not {value!r}")
        if any(host_from(host) != host for host in self.image_hosts):
            raise InvalidRequest(f"image hosts must be in lower case, not {', '.join(self.image_hosts)}")
        if any(not key or key != key.strip() for key in self.api_keys):
            raise InvalidRequest("an API key is empty or has spaces around it")
        if self.metrics_url is not None and not self.metrics_url.startswith(("http://", "https://")):
            raise InvalidRequest(f"metrics_url must begin with http:// or https://, not {self.metrics_url!r}")
