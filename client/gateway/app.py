"""The application: its routes, and what they share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from client.answer import NO_ANSWER
from client.errors import InvalidRequest, RelayClientError
from client.gateway.bodies import ChatBody, TextBody, describe
from client.gateway.edge import BodyRefused, Edge
from client.gateway.events import Events
from client.gateway.failure import Failure, Refused, failure_from, no_model, too_busy
from client.gateway.fetch import ImageFetcher
from client.gateway.gauges import tell_gauges
from client.gateway.health import Canary
from client.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from client.gateway.question import Question, addresses_in, question_from_chat, question_from_text
from client.gateway.record import Record
from client.gateway.response import AnswerResponse
from client.gateway.settings import Settings
from client.gateway.tracing import ExportedTraces, NoTraces, Traces
from client.gateway.watching import EventsResponse
from client.gateway.wording import ChatWording, TextWording, Wording
from client.relay_async import AsyncRelayClient

logger = logging.getLogger(__name__)

PAGE = Path(__file__).with_name("page")
PAGE_PARTS = ("page.js", "panel.js", "pipeline.js", "curves.js", "stream.js", "page.css")
# Only our own files, nothing inline; a picture may be shown from where the user chose it.
PAGE_POLICY = "default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'; base-uri 'none'"
_ERRORS: dict[int | str, dict[str, object]] = {
    status: {"description": text}
    for status, text in {
        400: "wrong request",
        401: "no key",
        404: "no such model",
        408: "body too slow",
        413: "too large",
        429: "no room now",
    }.items()
}


class Gateway:
    """What the routes share: one client of the server, the metrics, the watchers."""

    def __init__(self, settings: Settings, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        self.settings = settings
        self.metrics = GatewayMetrics()
        self.events = Events(None if settings.pipeline is None else settings.pipeline.event())
        self.fetcher = ImageFetcher(settings)
        self.client = AsyncRelayClient(settings.url, model=settings.model, clock=clock)
        self.canary = Canary(self.client, settings.health_cache_s, settings.health_timeout_s, clock)
        self.traces: Traces = ExportedTraces() if settings.is_traced else NoTraces()
        self._clock = clock
        self._wall_clock = wall_clock
        self.started = int(wall_clock())

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        """Runs what runs beside the requests."""
        task = None
        if self.settings.metrics_url is not None:
            task = asyncio.create_task(
                tell_gauges(self.settings.metrics_url, self.settings.gauges_every_s, self.events)
            )
        try:
            async with self.fetcher:
                yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await self.client.close()
            await asyncio.to_thread(self.traces.close)

    def answer(self, request: Request, question: Question, words: type[ChatWording] | type[TextWording]) -> Response:
        """The response that asks the server and passes its answer on."""
        request_id: str = request.state.request_id
        options = question.options
        options["request_id"] = request_id
        span = self.traces.begin(
            f"POST {request.url.path}",
            request.state.traceparent,
            {"vlm_relay.request_id": request_id, "vlm_relay.images": len(question.images)},
        )
        options["traceparent"] = span.traceparent
        record = Record(request_id, question, self.metrics, self.events, self._clock, span)
        try:
            stream = self.client.stream(
                question.text,
                messages=question.messages,
                images=question.images,
                on_progress=record.note_progress if self.events.has_watchers else None,
                **options,
            )
        except RelayClientError as error:  # refused before anything was sent
            record.end(NO_ANSWER, failure_from(error), is_disconnect=False)
            raise
        wording: Wording = words(
            request_id, int(self._wall_clock()), self.settings.model, question.num_top_logprobs, question.includes_usage
        )
        return AnswerResponse(stream, wording, record, question.is_streaming, question.includes_usage)

    def model_card(self) -> dict[str, object]:
        """The model, as OpenAI lists it."""
        return {"id": self.settings.model, "object": "model", "created": self.started, "owned_by": "vlm-relay"}


def create_app(
    settings: Settings,
    *,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The gateway as an ASGI application; `app.state.gateway` is what its routes share."""
    gateway = Gateway(settings, clock, wall_clock)
    app = FastAPI(title="vlm-relay", version="1", lifespan=gateway.lifespan, docs_url=None, redoc_url=None)
    app.state.gateway = gateway
    _add_completions(app, gateway)
    _add_models(app, gateway)
    _add_operations(app, gateway)
    _add_page(app)
    _add_errors(app)
    app.add_middleware(Edge, settings=settings, metrics=gateway.metrics, clock=clock)
    return app


def _add_completions(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/chat/completions", response_class=JSONResponse, responses=_ERRORS)
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        addresses = addresses_in(body, gateway.settings)
        fetched = await gateway.fetcher.fetch(addresses, request.state.held.take)
        return gateway.answer(request, question_from_chat(body, gateway.settings, fetched), ChatWording)

    @app.post("/v1/completions", response_class=JSONResponse, responses=_ERRORS)
    async def completions(request: Request, body: TextBody) -> Response:
        return gateway.answer(request, question_from_text(body, gateway.settings), TextWording)


def _add_models(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/v1/models", responses={401: {"description": "no key"}})
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [gateway.model_card()]}

    @app.get("/v1/models/{model}", responses={401: {"description": "no key"}, 404: {"description": "no such model"}})
    async def model(model: str) -> dict[str, object]:
        if model != gateway.settings.model:
            raise no_model(model, gateway.settings.model)
        return gateway.model_card()


def _add_operations(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/health", responses={503: {"description": "no answer from the server"}})
    async def health() -> Response:
        found = await gateway.canary.health()
        body = {"status": found.status, "detail": found.detail}
        return JSONResponse(body, 200 if found.is_working else 503)

    @app.get("/health/live")
    async def live() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(gateway.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    @app.get("/scheduler/events", include_in_schema=False)
    async def events() -> Response:
        if not gateway.events.has_room:
            return _respond(too_busy("too many are watching"))
        return EventsResponse(gateway.events)


def _add_page(app: FastAPI) -> None:
    headers = {
        "Content-Security-Policy": PAGE_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",  # asked again each time: there is no build step to name versions
    }

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers=headers)

    @app.get("/page/{name}", include_in_schema=False)
    async def part_of_the_page(name: str) -> Response:
        if name not in PAGE_PARTS:
            raise HTTPException(404)
        return FileResponse(PAGE / name, headers=headers)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def wrong_body(_request: Request, error: RequestValidationError) -> Response:
        message, param = describe(list(error.errors()))
        return _respond(Failure(400, message, param))

    @app.exception_handler(Refused)
    async def refused(_request: Request, error: Refused) -> Response:
        return _respond(error.failure)

    @app.exception_handler(BodyRefused)
    async def no_memory(_request: Request, error: BodyRefused) -> Response:
        return _respond(error.failure)

    @app.exception_handler(InvalidRequest)
    async def invalid(_request: Request, error: InvalidRequest) -> Response:
        return _respond(failure_from(error))

    @app.exception_handler(HTTPException)
    async def http_error(_request: Request, error: HTTPException) -> Response:
        return _respond(Failure(error.status_code, str(error.detail), headers=dict(error.headers or {})))

    @app.exception_handler(Exception)
    async def our_fault(_request: Request, _error: Exception) -> Response:
        return _respond(Failure(500, "an error inside the gateway; its log says more"))


def _respond(failure: Failure) -> Response:
    return JSONResponse(failure.body(), failure.status, headers=dict(failure.headers))
