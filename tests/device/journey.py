"""The whole journey on the real server, with the demo's checkpoint: encoder and decoder on the device."""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path

from client import RelayClient
from launcher.serve import running
from python_backend.checkpoint import PROJECT_ROOT
from scheduler.deployment import plan_for
from scheduler.profile import read_profile
from tests.device.setting import Setting

PICTURE = PROJECT_ROOT / "demo" / "picture.jpg"
QUESTION = "What is in the picture?"
ANSWER = "a red circle to the left of a blue square"
NUM_REQUESTS = 20


def run(setting: Setting) -> dict[str, object]:
    """Answers, and the time to the first token with the picture known and new."""
    path = PROJECT_ROOT / "deploy" / "profiles" / ("one_gpu.toml" if setting.device == "cuda" else "cpu.toml")
    profile = read_profile(path)
    if setting.device == "cuda":
        # torch: no TensorRT on the machine that is lent; the demo's own sizes instead of a 7B model's.
        encode = profile.encode.model_copy(update={"runtime": "torch", "slots": 32})
        decode = profile.decode.model_copy(update={"kv_cache_mib": 512, "max_sequences": 16})
        model = profile.model.model_copy(update={"encoder_weights_mib": None, "decoder_weights_mib": None})
        profile = profile.model_copy(update={"encode": encode, "decode": decode, "model": model})
    said: list[str] = []
    log = io.StringIO()
    with running(plan_for(profile, path), ("127.0.0.1", 0, 0, 0), os.environ, said.append, log=log) as server:  # type: ignore[arg-type]
        address = f"127.0.0.1:{server.ports.grpc}"
        with RelayClient(address) as client:
            answer = client.ask(QUESTION, images=[str(PICTURE)]).text.strip()
            first_ms = [_first_token_ms(client) for _ in range(NUM_REQUESTS)]
    found: dict[str, object] = {
        "answer": answer,
        "is_answer_right": answer == ANSWER,
        "first_token_ms": round(sorted(first_ms)[len(first_ms) // 2], 2),
        "said": said,
    }
    if answer != ANSWER:
        print(log.getvalue()[-4000:], file=sys.stderr)
    return found


def _first_token_ms(client: RelayClient) -> float:
    began = time.perf_counter()
    with client.stream(QUESTION, images=[str(Path(PICTURE))], max_tokens=8) as stream:
        next(iter(stream))
        return (time.perf_counter() - began) * 1e3
