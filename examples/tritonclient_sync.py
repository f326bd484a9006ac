"""Triton's own gRPC client: a picture, a question, the answer streamed by callback.

Usage: python examples/tritonclient_sync.py [127.0.0.1:8001]
"""

import json
import queue
import sys
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton

SERVER = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001"
PICTURE = Path(__file__).parents[1] / "demo" / "picture.jpg"


def tensor(name: str, datatype: str, value: object) -> triton.InferInput:
    """One input with one element."""
    made = triton.InferInput(name, [1], datatype)
    made.set_data_from_numpy(np.array([value], dtype=object if datatype == "BYTES" else bool))
    return made


inputs = [
    tensor("text_input", "BYTES", b"What is in the picture?"),
    tensor("image", "BYTES", PICTURE.read_bytes()),
    tensor("stream", "BOOL", True),
    tensor("sampling_parameters", "BYTES", json.dumps({"max_tokens": 20}).encode()),
]
replies: queue.Queue = queue.Queue()
with triton.InferenceServerClient(SERVER) as client:
    client.start_stream(lambda result, error: replies.put((result, error)))
    client.async_stream_infer("llava", inputs, enable_empty_final_response=True)
    while True:
        result, error = replies.get()
        if error is not None:
            sys.exit(str(error))  # "[UNAVAILABLE] ...; retry after 1 s", say
        text = result.as_numpy("text_output")
        if text is not None:
            print(text[0].decode(), end="", flush=True)
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
    client.stop_stream()  # a stream left open delays the server's stop
print()
