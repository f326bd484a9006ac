#!/bin/sh
# A picture and a question to the gateway, the answer streamed. Usage: examples/curl.sh [http://127.0.0.1:9000]
set -eu
gateway=${1:-http://127.0.0.1:9000}
cd "$(dirname "$0")/.."

# The body goes through a pipe: an image is too long for a command line. With VLM_RELAY_API_KEYS set, add
# -H "Authorization: Bearer $KEY".
curl --silent --show-error --fail-with-body --no-buffer "$gateway/v1/chat/completions" \
    -H 'Content-Type: application/json' -d @- <<JSON
{
  "model": "llava",
  "stream": true,
  "max_tokens": 20,
  "messages": [{"role": "user", "content": [
    {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,$(base64 -w0 demo/picture.jpg)"}},
    {"type": "text", "text": "What is in the picture?"}
  ]}]
}
JSON
