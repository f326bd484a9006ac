"""`vlm-relay demo`: start the server, ask about the shipped picture, print the streamed answer, stop."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from client import RelayClient
from launcher.serve import Say, running
from python_backend.checkpoint import PROJECT_ROOT
from scheduler.plan import Plan

PICTURE = PROJECT_ROOT / "demo" / "picture.jpg"
QUESTION = "What is in the picture?"


def demo(plan: Plan, variables: Mapping[str, str], say: Say, log_path: Path) -> int:
    """Runs the demonstration on free ports; the exit code. The server's log goes to `log_path`."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with (
        log_path.open("w") as log,
        running(plan, ("127.0.0.1", 0, 0, 0), variables, say, log) as server,
        RelayClient(f"127.0.0.1:{server.ports.grpc}") as client,
    ):
        say(f"asking about {PICTURE.relative_to(PROJECT_ROOT)}: {QUESTION}")
        with client.stream(QUESTION, images=[PICTURE], return_decision=True) as stream:
            for chunk in stream:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
            sys.stdout.write("\n")
            answer = stream.answer
        say(
            f"{answer.num_input_tokens} tokens in, {answer.num_output_tokens} out, first text after "
            f"{answer.ttft_s or 0:.3f} s, all after {answer.total_s:.3f} s; placed: {answer.decision}"
        )
    return 0
