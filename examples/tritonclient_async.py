"""Triton's own gRPC client with asyncio: three questions about a picture at a time.

Usage: python examples/tritonclient_async.py [127.0.0.1:8001]
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import tritonclient.grpc.aio as triton

SERVER = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001"
PICTURE = Path(__file__).parents[1] / "demo" / "picture.jpg"
QUESTIONS = ("What is in the picture?", "How many objects are there?", "What colour is the circle?")


def tensor(name: str, datatype: str, value: object) -> triton.InferInput:
    """One input with one element."""
    made = triton.InferInput(name, [1], datatype)
    made.set_data_from_numpy(np.array([value], dtype=object if datatype == "BYTES" else bool))
    return made


async def requests(question: str) -> AsyncIterator[dict[str, object]]:
    """The one request of a stream; ending the iteration closes our side of it."""
    inputs = [
        tensor("text_input", "BYTES", question.encode()),
        tensor("image", "BYTES", PICTURE.read_bytes()),
        tensor("stream", "BOOL", True),
        tensor("sampling_parameters", "BYTES", json.dumps({"max_tokens": 20}).encode()),
    ]
    yield {"model_name": "llava", "inputs": inputs, "enable_empty_final_response": True}


async def ask(client: triton.InferenceServerClient, question: str) -> str:
    """The whole answer, gathered from its stream."""
    answer = ""
    async for result, error in client.stream_infer(requests(question)):
        if error is not None:
            raise error
        text = result.as_numpy("text_output")
        answer += "" if text is None else text[0].decode()
    return answer


async def main() -> None:
    """Ask all questions at once."""
    async with triton.InferenceServerClient(SERVER) as client:
        answers = await asyncio.gather(*(ask(client, question) for question in QUESTIONS))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question} {answer.strip()}")


asyncio.run(main())
