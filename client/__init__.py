"""What a user runs: client library and command line for a vlm-relay server.

    from client import Overloaded, RelayClient

    with RelayClient("127.0.0.1:8001", retries=3) as client:
        answer = client.ask("What is in the picture?", images=["picture.jpg"], max_tokens=64)
        print(answer.text, answer.num_output_tokens, answer.ttft_s)

        with client.stream("And now in detail.", images=["picture.jpg"], temperature=0.7, seed=1) as stream:
            for chunk in stream:  # leaving the block early cancels the request on the server
                print(chunk.text, end="", flush=True)

`AsyncRelayClient` is the same with `await client.ask(...)`, `async with client.stream(...)` and `async for`.
"""

from client.answer import Alternative, Answer, Chunk, Progress
from client.errors import (
    Cancelled,
    DeadlineExceeded,
    ImageNotReadable,
    InvalidRequest,
    Overloaded,
    RelayClientError,
    ServerError,
    ServerUnreachable,
    Unavailable,
)
from client.relay import AnswerStream, RelayClient
from client.relay_async import AsyncAnswerStream, AsyncRelayClient
from client.request import Message, Options, Sampling

__all__ = [
    "Alternative",
    "Answer",
    "AnswerStream",
    "AsyncAnswerStream",
    "AsyncRelayClient",
    "Cancelled",
    "Chunk",
    "DeadlineExceeded",
    "ImageNotReadable",
    "InvalidRequest",
    "Message",
    "Options",
    "Overloaded",
    "Progress",
    "RelayClient",
    "RelayClientError",
    "Sampling",
    "ServerError",
    "ServerUnreachable",
    "Unavailable",
]
