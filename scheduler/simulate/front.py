"""The simulated scheduler in front: what `python_backend.relay` does with a request, over simulated stages.

arrival ─▶ waiting room ─▶ decision ─▶ encoders ─▶ hop and copy ─▶ decoder ─▶ first token, last token
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.admission import WaitingRoom
from scheduler.decision import Decision, NoReplica, StagesFull
from scheduler.ledger import Ledger
from scheduler.observed import Observed, learn
from scheduler.pools import Pools
from scheduler.routing import Router
from scheduler.simulate.agenda import Agenda
from scheduler.simulate.decoder import SimulatedDecoder
from scheduler.simulate.desk import Desk
from scheduler.simulate.encoder import ImageJob, SimulatedEncoder
from scheduler.simulate.live import ImageOfRequest, LiveRequest
from scheduler.simulate.outcome import CANCELLED, DONE, FAILED, LATE, REFUSED, Outcomes
from scheduler.simulate.sequence import SimulatedSequence

MAX_ATTEMPTS = 3  # as the relay: the first, and two more when stages die

Log = Callable[[float, int, str, str], None]
"""Takes time, request, what happened, and the replica."""


@dataclass(slots=True)
class Tally:
    """What was counted on the way."""

    reasons: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    link_bytes: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # by class of the link
    num_retries: int = 0


class Front:
    """Admits, decides and follows requests. The policy's own classes do the deciding."""

    def __init__(
        self,
        agenda: Agenda,
        router: Router,
        pools: Pools,
        stages: tuple[dict[str, SimulatedEncoder], dict[str, SimulatedDecoder]],
        max_in_flight: int,
        outcomes: Outcomes,
        embedding_bytes: float,
        log: Log | None = None,
    ) -> None:
        limits = pools.plan.limits
        self.agenda = agenda
        self.ledger = Ledger(router.idle())
        self.room: WaitingRoom[LiveRequest] = WaitingRoom(limits.max_waiting + 1, limits.ageing_s)
        self.serving: set[LiveRequest] = set()
        self.tally = Tally()
        self._link_bytes = self.tally.link_bytes
        self.desk: Desk | None = None
        self.learns = False  # corrects its predictions, as the relay does
        self.ended: Callable[[LiveRequest], None] | None = None  # told of each end, for closed loops
        self._router = router
        self._pools = pools
        self._encoders, self._decoders = stages
        self._max_in_flight, self._limits = max_in_flight, limits
        self._outcomes = outcomes
        self._embedding_bytes = embedding_bytes
        self._log = log
        self._e = {name: index for index, name in enumerate(pools.encoders)}
        self._d = {name: index for index, name in enumerate(pools.decoders)}

    # -- admission ----------------------------------------------------------------------------------------

    def arrive(self, live: LiveRequest) -> None:
        """Takes responsibility for a request: it will be ended, exactly once."""
        if live.is_ended:  # the client left while it was at the desk
            return
        if self._log is not None:
            self._note(live, "arrived")
        has_place = self._has_place()
        if not has_place and self._is_refused(live):
            self.end(live, REFUSED)
            return
        if live.deadline_s is not None:
            self.agenda.at(live.deadline_s, self._expire, live)
        if has_place and not self.room:
            self.room.pass_through(self.agenda.now_s)
            self.serving.add(live)
            self._start(live)
        else:
            self.room.enter(live, live.priority, live.deadline_s, self.agenda.now_s)
            self._dispatch()

    def cancel(self, live: LiveRequest) -> None:
        """The client has left."""
        if not live.is_ended:
            self.room.remove({id(live)})
            self.end(live, CANCELLED)

    def _is_refused(self, live: LiveRequest) -> bool:
        now_s, limits = self.agenda.now_s, self._limits
        left_s = limits.max_wait_s if live.deadline_s is None else live.deadline_s - now_s
        allowed_s = min(limits.max_wait_s, left_s)
        turn_s = self._router.turn_s(live.prompt_tokens, live.shape.max_tokens)
        return self.room.refusal(live.priority, now_s, limits.max_waiting, allowed_s, turn_s) is not None

    def _has_place(self) -> bool:
        """With no decoder up there is: who comes is refused at once then, and need not wait."""
        if len(self.serving) >= self._max_in_flight:
            return False
        loads = self.ledger.loads
        return self._router.has_room(loads) or not any(load.is_available for load in loads.decoders.values())

    def _dispatch(self) -> None:
        """Gives free places to those who wait, most urgent first."""
        room = self.room
        while room and self._has_place():
            live = room.take(self.agenda.now_s)
            if live is None:
                break
            self.serving.add(live)
            self._start(live)

    def _expire(self, live: LiveRequest) -> None:
        if not live.is_ended:
            self.room.expire(self.agenda.now_s)
            self.end(live, LATE)

    # -- one attempt --------------------------------------------------------------------------------------

    def _start(self, live: LiveRequest) -> None:
        live.attempt += 1
        try:
            decision = self._router.decide(live.shape, self.ledger.loads, self.agenda.now_s)
        except (NoReplica, StagesFull):
            self.end(live, REFUSED)
            return
        live.place = self.ledger.take(decision, live.shape)
        if self.learns:
            live.observed, live.began_s = Observed(), self.agenda.now_s
        self.tally.reasons[decision.reason_kind] += 1
        self.tally.modes[decision.mode] += 1
        self._outcomes.note_mode(live.index, decision.mode)
        if not decision.encoders:
            self._decode((live, live.attempt))
            return
        live.images_left = len(decision.encoders)
        shape, attempt, units = live.shape, live.attempt, live.shape.image_units
        keys = shape.image_keys or (None,) * live.images_left
        for name, key in zip(decision.encoders, keys, strict=True):
            if self._log is not None:
                self._note(live, "encode", name)
            self._encoders[name].push(ImageOfRequest(live, attempt, key, units))

    def image_done(self, job: ImageJob) -> None:
        """An embedding is in its encoder's store."""
        assert isinstance(job, ImageOfRequest)
        live = job.live
        if live.is_ended or live.attempt != job.attempt:
            return
        live.images_left -= 1
        if live.observed is not None:
            live.observed.has_cached |= job.is_cached
        if live.images_left == 0 and live.place is not None:
            self.ledger.note_encoded(live.place)
            copy_s = self._copy_s(live.place.decision, live.shape.image_units)
            if live.observed is not None:
                hop_s = self._pools.hop_s[self._d[live.place.decision.decoder]]
                live.observed.encode_s = self.agenda.now_s - live.began_s + hop_s
                live.observed.transfer_s = copy_s - hop_s
            deed = self._decode if self.desk is None else self._hand_over
            self.agenda.at(self.agenda.now_s + copy_s, deed, (live, live.attempt))

    def _hand_over(self, what: tuple[LiveRequest, int]) -> None:
        if self.desk is not None:
            self.desk.take(self.desk.cost.between_s, self._decode, what)

    def _copy_s(self, decision: Decision, units: float) -> float:
        """The control hop, and the copies from each encoder, one after the other."""
        pools, d, encoders = self._pools, self._d[decision.decoder], decision.encoders
        starts_s, images_s, links = pools.start_s[d], pools.image_s[d], pools.link_names[d]
        seconds = pools.hop_s[d]
        for name in encoders if len(encoders) == 1 else dict.fromkeys(encoders):
            e = self._e[name]
            moved = encoders.count(name) * units
            seconds += starts_s[e] + moved * images_s[e]
            self._link_bytes[links[e]] += moved * self._embedding_bytes
        return seconds

    def _decode(self, what: tuple[LiveRequest, int]) -> None:
        live, attempt = what
        if live.is_ended or live.attempt != attempt or live.place is None:
            return
        live.sequence = SimulatedSequence(
            live, live.prompt_tokens + live.num_given, live.output_tokens - live.num_given
        )
        if self._log is not None:
            self._note(live, "decode", live.place.decision.decoder)
        if live.observed is not None:
            live.began_s = self.agenda.now_s
        self._decoders[live.place.decision.decoder].push(live.sequence)

    def lost(self, live: LiveRequest, num_given: int, attempt: int) -> None:
        """A stage died with an attempt: the request goes on elsewhere, from the tokens that it has."""
        if live.is_ended or live.attempt != attempt:
            return
        live.num_given += num_given
        live.sequence = None
        if live.place is not None:
            self.ledger.give_back(live.place)
            live.place = None
        if live.attempt >= MAX_ATTEMPTS:
            self.end(live, FAILED)
            return
        self.tally.num_retries += 1
        self._note(live, "again")
        self._start(live)

    # -- ends ---------------------------------------------------------------------------------------------

    def end(self, live: LiveRequest, outcome: int) -> None:
        """Ends a request that has not ended, and frees its place."""
        assert not live.is_ended, f"request {live.index} ends twice"
        live.is_ended = True
        sequence, place = live.sequence, live.place
        num_given = live.num_given
        if place is not None:
            if sequence is not None:
                is_cut = outcome != DONE
                num_given += self._decoders[place.decision.decoder].cancel(sequence) if is_cut else sequence.num_given
            if live.observed is not None and outcome == DONE:
                learn(self._router, place.decision, live.observed)
            self.ledger.give_back(place)
        self._outcomes.note_end(live.index, outcome, live.first_s, self.agenda.now_s, num_given)
        if self._log is not None:
            self._note(live, Outcomes.NAMES[outcome])
        live.sequence = live.place = None  # they know it too: nothing is left for the garbage collector
        self.serving.discard(live)
        if self.ended is not None:
            self.ended(live)
        self._dispatch()

    def _note(self, live: LiveRequest, what: str, replica: str = "") -> None:
        if self._log is not None:
            self._log(self.agenda.now_s, live.index, what, replica)
