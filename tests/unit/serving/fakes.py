"""Stages, clients, prompts, time and a meter that do as a test tells them, and note what was asked of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from python_backend.errors import RelayError
from python_backend.generate import GenerateRequest, Returns
from python_backend.prompt import Prompt
from python_backend.relay import Relay
from python_backend.request import SamplingParameters
from python_backend.stream import Chunk, DecodeJob, Encoded, Progress, Reply
from scheduler.decision import Decision
from scheduler.plan import Plan, Replica
from scheduler.profile import DecodeTable, EncodeTable, LimitsTable
from scheduler.routing import Router

PATIENCE_S = 10.0  # far longer than anything here takes; only a broken promise waits this long

Answer = Callable[[DecodeJob], Iterator[Chunk]]


class Clock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Lets time pass; the watch sees it at its next look."""
        self.now_s += seconds


class Gate:
    """Holds whoever passes until it opens, and tells that somebody came."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self._reached = threading.Event()

    def open(self) -> None:
        """Lets all pass, now and later."""
        self._opened.set()

    def pass_through(self) -> None:
        """Returns once the gate is open."""
        self._reached.set()
        assert self._opened.wait(PATIENCE_S), "the gate was never opened"

    def wait_reached(self) -> None:
        """Returns once somebody stands at the gate."""
        assert self._reached.wait(PATIENCE_S), "nobody came to the gate"


def chunk(text: str, finish_reason: str | None = None) -> Chunk:
    """A chunk with one token per character."""
    return Chunk(tuple(text.encode()), text, finish_reason)


def plain_answer(_job: DecodeJob) -> Iterator[Chunk]:
    """Two pieces of text, then the end."""
    yield chunk("one")
    yield chunk(" two")
    yield chunk("", "stop")


class FakeStages:
    """Encoders and decoders. `log` has every call in order; `leases` the handles that are out."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.jobs: list[DecodeJob] = []
        self.leases: list[bytes] = []
        self.answer: Answer = plain_answer
        self.answers: dict[str, Answer] = {}  # by prompt, before `answer`
        self.encode_errors: dict[bytes, Exception] = {}
        self.encode_gates: dict[bytes, Gate] = {}
        self.release_errors: dict[bytes, Exception] = {}
        self.told_to_stop = threading.Event()
        self._lock = threading.Lock()

    def encode(self, encoder: str, image: bytes) -> Encoded:
        self._note(f"encode {image.decode()} on {encoder}")
        if image in self.encode_gates:
            self.encode_gates[image].pass_through()
        if image in self.encode_errors:
            raise self.encode_errors[image]
        with self._lock:
            self.leases.append(b"<" + image + b">")
        return Encoded(b"<" + image + b">")

    def decode(self, decoder: str, job: DecodeJob) -> Iterator[Chunk]:
        prompt = bytes(job.token_ids).decode()
        self._note(f"decode {prompt} with [{b','.join(job.handles).decode()}] on {decoder}")
        with self._lock:
            self.jobs.append(job)
        yield from self.answers.get(prompt, self.answer)(job)

    def cancel(self, decoder: str, request_id: str) -> None:
        with self._lock:
            prompts = {job.request_id: bytes(job.token_ids).decode() for job in self.jobs}
        self._note(f"cancel {prompts.get(request_id, 'a job not seen yet')} on {decoder}")
        self.told_to_stop.set()

    def release(self, handle: bytes) -> None:
        self._note(f"release {handle.decode()}")
        with self._lock:
            self.leases.remove(handle)
        if handle in self.release_errors:
            raise self.release_errors[handle]

    def _note(self, line: str) -> None:
        with self._lock:
            self.log.append(line)


