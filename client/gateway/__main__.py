"""The command `gateway`: OpenAI's HTTP interface in front of a running server.

Usable by itself (`python -m client.gateway`) and as a subcommand of a larger parser (`configure`, then `run`).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from client.channel import DEFAULT_ADDRESS
from client.errors import InvalidRequest
from client.gateway.addresses import host_from
from client.gateway.settings import Settings

OK, FAILED, USAGE = 0, 1, 2
API_KEYS = "VLM_RELAY_API_KEYS"
COLLECTOR = "OTEL_EXPORTER_OTLP_ENDPOINT"


def configure(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `gateway`."""
    parser.description = "Serve OpenAI's HTTP interface, and a page, in front of a running vlm-relay server."
    parser.epilog = (
        f"API keys, if any, are read from the environment: {API_KEYS}=key1,key2; so is the collector of traces: "
        f"{COLLECTOR}=http://host:4318"
    )
    parser.add_argument("--url", default=DEFAULT_ADDRESS, help="host:port of the server's gRPC port (%(default)s)")
    parser.add_argument(
        "--metrics-url", metavar="URL", help="Triton's metrics for the live panel, http://host:port/metrics"
    )
    default = Settings().drain_s
    parser.add_argument(
        "--drain-s", type=float, default=default, metavar="N", help="at stop, seconds for running answers (%(default)s)"
    )
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help="the server's plan.json, so that the live panel knows its devices"
    )
    configure_listening(parser)


def configure_listening(parser: argparse.ArgumentParser) -> None:
    """The arguments that do not say where the server is."""
    defaults = Settings()
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=port_from, default=9000, help="0 is any free one (%(default)s)")
    parser.add_argument(
        "--model", default=defaults.model, help="the model's name in Triton and for clients (%(default)s)"
    )
    parser.add_argument(
        "--image-host",
        action="append",
        default=[],
        metavar="HOST[:PORT]",
        help="fetch images from this host; may be repeated (none: addresses of images are refused)",
    )
    parser.add_argument("--private-image-hosts", action="store_true", help="listed hosts may be in a private network")
    for name, text in (
        ("max_images", "images in one request"),
        ("max_image_mib", "size of one image"),
        ("max_body_mib", "size of one request's body"),
        ("max_in_flight", "requests at a time; more get a 429"),
        ("image_timeout_s", "seconds for fetching one image"),
        ("deadline_s", "seconds for a request that sets no deadline_ms"),
    ):
        value = getattr(defaults, name)
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(value), default=value, metavar="N", help=f"{text} (%(default)s)")


def port_from(text: str) -> int:
    """A port to listen on; a `type` of argparse."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port: 0 to 65535")
    return int(text)


def settings_from(
    arguments: argparse.Namespace, url: str, metrics_url: str | None, variables: Mapping[str, str]
) -> Settings:
    """The settings that command line and environment say.

    Raises:
        InvalidRequest: a value out of range.
    """
    keys = (key.strip() for key in variables.get(API_KEYS, "").split(","))
    return Settings(
        url=url,
        model=arguments.model,
        api_keys=frozenset(key for key in keys if key),
        max_images=arguments.max_images,
        max_image_mib=arguments.max_image_mib,
        max_body_mib=arguments.max_body_mib,
        max_in_flight=arguments.max_in_flight,
        deadline_s=arguments.deadline_s,
        image_hosts=frozenset(host_from(host) for host in arguments.image_host),
        allows_private_image_hosts=arguments.private_image_hosts,
        image_timeout_s=arguments.image_timeout_s,
        metrics_url=metrics_url,
        is_traced=bool(variables.get(COLLECTOR)),
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve as `arguments` say until Ctrl-C; the exit status."""
    try:
        from client.gateway.app import create_app
        from client.gateway.listening import PortBusy, bind
        from client.gateway.listening import run as serve
        from client.gateway.pipeline import read_pipeline
    except ModuleNotFoundError as error:
        return _complain(f"{error.name} is missing: pip install 'vlm-relay[gateway]'", USAGE)
    try:
        settings = settings_from(arguments, arguments.url, arguments.metrics_url, os.environ)
        pipeline = None if arguments.plan is None else read_pipeline(arguments.plan)
        settings = replace(settings, drain_s=arguments.drain_s, pipeline=pipeline)
        listener = bind(arguments.host, arguments.port)
    except (InvalidRequest, PortBusy) as error:
        return _complain(str(error), USAGE)
    host, port = listener.getsockname()[:2]
    logging.getLogger("client.gateway").setLevel(logging.INFO)  # one line per request
    _say(f"gateway on http://{host}:{port} for {settings.url}{'' if settings.api_keys else ', without API keys'}")
    serve(create_app(settings), listener, settings.drain_s)
    _say("gateway stopped")
    return OK


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m client.gateway`; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m client.gateway")
    configure(parser)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return run(parser.parse_args(argv))


def _say(text: str) -> None:
    print(f"vlm-relay: {text}", file=sys.stderr, flush=True)


def _complain(text: str, status: int) -> int:
    _say(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
