"""A load test: many requests, sent at chosen times whether or not earlier ones are done, or so many at a time.

vlm-relay load --rate 5 --requests 100 --images 336x336 --html report.html      open loop, Poisson arrivals
vlm-relay load --trace arrivals.csv --images 336x336 --png report.png           open loop, arrivals of a file
vlm-relay load --concurrency 8 --requests 100                                   closed loop
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path

from tqdm import tqdm

from client.channel import DEFAULT_ADDRESS
from client.errors import InvalidRequest, RelayClientError
from client.load_figure import drawer
from client.load_plan import USUAL_SIZE, Arrival, picture, poisson, size_from, trace
from client.load_report import Outcome, Report, page, report_from
from client.relay_async import AsyncRelayClient
from client.request import Options, request_from
from client.shared_memory import KEY_VARIABLE, key_from


def configure(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `load`."""
    parser.description = "Put load on a server and print what it did: times, rates, refusals."
    parser.add_argument("--url", default=DEFAULT_ADDRESS, help="host:port of the server's gRPC port (%(default)s)")
    parser.add_argument(
        "--shared-memory", action="store_true", help=f"large images by shared memory; the key is in {KEY_VARIABLE}"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--rate", type=float, metavar="R", help="open loop: R requests a second, Poisson arrivals")
    how.add_argument("--trace", type=Path, metavar="FILE", help="open loop: arrivals of a JSON Lines or CSV file")
    how.add_argument("--concurrency", type=int, default=8, metavar="N", help="closed loop: N at a time (%(default)s)")
    parser.add_argument("--requests", type=int, default=100, metavar="N", help="how many in all (%(default)s)")
    parser.add_argument(
        "--images", action="append", default=[], metavar="WxH", help="a picture of this size in each; may be repeated"
    )
    parser.add_argument("--question", default="What is in the picture?", help="(%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help="of each answer (%(default)s)")
    parser.add_argument("--exactly", action="store_true", help="answers of exactly --max-tokens")
    parser.add_argument("--deadline-s", type=float, metavar="S", help="for each request")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and pictures (%(default)s)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page, too")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write it as a picture, too (needs matplotlib)")


def run(arguments: argparse.Namespace, variables: Mapping[str, str]) -> Report:
    """Do what `arguments` say; `variables` are the environment's.

    Raises:
        InvalidRequest: an argument out of range, or a trace that is none.
        OSError: the page or the picture cannot be written; nothing was asked.
    """
    if arguments.requests < 1 or arguments.concurrency < 1:
        raise InvalidRequest("--requests and --concurrency must be at least 1")
    if arguments.rate is not None and not 0 < arguments.rate < float("inf"):
        raise InvalidRequest(f"--rate must be above 0, not {arguments.rate}")
    draw = drawer() if arguments.png is not None else None  # not after the load that matplotlib is missing
    chance = random.Random(arguments.seed)
    load = Load(
        arguments.url,
        arguments.question,
        [size_from(size) for size in arguments.images],
        chance,
        shared_memory_key=key_from(variables) if arguments.shared_memory else None,
    )
    load.options = {"max_tokens": arguments.max_tokens, "deadline_s": arguments.deadline_s}
    if arguments.exactly:
        load.options |= {"ignore_eos": True, "min_tokens": arguments.max_tokens}
    request_from(arguments.question, None, (), **load.options)  # refuses what each request would be refused for
    if arguments.trace is not None:
        arrivals: list[Arrival] | None = trace(arguments.trace)
    elif arguments.rate is not None:
        arrivals = list(poisson(arguments.rate, arguments.requests, chance))
    else:
        arrivals = None
    for path in filter(None, (arguments.html, arguments.png)):
        path.open("ab").close()  # not after the load that it cannot be written
    work = load.at_times(arrivals) if arrivals else load.at_a_time(arguments.concurrency, arguments.requests)
    seconds = asyncio.run(load.measured(work))
    report = report_from(load.outcomes, seconds)
    title = f"Load on {arguments.url}"
    if arguments.html is not None:
        arguments.html.write_text(page(report, load.outcomes, title))
    if draw is not None:
        draw(report, load.outcomes, title, arguments.png)
    return report


class Load:
    """One load test; owns its client and what came of each request."""

    def __init__(
        self,
        url: str,
        question: str,
        sizes: list[tuple[int, int]],
        chance: random.Random,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        shared_memory_key: str | None = None,
    ) -> None:
        self._client = AsyncRelayClient(url, clock=clock, shared_memory_key=shared_memory_key)
        self._question = question
        self._sizes = sizes
        self._chance = chance
        self._clock = clock
        self._sleep = sleep
        self._began_s = 0.0
        self._progress: Callable[[], object] = lambda: None
        self.options: Options = {}
        self.outcomes: list[Outcome] = []

    async def measured(self, work: Awaitable[None]) -> float:
        """Does the work; the seconds it took."""
        with tqdm(unit="request", disable=None) as progress:
            self._progress = progress.update
            async with self._client:
                self._began_s = self._clock()
                await work
                return self._clock() - self._began_s

    async def at_times(self, arrivals: Iterable[Arrival]) -> None:
        """Open loop: each request at its time, whatever became of the ones before."""
        async with asyncio.TaskGroup() as running:
            for arrival in arrivals:
                images = self._pictures(arrival.num_images)  # made before the wait, not in the request's own time
                await self._sleep(max(0.0, self._began_s + arrival.at_s - self._clock()))
                running.create_task(self._ask(arrival.at_s, images, arrival.max_tokens))

    async def at_a_time(self, concurrency: int, num_requests: int) -> None:
        """Closed loop: a request is sent when an earlier one is done."""
        numbers = iter(range(num_requests))

        async def work() -> None:
            for _ in numbers:
                images = self._pictures()
                await self._ask(self._clock() - self._began_s, images)

        async with asyncio.TaskGroup() as running:
            for _ in range(min(concurrency, num_requests)):
                running.create_task(work())

    def _pictures(self, num_images: int | None = None) -> list[bytes]:
        """One of each size; or so many, taking the sizes in turn."""
        sizes = self._sizes
        if num_images is not None:
            sizes = list(itertools.islice(itertools.cycle(sizes or [USUAL_SIZE]), num_images))
        return [picture(width, height, self._chance) for width, height in sizes]

    async def _ask(self, at_s: float, images: list[bytes], max_tokens: int | None = None) -> None:
        late_s = max(0.0, self._clock() - self._began_s - at_s)
        error, detail = None, ""
        options: Options = {**self.options}
        if max_tokens is not None:
            options["max_tokens"] = max_tokens
            if options.get("ignore_eos"):
                options["min_tokens"] = max_tokens
        stream = self._client.stream(self._question, images=images, **options)
        try:
            async with stream:
                async for _ in stream:
                    pass
        except RelayClientError as failure:
            error, detail = failure.code.lower() or "unreachable", str(failure)
        answer = stream.answer
        self.outcomes.append(
            Outcome(
                at_s=at_s,
                late_s=late_s,
                ttft_s=answer.ttft_s,
                total_s=answer.total_s,
                num_input_tokens=answer.num_input_tokens,
                num_output_tokens=answer.num_output_tokens,
                tokens_per_s=answer.output_tokens_per_s,
                error=error,
                detail=detail,
            )
        )
        self._progress()
