"""The openai package against the gateway: a picture, a streamed answer, a second turn.

Usage: python examples/openai_python.py [http://127.0.0.1:9000]
"""

import base64
import sys
from pathlib import Path

from openai import OpenAI

GATEWAY = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:9000"
PICTURE = Path(__file__).parents[1] / "demo" / "picture.jpg"

client = OpenAI(base_url=f"{GATEWAY}/v1", api_key="none")  # the key, where VLM_RELAY_API_KEYS is set
image = {"url": "data:image/jpeg;base64," + base64.b64encode(PICTURE.read_bytes()).decode()}
messages = [
    {
        "role": "user",
        "content": [{"type": "image_url", "image_url": image}, {"type": "text", "text": "What is in the picture?"}],
    }
]

answer = ""
chunks = client.chat.completions.create(
    model="llava", messages=messages, max_tokens=20, stream=True, stream_options={"include_usage": True}
)
for chunk in chunks:
    if chunk.choices:
        words = chunk.choices[0].delta.content or ""
        answer += words
        print(words, end="", flush=True)
    else:
        print(f"\n{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out")

messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "How many objects are there?"}]
second = client.chat.completions.create(model="llava", messages=messages, max_tokens=20)
print(second.choices[0].message.content)
