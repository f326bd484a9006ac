"""Where the server is and how long a connection to it may take; shared by both clients."""

from __future__ import annotations

import re

from client.errors import InvalidRequest

DEFAULT_ADDRESS = "127.0.0.1:8001"  # Triton's gRPC port
CONNECT_TIMEOUT_S = 5.0
# The server ends a request at its deadline itself; past this, it is taken for hung.
DEADLINE_GRACE_S = 5.0
# After an error or the final response the server ends the call at once; past this, the client does.
LINGER_S = 1.0

_ADDRESS = re.compile(r"(?:grpc://)?((?:\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):\d{1,5})/?")


def address_from(url: str) -> str:
    """`host:port` out of `host:port` or `grpc://host:port`.

    Raises:
        InvalidRequest: anything else, such as the address of an HTTP port or one without a port.
    """
    found = _ADDRESS.fullmatch(url.strip())
    if found is None:
        raise InvalidRequest(f"the server's address must be host:port of its gRPC port, not {url!r}")
    return found.group(1)


def channel_options(connect_timeout_s: float) -> list[tuple[str, int | str]]:
    """gRPC's channel arguments: a bounded connect, short pauses between tries, messages of any size.

    Proxies named in the environment are not used: the server is on this machine or inside the cluster.
    """
    return [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.min_reconnect_backoff_ms", max(100, round(connect_timeout_s * 1000))),  # bounds one try
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),  # another client's failed try must not delay this one
        ("grpc.lb_policy_name", "round_robin"),  # over all addresses of the name: a headless service has one per pod
    ]
