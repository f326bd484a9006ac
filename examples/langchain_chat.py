"""LangChain's OpenAI chat model against the gateway: a picture, whole and streamed.

Usage: python examples/langchain_chat.py [http://127.0.0.1:9000]          (pip install langchain-openai)
"""

import base64
import sys
from pathlib import Path

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

GATEWAY = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:9000"
PICTURE = Path(__file__).parents[1] / "demo" / "picture.jpg"

uri = "data:image/jpeg;base64," + base64.b64encode(PICTURE.read_bytes()).decode()
question = HumanMessage(
    content=[{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "What is in the picture?"}]
)
model = ChatOpenAI(model="llava", base_url=f"{GATEWAY}/v1", api_key="none", max_tokens=20)

answer = model.invoke([question])
print(answer.content)
print("".join(chunk.content for chunk in model.stream([question])))
print(answer.usage_metadata["input_tokens"], "tokens in,", answer.usage_metadata["output_tokens"], "out")
