"""The `vlm-relay` command. Each subcommand is a thin call into the package that owns it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from client.errors import InvalidRequest, RelayClientError
from client.gateway.__main__ import port_from

USAGE, FAILED, INTERRUPTED = 2, 1, 130

Commands = argparse._SubParsersAction  # what add_subparsers gives; argparse has no public name for it


def _say(text: str) -> None:
    print(f"vlm-relay: {text}", file=sys.stderr, flush=True)


def _serve(arguments: argparse.Namespace) -> int:
    from launcher.serve import plan_of, serve

    ports = (arguments.host, arguments.http_port, arguments.grpc_port, arguments.metrics_port)
    plan = plan_of(arguments.profile, arguments.checkpoint, arguments.artifacts, arguments.redis_url)
    return serve(plan, ports, os.environ, _say, arguments.health_port)


def _up(arguments: argparse.Namespace) -> int:
    from client.gateway.__main__ import settings_from
    from launcher.serve import plan_of
    from launcher.up import up

    logging.getLogger("client.gateway").setLevel(logging.INFO)  # one line per request
    ports = (arguments.host, arguments.http_port, arguments.grpc_port, arguments.metrics_port)
    return up(
        plan_of(arguments.profile, arguments.checkpoint, arguments.artifacts, arguments.redis_url),
        ports,
        (arguments.host, arguments.port),
        lambda url, metrics_url: settings_from(arguments, url, metrics_url, os.environ),
        os.environ,
        _say,
    )


def _batch(arguments: argparse.Namespace) -> int:
    from client.batch import run

    tally = run(arguments, os.environ)
    _say(str(tally))
    return FAILED if tally.num_failed or tally.num_left else 0


def _load(arguments: argparse.Namespace) -> int:
    from client.load import run

    report = run(arguments, os.environ)
    print(report.text())
    return FAILED if report.errors else 0


def _build(arguments: argparse.Namespace) -> int:
    from launcher.build import build
    from launcher.serve import plan_of

    plan = plan_of(arguments.profile, arguments.checkpoint, arguments.artifacts)
    for path in build(plan, _say, arguments.force, arguments.target, os.environ):
        _say(f"current: {path}")
    return 0


def _profile(arguments: argparse.Namespace) -> int:
    from launcher.profile import profile
    from launcher.serve import plan_of

    plan = plan_of(arguments.profile, arguments.checkpoint)
    print(profile(plan, arguments.url, arguments.out, os.environ, _say))
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from launcher.demo import demo
    from launcher.serve import plan_of

    return demo(plan_of(arguments.profile, arguments.checkpoint, arguments.artifacts), os.environ, _say, arguments.log)


def _completion(arguments: argparse.Namespace) -> int:
    from launcher.completion import script

    print(script(_parser(), arguments.shell))
    return 0


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    from python_backend.checkpoint import PROJECT_ROOT

    default = PROJECT_ROOT / "deploy" / "profiles" / "cpu.toml"
    parser.add_argument("--profile", type=Path, default=default, help="deployment profile (%(default)s)")
    parser.add_argument("--checkpoint", help="a Hugging Face LLaVA folder, instead of the profile's")
    parser.add_argument("--artifacts", help="folder for what is built from it, instead of the profile's")


def _add_server_ports(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--redis-url",
        default=os.environ.get("VLM_RELAY_REDIS_URL"),
        help="embedding cache shared by servers, instead of the profile's; better in VLM_RELAY_REDIS_URL",
    )
    parser.add_argument("--http-port", type=port_from, default=8000, help="0 is any free one (%(default)s)")
    parser.add_argument("--grpc-port", type=port_from, default=8001, help="0 is any free one (%(default)s)")
    parser.add_argument("--metrics-port", type=port_from, default=8002, help="0 is any free one (%(default)s)")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vlm-relay", description="Serve vision-language models on Triton.")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_serving(commands)
    _add_clients(commands)
    _add_planning(commands)
    _add_shell(commands)
    return parser


def _add_serving(commands: Commands[argparse.ArgumentParser]) -> None:
    """What starts a server."""
    import client.gateway.__main__ as gateway

    command = commands.add_parser("serve", help="start the server and serve until Ctrl-C")
    _add_plan_options(command)
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    _add_server_ports(command)
    command.add_argument("--health-port", type=port_from, help="for a cluster's probes and its order to drain (none)")
    command.set_defaults(run=_serve)

    command = commands.add_parser("up", help="start the server and the gateway together")
    _add_plan_options(command)
    _add_server_ports(command)
    gateway.configure_listening(command)
    command.set_defaults(run=_up)

    command = commands.add_parser("demo", help="start, ask about the shipped picture, stop")
    _add_plan_options(command)
    command.add_argument("--log", type=Path, default=Path("build/demo.log"), help="server's log (%(default)s)")
    command.set_defaults(run=_demo)


def _add_clients(commands: Commands[argparse.ArgumentParser]) -> None:
    """What talks to a running server."""
    import client.__main__ as ask
    import client.batch as batch
    import client.gateway.__main__ as gateway
    import client.load as load

    command = commands.add_parser("gateway", help="OpenAI's HTTP interface for a running server")
    gateway.configure(command)
    command.set_defaults(run=gateway.run)

    command = commands.add_parser("ask", help="ask a running server about images")
    ask.configure(command)
    command.set_defaults(run=ask.run)

    command = commands.add_parser("batch", help="answer a file of questions; run again, it does what is left")
    batch.configure(command)
    command.set_defaults(run=_batch)

    command = commands.add_parser("load", help="put load on a running server and say how it did")
    load.configure(command)
    command.set_defaults(run=_load)


def _add_planning(commands: Commands[argparse.ArgumentParser]) -> None:
    """What prepares or explains a deployment."""
    import scheduler.__main__ as render
    import scheduler.advise.__main__ as advise
    import scheduler.simulate.__main__ as simulate
    import scheduler.topology.command as topology
    from scheduler.output_file import output_file

    command = commands.add_parser("build", help="build the vision encoder ahead of time: ONNX graph, TensorRT engine")
    _add_plan_options(command)
    command.add_argument("--force", action="store_true", help="build also when a current one is there")
    targets = "auto is what the profile's encode.runtime needs; tensorrt needs the GPU that will run it"
    command.add_argument("--target", choices=("auto", "onnx", "tensorrt"), default="auto", help=targets)
    command.set_defaults(run=_build)

    command = commands.add_parser("profile", help="measure what each stage costs here, for a profile's decisions")
    _add_plan_options(command)
    command.add_argument("--url", help="gRPC address of an idle server of that profile (default: start one)")
    command.add_argument(
        "--out", type=output_file, default=Path("build/costs.json"), help="file to write (%(default)s)"
    )
    command.set_defaults(run=_profile)

    command = commands.add_parser("plan", help="show where a profile's replicas go, and why")
    render.configure_plan(command)
    command.set_defaults(run=render.run_plan)

    command = commands.add_parser("render", help="write a profile's placement into a model repository")
    render.configure(command)
    command.set_defaults(run=render.run)

    command = commands.add_parser("simulate", help="serve a workload on a simulated server of a profile")
    simulate.configure(command)
    command.set_defaults(run=simulate.run)

    command = commands.add_parser(
        "advise", help="whether to give the encoder GPUs of its own, and which profile to run"
    )
    advise.configure(command)
    command.set_defaults(run=advise.run)

    command = commands.add_parser("topology", help="show what links this machine's GPUs, or those of a text")
    topology.configure(command)
    command.set_defaults(run=topology.run)


def _add_shell(commands: Commands[argparse.ArgumentParser]) -> None:
    """What belongs to the command line itself."""
    command = commands.add_parser(
        "completion",
        help="print a script that completes this command in a shell",
        description='Completes words after TAB: eval "$(vlm-relay completion bash)", in ~/.bashrc to keep it.',
    )
    command.add_argument("shell", choices=("bash", "zsh", "fish", "tcsh"), help="the shell to print it for")
    command.set_defaults(run=_completion)


def main(argv: list[str] | None = None) -> int:
    """The command line; its exit code."""
    logging.basicConfig(level=logging.WARNING, format="vlm-relay: %(message)s")
    try:
        arguments = _parser().parse_args(argv)  # imports what the commands need, which takes a while
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except OSError as error:
        _say(str(error) if error.filename is None else f"{error.filename}: {error.strerror}")
        return FAILED
    except (ValueError, RuntimeError, RelayClientError) as error:  # what a user can mend
        _say(str(error))
        return USAGE if isinstance(error, ValueError | InvalidRequest) else FAILED


if __name__ == "__main__":
    sys.exit(main())
