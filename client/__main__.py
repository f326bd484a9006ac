"""The command `ask`: a question about pictures, answered on the terminal as the words come.

Usable by itself (`python -m client ask`) and as a subcommand of a larger parser (`configure`, then `run`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from client.answer import Answer
from client.channel import DEFAULT_ADDRESS
from client.errors import InvalidRequest, RelayClientError
from client.relay import AnswerStream, RelayClient
from client.request import Options

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def configure(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `ask`."""
    parser.description = "Ask a question about pictures, or none, and print the answer as it comes."
    parser.epilog = "Exit status: 0 answered, 1 the server failed, 2 wrong usage, 130 interrupted."
    parser.add_argument("images", nargs="*", metavar="IMAGE", help="picture files, in the order they are shown")
    parser.add_argument("question", metavar="QUESTION", help="the last argument is the question")
    parser.add_argument("--url", default=DEFAULT_ADDRESS, help="host:port of the server's gRPC port (%(default)s)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="end the answer after N tokens")
    parser.add_argument("--temperature", type=float, metavar="T", help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, metavar="N", help="the same answer each time at a temperature")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before TEXT; may be repeated")
    parser.add_argument("--priority", type=int, default=0, metavar="N", help="smaller is more urgent (%(default)s)")
    parser.add_argument("--deadline-s", type=float, metavar="S", help="give up S seconds after sending")
    parser.add_argument("--stats", action="store_true", help="times, counts and the decision on stderr")
    parser.add_argument("--json", action="store_true", help="print one JSON object, when the answer is complete")


def run(arguments: argparse.Namespace) -> int:
    """Ask as `arguments` say; the exit status. An error is one line on stderr."""
    if not arguments.images and _is_file(arguments.question):
        return _complain(f"the question is missing: {arguments.question!r} is a file", USAGE)
    try:
        with RelayClient(arguments.url) as client:
            return _ask(client.stream(arguments.question, images=arguments.images, **_options(arguments)), arguments)
    except InvalidRequest as error:  # before anything was sent
        return _complain(str(error), USAGE)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone. Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m client`; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m client", description="Ask a vlm-relay server.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    configure(commands.add_parser("ask", help="ask a question about pictures"))
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else USAGE
    return run(arguments)


def _ask(stream: AnswerStream, arguments: argparse.Namespace) -> int:
    with stream:
        try:
            for chunk in stream:
                if not arguments.json:
                    print(chunk.text, end="", flush=True)
        except RelayClientError as error:
            if stream.answer.text and not arguments.json:
                print(flush=True)
            return _complain(str(error), FAILED)
        except KeyboardInterrupt:
            if not arguments.json:
                print(flush=True)
            raise
    answer = stream.answer
    print(json.dumps(asdict(answer), ensure_ascii=False) if arguments.json else "", flush=True)
    if arguments.stats:
        print(_stats(answer), file=sys.stderr)
    return OK


def _options(arguments: argparse.Namespace) -> Options:
    options: Options = {
        "priority": arguments.priority,
        "deadline_s": arguments.deadline_s,
        "return_decision": arguments.stats or arguments.json,
    }
    if arguments.max_tokens is not None:
        options["max_tokens"] = arguments.max_tokens
    if arguments.temperature is not None:
        options["temperature"] = arguments.temperature
    if arguments.seed is not None:
        options["seed"] = arguments.seed
    if arguments.stop:
        options["stop"] = arguments.stop
    return options


def _stats(answer: Answer) -> str:
    rate = answer.output_tokens_per_s
    parts = [
        "first text after " + ("-" if answer.ttft_s is None else f"{answer.ttft_s * 1000:.0f} ms"),
        f"{answer.num_input_tokens} tokens in",
        f"{answer.num_output_tokens} tokens out in {answer.total_s:.2f} s",
        "-" if rate is None else f"{rate:.1f} tokens/s",
        f"ended by {answer.finish_reason or '-'}",
        "decision " + ("-" if answer.decision is None else json.dumps(answer.decision, ensure_ascii=False)),
    ]
    return " | ".join(parts)


def _complain(text: str, status: int) -> int:
    print(f"vlm-relay: {text}", file=sys.stderr)
    return status


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # far too long for a file name, or with a NUL
        return False


if __name__ == "__main__":
    sys.exit(main())
