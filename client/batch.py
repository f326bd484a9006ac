"""Many questions from a file, answered into a file: JSON Lines in, JSON Lines out, resumable at any moment.

A line of the input is one of

    {"custom_id": "1", "question": "What is this?", "images": ["a.jpg"], "max_tokens": 20}
    {"custom_id": "2", "body": {"messages": [...], "max_tokens": 20}}          as in OpenAI's batch files

and each gets one line in the output, in the order in which they are answered, with its `custom_id`. A line without
one is called `line-N`. Paths of images are relative to the input file.

Killed at any moment and started again with the same files, it asks exactly what has no answer yet: a line counts as
answered when it stands complete in the output, and the torn line that a kill may leave is cut off.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tqdm import tqdm

from client.answer import Answer
from client.batch_files import BatchRefused, Entry, Output, index, read_entry
from client.channel import DEFAULT_ADDRESS
from client.errors import Cancelled, InvalidRequest, Overloaded, RelayClientError, ServerUnreachable, Unavailable
from client.relay_async import AsyncRelayClient
from client.request import Message, Options, Sampling
from client.retry import pause_s
from client.shared_memory import KEY_VARIABLE, key_from

CONCURRENCY = 16
RETRIES = 20  # with pauses that double up to half a minute: about eight minutes
_TRANSIENT = (Unavailable, ServerUnreachable, Cancelled)
_OPTIONS = frozenset(Sampling.__annotations__) | {"raw", "priority", "deadline_s"}


@dataclass(slots=True)
class Tally:
    """How a batch went. `num_left` could not be asked: the same command asks them again."""

    num_before: int = 0
    num_answered: int = 0
    num_failed: int = 0
    num_left: int = 0

    def __str__(self) -> str:
        parts = [f"{self.num_answered} answered", f"{self.num_failed} failed", f"{self.num_left} left for another run"]
        return ", ".join(parts) + (f" ({self.num_before} were done before)" if self.num_before else "")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A line as the client library takes it, and how its answer is written down."""

    text: str | None
    messages: tuple[Message, ...] | None
    images: tuple[bytes | str | Path, ...]
    options: Options
    written: Callable[[Answer], Mapping[str, object]]


