"""LiteLLM's `openai/` provider against the gateway: a picture, whole and streamed.

Usage: python examples/litellm_chat.py [http://127.0.0.1:9000]          (pip install litellm)
"""

import base64
import sys
from pathlib import Path

import litellm

GATEWAY = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:9000"
PICTURE = Path(__file__).parents[1] / "demo" / "picture.jpg"

uri = "data:image/jpeg;base64," + base64.b64encode(PICTURE.read_bytes()).decode()
content = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "What is in the picture?"}]
request = {
    "model": "openai/llava",
    "api_base": f"{GATEWAY}/v1",
    "api_key": "none",
    "messages": [{"role": "user", "content": content}],
    "max_tokens": 20,
}

answer = litellm.completion(**request)
print(answer.choices[0].message.content)
print("".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(stream=True, **request)))
print(answer.usage.prompt_tokens, "tokens in,", answer.usage.completion_tokens, "out")
