"""The OpenAI-compatible gateway: chat and text completions over HTTP, in front of one vlm-relay server.

    from client.gateway.app import create_app
    from client.gateway.settings import Settings

    app = create_app(Settings(url="127.0.0.1:8001"))  # any ASGI server runs it; `vlm-relay gateway` does

A request's way: `edge` (request id, key, size) -> `bodies` (what may be said) -> `question` (what the server
is asked) -> `response` (first token, stream, disconnect), in the words of `wording`.
"""