class FakeClient:
    """A client; `log` has what it was told, in order."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.log: list[str] = []
        self.replies: list[Reply] = []
        self.decisions: list[Decision | None] = []  # told with the progress
        self.error: RelayError | None = None
        self.is_gone = False
        self.breaks_at: str | None = None  # "reply", "last", "fail" or "is_cancelled": raises there
        self.num_finals = 0
        self._ended = threading.Event()
        self._replied = threading.Event()

    def progress(self, progress: Progress) -> None:
        self.decisions.append(progress.decision)
        self.log.append(progress.stage)

    def reply(self, reply: Reply, is_last: bool) -> None:
        self._break_at("last" if is_last else "reply")
        self.replies.append(reply)
        self.log.append(f"{reply.chunk.text!r} {reply.chunk.finish_reason}")
        self._replied.set()
        if is_last:
            self._end()

    def fail(self, error: RelayError) -> None:
        self._break_at("fail")
        self.error = error
        self.log.append(str(error))
        self._end()

    def is_cancelled(self) -> bool:
        self._break_at("is_cancelled")
        return self.is_gone

    def wait(self) -> list[str]:
        """What it was told, once the final word came."""
        assert self._ended.wait(PATIENCE_S), f"no final word for {self.name!r}; so far {self.log}"
        return self.log

    def wait_reply(self) -> None:
        """Returns once the first reply came."""
        assert self._replied.wait(PATIENCE_S), f"no reply for {self.name!r}"

    def _end(self) -> None:
        self.num_finals += 1
        self._ended.set()

    def _break_at(self, where: str) -> None:
        if self.breaks_at == where:
            self._ended.set()
            raise BrokenPipeError(where)


class CharacterPrompts:
    """One token per byte of the text; `errors` by text."""

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}
        self.image_token_id = 0

    def count_image_tokens(self, images: Sequence[bytes]) -> tuple[int, ...]:
        return (576,) * len(images)

    def build(self, text: str | None, messages: str | None, image_tokens: Sequence[int]) -> Prompt:
        assert text is not None
        if text in self.errors:
            raise self.errors[text]
        return Prompt(text, tuple(text.encode()), len(text) + sum(image_tokens))


class FakeMeter:
    """Sums of counters by name and labels, gauges, and the names observed."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = {}
        self.gauges: dict[str, float] = {}
        self.observed: list[str] = []

    def add(self, name: str, amount: float = 1.0, labels: Mapping[str, str] | None = None) -> None:
        key = name + "".join(f" {label}={value}" for label, value in sorted((labels or {}).items()))
        self.counters[key] = self.counters.get(key, 0.0) + amount

    def set(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        self.gauges[name] = value

    def observe(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        self.observed.append(name)


@dataclass
class World:
    """A relay and all that is around it."""

    relay: Relay
    stages: FakeStages
    prompts: CharacterPrompts
    meter: FakeMeter
    clock: Clock
    clients: list[FakeClient] = field(default_factory=list)
    is_draining: bool = False

    def ask(
        self,
        text: str,
        *images: bytes,
        streaming: bool = True,
        priority: int = 0,
        deadline_s: float | None = None,
        returns: Returns | None = None,
        client: FakeClient | None = None,
        max_tokens: int = 10,
    ) -> FakeClient:
        """Hands the relay a request; its client."""
        client = client or FakeClient(text)
        self.clients.append(client)
        request = GenerateRequest(
            text=text,
            messages=None,
            images=images,
            sampling=SamplingParameters(max_tokens=max_tokens),
            is_streaming=streaming,
            repeats_input=None,
            returns=returns or Returns(),
            priority=priority,
            deadline_s=deadline_s,
        )
        self.relay.accept(request, client)
        return client

    def hold(self, text: str, *images: bytes, **options: object) -> tuple[FakeClient, Gate]:
        """A request that says `one` and then stands at the gate; returns once it stands there."""
        gate = Gate()

        def answer(_job: DecodeJob) -> Iterator[Chunk]:
            yield chunk("one")
            gate.pass_through()
            yield chunk(" two", "stop")

        self.stages.answers[text] = answer
        client = self.ask(text, *images, **options)  # type: ignore[arg-type]
        gate.wait_reached()
        return client, gate


def limits(**values: object) -> LimitsTable:
    """Room for two requests, and for two that wait."""
    return LimitsTable(**{"max_in_flight": 2, "max_waiting": 2, **values})  # type: ignore[arg-type]


def router(encoders: tuple[str, ...], decoders: tuple[str, ...], decode: DecodeTable | None = None) -> Router:
    """Decides for replicas of those names: encoders on the one GPU, decoders on another."""
    plan = Plan(
        checkpoint="checkpoint",
        artifacts="build",
        encoders=tuple(Replica(name=name, device="cuda:0") for name in encoders),
        decoders=tuple(Replica(name=name, device="cuda:1") for name in decoders),
        encode=EncodeTable(),
        decode=decode or DecodeTable(),
        limits=LimitsTable(),
    )
    return Router(plan)