def configure(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `batch`."""
    parser.description = "Answer the questions of a JSON Lines file into another; run again, it does what is left."
    parser.epilog = "Exit status: 0 all answered, 1 some failed or are left, 2 wrong usage, 130 interrupted."
    parser.add_argument("input", type=Path, metavar="IN", help="JSON Lines: question and images, or OpenAI's body")
    parser.add_argument("output", type=Path, metavar="OUT", help="JSON Lines; appended to")
    parser.add_argument("--url", default=DEFAULT_ADDRESS, help="host:port of the server's gRPC port (%(default)s)")
    parser.add_argument(
        "--shared-memory", action="store_true", help=f"large images by shared memory; the key is in {KEY_VARIABLE}"
    )
    parser.add_argument(
        "--concurrency", type=int, default=CONCURRENCY, metavar="N", help="requests at a time (%(default)s)"
    )
    parser.add_argument(
        "--retries", type=int, default=RETRIES, metavar="N", help="for a request that finds no room (%(default)s)"
    )


def run(arguments: argparse.Namespace, variables: Mapping[str, str]) -> Tally:
    """Do what `arguments` say; `variables` are the environment's.

    Raises:
        BatchRefused: a file that cannot be used; nothing was asked.
        InvalidRequest: an address that is none, or no key for shared memory.
    """
    if arguments.concurrency < 1 or arguments.retries < 0:
        raise BatchRefused("--concurrency must be at least 1 and --retries at least 0")
    key = key_from(variables) if arguments.shared_memory else None
    entries = index(arguments.input)
    if arguments.output.exists() and arguments.output.samefile(arguments.input):
        raise BatchRefused(f"{arguments.output}: the answers cannot go into the questions' file")
    with Output(arguments.output, {entry.custom_id for entry in entries}) as output:
        client = AsyncRelayClient(arguments.url, shared_memory_key=key)
        batch = Batch(client, output, arguments.input, arguments.retries)
        return asyncio.run(batch.answer_all(entries, arguments.concurrency))


class Batch:
    """One run over the lines of a file. Owns the client, and closes it."""

    def __init__(
        self,
        client: AsyncRelayClient,
        output: Output,
        input_path: Path,
        retries: int = RETRIES,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: random.Random | None = None,
    ) -> None:
        self._client = client
        self._output = output
        self._input_path = input_path
        self._retries = retries
        self._sleep = sleep
        self._chance = chance or random.Random()
        self.tally = Tally()

    async def answer_all(self, entries: list[Entry], concurrency: int) -> Tally:
        """Ask what is not in the output yet, `concurrency` at a time."""
        todo = [entry for entry in entries if entry.custom_id not in self._output.done]
        self.tally.num_before = len(entries) - len(todo)
        queue = iter(todo)
        with tqdm(total=len(entries), initial=self.tally.num_before, unit="line", disable=None) as progress:
            async with self._client, asyncio.TaskGroup() as workers:
                for _ in range(min(concurrency, len(todo))):
                    workers.create_task(self._work(queue, progress.update))
        return self.tally

    async def _work(self, queue: Iterator[Entry], note_progress: Callable[[], object]) -> None:
        for entry in queue:  # shared by all workers, which take turns at it between their awaits
            line = await self._line(entry)
            if line is None:
                self.tally.num_left += 1
            else:
                self._output.append({"custom_id": entry.custom_id, **line})
            note_progress()

    async def _line(self, entry: Entry) -> Mapping[str, object] | None:
        """What is written for an entry; None when it must be asked another time."""
        try:
            asked = _asked_from(await asyncio.to_thread(read_entry, self._input_path, entry), self._input_path.parent)
            answer = await self._answer(asked)
        except _TRANSIENT:
            return None
        except RelayClientError as error:
            self.tally.num_failed += 1
            return _failed(error)
        self.tally.num_answered += 1
        return asked.written(answer)

    async def _answer(self, asked: _Asked) -> Answer:
        for num_failed in itertools.count():
            try:
                return await self._client.ask(asked.text, messages=asked.messages, images=asked.images, **asked.options)
            except _TRANSIENT as error:
                if num_failed == self._retries:
                    raise
                hint_s = error.retry_after_s if isinstance(error, Overloaded) else None
                await self._sleep(pause_s(num_failed, hint_s, self._chance))
        raise AssertionError("counting has no end")


def _asked_from(value: Mapping[str, object], folder: Path) -> _Asked:
    """The request in a line.

    Raises:
        InvalidRequest: neither form, an unknown name, or a wrong value.
    """
    if "body" in value:
        return _asked_from_body(value["body"])
    question, images = value.get("question"), value.get("images", [])
    unknown = sorted(value.keys() - _OPTIONS - {"custom_id", "question", "images"})
    if unknown:
        allowed = ", ".join(sorted(_OPTIONS))
        raise InvalidRequest(f"unknown name {unknown[0]!r}; allowed beside question and images: {allowed}")
    if not isinstance(question, str):
        raise InvalidRequest("question must be a string; or give OpenAI's body")
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise InvalidRequest("images must be a list of paths or data: URIs")
    files = tuple(image if image.startswith("data:") else folder / image for image in images)
    options = cast(Options, {name: each for name, each in value.items() if name in _OPTIONS})
    return _Asked(question, None, files, options, _written)


def _asked_from_body(body: object) -> _Asked:
    """The request in OpenAI's body, with the gateway's rules for it."""
    try:
        from client.gateway.batch_body import asked_from
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"{error.name} is missing for lines with a body: pip install 'vlm-relay[gateway]'"
        ) from None
    question, written = asked_from(body)
    return _Asked(question.text, question.messages, question.images, question.options, written)


def _written(answer: Answer) -> Mapping[str, object]:
    return {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "num_input_tokens": answer.num_input_tokens,
        "num_output_tokens": answer.num_output_tokens,
        "error": None,
    }


def _failed(error: RelayClientError) -> Mapping[str, object]:
    return {"text": None, "response": None, "error": {"code": error.code.lower(), "message": str(error)}}
