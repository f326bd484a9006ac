"""A simulated server of a plan: built, and run under a workload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from scheduler.cost import Costs
from scheduler.plan import Plan, Replica
from scheduler.pools import Pools, costs_of, place_of, shares_device
from scheduler.routing import Router
from scheduler.simulate.agenda import Agenda
from scheduler.simulate.columns import Columns
from scheduler.simulate.decoder import SimulatedDecoder
from scheduler.simulate.desk import Desk
from scheduler.simulate.encoder import SimulatedEncoder
from scheduler.simulate.front import Front
from scheduler.simulate.live import ImageOfRequest, LiveRequest
from scheduler.simulate.outcome import Outcomes
from scheduler.simulate.run import Options, Run, Samples, SimulationRefused, Span
from scheduler.simulate.sequence import SimulatedSequence
from scheduler.simulate.silicon import Silicon, Work
from scheduler.simulate.workload import Workload

MIB = 1 << 20
NUM_SAMPLES = 400
DETECTION_S = 0.1  # until a dead stage is seen: its pulse stops


def simulate(
    plan: Plan,
    workload: Workload,
    costs: Costs | Mapping[str, Costs] | None = None,
    options: Options | None = None,
) -> Run:
    """Serves a workload on a server of `plan` whose stages take what `costs` says (None: rooflines).

    Raises:
        SimulationRefused: a request that can never fit, or an outage of what is not there.
    """
    return Simulation(plan, workload, costs, options or Options()).run()


class Simulation:
    """One server and one workload. Runs once."""

    def __init__(
        self, plan: Plan, workload: Workload, costs: Costs | Mapping[str, Costs] | None, options: Options
    ) -> None:
        self._plan, self._workload, self._options = plan, workload, options
        self._agenda = Agenda()
        self._costs = costs_of(plan, costs)
        self._pools = Pools(plan, self._costs)
        self._outcomes = Outcomes(len(workload))
        silicon = self._build_silicon()
        self._encoders = {each.name: self._build_encoder(each, silicon[each.name]) for each in plan.encoders}
        self._decoders = {
            each.name: self._build_decoder(d, each, silicon[each.name]) for d, each in enumerate(plan.decoders)
        }
        believed = costs if options.believed is None else options.believed
        self._front = Front(
            self._agenda,
            Router(plan, believed, options.policy, predicts=options.learns),
            self._pools,
            (self._encoders, self._decoders),
            options.max_in_flight or plan.limits.max_in_flight,
            self._outcomes,
            next(iter(self._costs.values())).transfer.embedding_bytes,
            options.log,
        )
        front = options.front
        self._desk = Desk(self._agenda, list(dict.fromkeys(silicon.values())), front) if front else None
        self._front.desk, self._front.learns = self._desk, options.learns
        for encoder in self._encoders.values():
            encoder.deliver = self._front.image_done
        if self._desk is not None:
            for decoder in self._decoders.values():
                decoder.told = self._desk.stream
        self._samples = Samples()
        self._spans: list[Span] = []
        self._columns = Columns(workload)
        self._num_outages: Counter[str] = Counter()

    def run(self) -> Run:
        """Serves the whole workload."""
        self._check_fits()
        for outage in self._options.outages:
            for name in self._replicas_of(outage.name):
                self._agenda.at(outage.at_s, self._die, name)
                if outage.until_s < float("inf"):
                    self._agenda.at(outage.until_s, self._return, name)
        if self._workload.num_users:
            self._serve_users()
        else:
            self._serve_arrivals()
        return self._result()

    # -- the server ---------------------------------------------------------------------------------------

    def _build_silicon(self) -> dict[str, Silicon]:
        """By replica: those that share a device share one."""
        replicas = [*self._plan.encoders, *self._plan.decoders]
        found: dict[str, Silicon] = {}
        for replica in replicas:
            neighbour = next(
                (other for other in replicas if other.name in found and shares_device(replica, other)), None
            )
            if neighbour is not None:
                found[replica.name] = found[neighbour.name]
                continue
            capacity = 1.0
            if replica.device == "cpu":  # not bound: as many CPUs as are asked for
                capacity = float(len(replica.cpus)) if replica.cpus else float("inf")
            contention = self._costs[place_of(replica)].contention
            found[replica.name] = Silicon(contention, capacity, self._options.stretch, replica.device == "cpu")
        return found

    def _build_encoder(self, replica: Replica, silicon: Silicon) -> SimulatedEncoder:
        table = self._plan.encode
        built = SimulatedEncoder(
            replica.name,
            self._agenda,
            silicon,
            self._costs[place_of(replica)].encode,
            (table.max_batch, table.queue_delay_us / 1e6),
            table.slots,
        )
        built.span = self._note_span if self._options.keeps_spans else None
        return built

    def _build_decoder(self, d: int, replica: Replica, silicon: Silicon) -> SimulatedDecoder:
        table, cost = self._plan.decode, self._costs[place_of(replica)].decode
        rates = self._pools.decode_rates[d]
        block_bytes = cost.kv_bytes_per_token * table.block_tokens
        built = SimulatedDecoder(
            replica.name,
            self._agenda,
            silicon,
            ((rates[0], rates[1], rates[2], rates[3]), (rates[4], rates[5], rates[6])),
            (table.max_sequences, table.step_tokens, table.step_limit_ms / 1000),
            (int(table.kv_cache_mib * MIB // block_bytes), table.block_tokens),
        )
        built.span = self._note_span if self._options.keeps_spans else None
        return built

    def _note_span(self, replica: str, began_s: float, images: int, sequences: int, prompt_tokens: int) -> None:
        self._spans.append(Span(replica, began_s, self._agenda.now_s, images, sequences, prompt_tokens))

    def _check_fits(self) -> None:
        workload, table = self._workload, self._plan.decode
        longest = int((workload.prompt_tokens + workload.output_tokens).max())
        capacity = min(decoder.total_blocks for decoder in self._decoders.values()) * table.block_tokens
        if longest > capacity:
            raise SimulationRefused(
                f"decode.kv_cache_mib {table.kv_cache_mib} holds {capacity} tokens, and a request needs {longest}"
            )
        most = int(workload.num_images.max())
        if most > self._plan.limits.max_images:
            raise SimulationRefused(
                f"a request has {most} images; limits.max_images allows {self._plan.limits.max_images}"
            )

    # -- the clients --------------------------------------------------------------------------------------

    def _serve_arrivals(self) -> None:
        agenda, progress, columns = self._agenda, self._options.progress, self._columns
        every = max(1, len(self._workload) // NUM_SAMPLES)
        for index, arrived_s in enumerate(columns.arrived_s):
            agenda.run_until(arrived_s)
            self._arrive(index)
            if index % every == 0:
                self._sample()
                if progress is not None:
                    progress(every)
        while agenda.next_s() is not None:
            agenda.step()

    def _serve_users(self) -> None:
        """A user who has an answer asks the next of the questions that are left."""
        agenda, workload = self._agenda, self._workload
        every = max(1, len(workload) // NUM_SAMPLES)
        left = iter(range(len(workload)))

        def ask(_: object) -> None:
            index = next(left, None)
            if index is not None:
                self._arrive(index)
                if index % every == 0:
                    self._sample()
                    if self._options.progress is not None:
                        self._options.progress(every)

        self._front.ended = lambda _: agenda.at(agenda.now_s + workload.think_s, ask)
        for _ in range(workload.num_users):
            agenda.at(0.0, ask)
        while agenda.next_s() is not None:
            agenda.step()

    def _arrive(self, index: int) -> None:
        columns, now_s = self._columns, self._agenda.now_s
        self._outcomes.arrived_s[index] = now_s
        live = LiveRequest(self._front, index, columns.shape(index), columns.output_tokens[index])
        live.priority = columns.priority[index] if columns.priority else 0
        if columns.deadline_s and columns.deadline_s[index] < float("inf"):
            live.deadline_s = now_s + columns.deadline_s[index]
        if self._desk is None:
            self._front.arrive(live)
        else:
            self._desk.take(self._desk.cost.before_s, self._front.arrive, live)
        if columns.cancel_s and columns.cancel_s[index] < float("inf"):
            self._agenda.at(now_s + columns.cancel_s[index], self._front.cancel, live)

    def _sample(self) -> None:
        samples, front = self._samples, self._front
        samples.time_s.append(self._agenda.now_s)
        samples.waiting.append(len(front.room))
        samples.in_flight.append(len(front.serving))
        samples.encoder_queue.append([len(each.queue) for each in self._encoders.values()])
        samples.decoder_waiting.append([len(each.waiting) for each in self._decoders.values()])
        samples.decoder_running.append([len(each.running) for each in self._decoders.values()])

    # -- outages ------------------------------------------------------------------------------------------

    def _replicas_of(self, name: str) -> list[str]:
        replicas = [*self._plan.encoders, *self._plan.decoders]
        found = [each.name for each in replicas if name in (each.name, place_of(each))]
        if not found:
            there = ", ".join(each.name for each in replicas)
            raise SimulationRefused(f"outage of {name!r}, which is not there; allowed: a device or one of {there}")
        return found

    def _die(self, name: str) -> None:
        """Its work stops at once; that is seen a little later, and only then its requests are tried elsewhere."""
        replica = self._encoders.get(name) or self._decoders[name]
        replica.is_dead = True
        self._num_outages[name] += 1
        self._agenda.at(self._agenda.now_s + DETECTION_S, self._see_death, (name, replica.die()))

    def _see_death(self, what: tuple[str, list[object]]) -> None:
        name, lost = what
        replica = self._encoders.get(name) or self._decoders[name]
        self._front.ledger.set_available(name, not replica.is_dead)
        self._try_again([*lost, *(replica.die() if replica.is_dead else ())])

    def _return(self, name: str) -> None:
        """Comes back empty, unless another outage goes on: what was sent to it meanwhile is lost."""
        self._num_outages[name] -= 1
        if self._num_outages[name] == 0:
            replica = self._encoders.get(name) or self._decoders[name]
            left = replica.die()
            replica.is_dead = False
            self._front.ledger.set_available(name, True)
            self._try_again(left)

    def _try_again(self, lost: Iterable[object]) -> None:
        for each in lost:
            if isinstance(each, ImageOfRequest):
                self._front.lost(each.live, 0, each.attempt)
                continue
            assert isinstance(each, SimulatedSequence)
            live = each.job
            if isinstance(live, LiveRequest) and live.sequence is each:
                self._front.lost(live, each.num_given, live.attempt)

    def _works(self) -> Iterator[tuple[str, Work]]:
        for encoder in self._encoders.values():
            yield encoder.name, encoder.work
        for decoder in self._decoders.values():
            yield decoder.name, decoder.work

    # -- the result ---------------------------------------------------------------------------------------

    def _result(self) -> Run:
        encoders, decoders = self._encoders, self._decoders
        duration_s = max(float(np.nanmax(self._outcomes.ended_s)), 1e-12)
        return Run(
            plan=self._plan,
            workload=self._workload,
            outcomes=self._outcomes,
            tally=self._front.tally,
            duration_s=duration_s,
            busy={name: work.busy_s / duration_s for name, work in self._works()},
            samples=self._samples,
            num_batches={name: each.num_batches for name, each in encoders.items()},
            num_encoded=sum(each.num_encoded for each in encoders.values()),
            num_cached=sum(each.num_cached for each in encoders.values()),
            num_steps={name: each.num_steps for name, each in decoders.items()},
            num_preemptions=sum(each.num_preemptions for each in decoders.values()),
            spans=self._spans,
        )
