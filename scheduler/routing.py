"""Chooses the replicas of each request. The policies are in `finish` (default) and `article`."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import get_args

from scheduler.article import ArticleRule
from scheduler.assignment import Assignment
from scheduler.board import Board
from scheduler.cost import Costs
from scheduler.decision import ARTICLE, TEXT, Decision, Mode, NoReplica, StageChoice, StagesFull
from scheduler.estimate import RunningEstimate
from scheduler.finish import Choice, choose, choose_mode
from scheduler.loads import Load, Loads, RequestShape
from scheduler.plan import Plan
from scheduler.pools import Pools, costs_of
from scheduler.pricing import Pricing
from scheduler.profile import Policy

POLICIES = get_args(Policy)
SHORTEST_RETRY_S, LONGEST_RETRY_S = 0.1, 60.0
SMALLEST_CHANGE = 1.02
"""A factor that moves by less leaves the prices as they are: to compute them anew costs more than a decision."""


class Router:
    """Decides for one plan. Deterministic; not thread-safe: its owner holds a lock.

    It remembers what was observed of each replica and the last mode of each decoder's device. `policy` None is the
    plan's own; `costs` None are rooflines. Without `predicts`, decisions say neither what they predict nor what they
    weighed: a simulation that learns nothing looks at neither.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs | Mapping[str, Costs] | None = None,
        policy: str | None = None,
        predicts: bool = True,
    ) -> None:
        self.policy = policy or plan.schedule.policy
        self._predicts = predicts
        if self.policy not in POLICIES:
            raise ValueError(f"policy {self.policy!r}; allowed: {', '.join(map(repr, POLICIES))}")
        self._plan = plan
        self._pools = Pools(plan, costs_of(plan, costs))
        if self.policy in ("serial", "split"):
            num_encoders = len(self._pools.encoders)
            if not any(own if self.policy == "serial" else len(own) < num_encoders for own in self._pools.own):
                raise ValueError(f"policy {self.policy!r}: no decoder of the plan can have its images encoded so")
        self._article = ArticleRule(plan, self._pools)
        self._modes: dict[str, Mode] = {}
        self._estimates: dict[tuple[str, str], RunningEstimate] = {}
        self._limit = plan.decode.max_sequences + plan.decode.max_waiting
        # Who always encodes in one place has no choice that the demand could move.
        follows_demand = self.policy == "cost"
        sizes = (self._limit, plan.decode.max_sequences)
        self._board = Board(self._pools, *sizes, plan.schedule.stall_weight, follows_demand)

    def idle(self) -> Loads:
        """Loads of a server that has nothing to do, for its owner to keep current."""
        slots = self._plan.encode.slots
        return Loads(
            {name: Load(free_slots=slots) for name in self._pools.encoders},
            {name: Load() for name in self._pools.decoders},
        )

    def has_room(self, loads: Loads, num_arriving: int = 0) -> bool:
        """Whether a decoder can take one more beside `num_arriving` that are not counted in its load yet.

        Ask before a request is taken from the waiting room and encoded.
        """
        num_free = 0
        for name in self._pools.decoders:
            load = loads.decoders.get(name)
            if load is not None and load.is_available and load.running < self._limit:
                num_free += self._limit - load.running
                if num_free > num_arriving:
                    return True
        return False

    def turn_s(self, prompt_tokens: int, max_tokens: int) -> float:
        """Between two places that become free while all decoders are full of requests of that size, predicted."""
        batch = self._plan.decode.max_sequences
        context = batch * (prompt_tokens + max_tokens / 2)
        per_s = 0.0
        for step_s, weight_s, context_s, sequence_s in (rates[:4] for rates in self._pools.decode_rates):
            per_s += batch / (max_tokens * (step_s + max(weight_s + context * context_s, batch * sequence_s)))
        return 1 / per_s

    def hop_s(self, decoder: str) -> float:
        """Of a decoder's predicted transfers, the part that is the control message."""
        return self._pools.hop_s[self._pools.index("decode", decoder)]

    def decide(self, shape: RequestShape, loads: Loads, now_s: float | None = None) -> Decision:
        """Where a request of that shape goes. Without the time, what was sent to encoders before is not looked at.

        Raises:
            NoReplica: a stage that it needs has no available replica.
            StagesFull: every available decoder holds all it may, or (policy `article`) every encoder.
        """
        demand = self._board.demand
        if demand is not None and now_s is not None:
            demand.look(now_s)
        pricing = self._priced(shape, loads)
        if self.policy == "article":
            return self._by_article(shape, pricing)
        if self.policy == "cost" or not shape.num_images:
            how = (self._modes, self._plan.schedule.hysteresis, self._predicts)
            choice = choose(self._pools, pricing, shape.num_images > 0, *how)
        else:
            choice = choose_mode(self._pools, pricing, "serial" if self.policy == "serial" else "split")
        if choice.d < 0:
            raise self._full(shape, pricing)
        if demand is not None and now_s is not None and choice.assignment is not None:
            units = shape.image_units
            for e, num_images in choice.assignment.counts.items():
                demand.send(e, self._pools.encode_s(e, num_images * units))
        return self._told(shape, pricing, choice, None)

    def observe(self, stage: str, replica: str, predicted_s: float, observed_s: float) -> None:
        """Takes note of how long a stage really took; later predictions for that replica follow.

        `replica` is an encoder for stage `encode`, a decoder for `transfer`, `prefill` and `decode`.
        """
        index = self._pools.index(stage, replica)
        estimate = self._estimates.get((stage, replica), RunningEstimate()).updated(predicted_s, observed_s)
        self._estimates[stage, replica] = estimate
        used = self._pools.factors[stage][index]
        if not used / SMALLEST_CHANGE < estimate.factor < used * SMALLEST_CHANGE:
            self._pools.scale(stage, index, estimate.factor)
            self._board.rates_changed(stage, index)

    def factor(self, stage: str, replica: str) -> float:
        """How many times longer than by its cost function a stage of a replica takes, as observed so far."""
        return self._estimates.get((stage, replica), RunningEstimate()).factor

    # -- prices -------------------------------------------------------------------------------------------

    def _priced(self, shape: RequestShape, loads: Loads) -> Pricing:
        board = self._board
        board.follow(loads)
        what = "device " if self.policy == "article" else ""
        if not board.num_decoders:
            raise NoReplica(f"no decoder {what}available" if what else "no decoder is available")
        if shape.num_images and not board.num_encoders:
            raise NoReplica(f"no encoder {what}available" if what else "no encoder is available")
        return Pricing(board, shape, loads)

    def _full(self, shape: RequestShape, pricing: Pricing) -> StagesFull:
        """Says how full, and when the first place is predicted to become free."""
        loads = [(d, load) for d, load in enumerate(pricing.decoder_loads) if load is not None]
        waits_s = [self._place_s(shape, d, load) for d, load in loads]
        retry_s = min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, min(waits_s)))
        least = min(load.running for _, load in loads)
        text = f"all {len(loads)} decoders are full: each holds {least} requests or more, {self._limit} allowed"
        return StagesFull(text, round(retry_s, 1))

    def _place_s(self, shape: RequestShape, d: int, load: Load) -> float:
        """Until enough sequences of decoder `d` have ended: one in `max_sequences` of an answer's time for each."""
        step_s, weight_s, context_s, sequence_s = self._pools.decode_rates[d][:4]
        batch = self._plan.decode.max_sequences
        answer_s = shape.max_tokens * (step_s + max(weight_s + load.pending_tokens * context_s, batch * sequence_s))
        return answer_s * (load.running - self._limit + 1) / batch

    # -- the article's rule -------------------------------------------------------------------------------

    def _by_article(self, shape: RequestShape, pricing: Pricing) -> Decision:
        encoder = self._article.encoder(pricing.encoder_loads) if shape.num_images else None
        if shape.num_images and encoder is None:
            num_full = sum(load is not None for load in pricing.encoder_loads)
            raise StagesFull(f"no encoder device available: all {num_full} are full", SHORTEST_RETRY_S)
        able = [
            load if bound < inf else None
            for load, bound in zip(pricing.decoder_loads, pricing.bounds.tolist(), strict=True)
        ]
        decoder = self._article.decoder(able, encoder[0] if encoder else None)
        if decoder is None:
            raise self._full(shape, pricing)
        d = decoder[0]
        if encoder is None:
            return self._told(shape, pricing, Choice(d, None, "text", TEXT), (0.0, decoder[1]))
        e, num_images = encoder[0], shape.num_images
        side_s = pricing.side_s(e, num_images) + pricing.copy_s(e, d, num_images)
        assignment = Assignment([e] * num_images, {e: num_images}, {e: num_images}, {e: side_s}, side_s)
        mode: Mode = "serial" if e in self._pools.own[d] else "split"
        return self._told(shape, pricing, Choice(d, assignment, mode, ARTICLE), (encoder[1], decoder[1]))

    # -- the decision -------------------------------------------------------------------------------------

    def _told(
        self, shape: RequestShape, pricing: Pricing, choice: Choice, weights: tuple[float, float] | None
    ) -> Decision:
        """The choice with names and predictions. `weights` of encoder and decoder; None: the predicted prices."""
        pools, d, assignment = self._pools, choice.d, choice.assignment
        encoders = () if assignment is None else tuple([pools.encoders[e] for e in assignment.order])
        if not self._predicts:
            return Decision(encoders, pools.decoders[d], choice.mode, self.policy, choice.reason_kind)
        encode_s = transfer_s = stall_s = side_s = 0.0
        stages: list[StageChoice] = []
        if assignment is not None:
            dearest, counts = -1, assignment.counts
            names, places = pools.encoders, pools.encoder_places
            for e, price_s in assignment.prices.items():
                stages.append(StageChoice("encode", names[e], places[e], weights[0] if weights else price_s))
                stalled_s = pricing.stall_s(e, counts.get(e, 0))
                stall_s += stalled_s
                if price_s - stalled_s > side_s:
                    dearest, side_s = e, price_s - stalled_s
            encode_s = pricing.ready_s(dearest, counts.get(dearest, 0))
            transfer_s = pricing.copy_s(dearest, d, assignment.moved.get(dearest, 0))
            side_s = encode_s + transfer_s
        price_s, wait_s, prefill_s = pricing.price_s(d, side_s), pricing.waiting_s(d), pricing.prefill_s(d)
        finish_s = price_s - pricing.crowding_s(d)
        weight = weights[1] if weights else price_s
        stages.append(StageChoice("decode", pools.decoders[d], pools.decoder_places[d], weight))
        load = pricing.decoder_loads[d]
        return Decision(
            encoders=encoders,
            decoder=pools.decoders[d],
            mode=choice.mode,
            policy=self.policy,
            reason_kind=choice.reason_kind,
            stages=tuple(stages),
            encode_s=encode_s,
            transfer_s=transfer_s,
            stall_s=stall_s,
            wait_s=wait_s,
            prefill_s=prefill_s,
            step_s=(finish_s - max(side_s, wait_s) - prefill_s) / max(1, shape.max_tokens),
            finish_s=finish_s,
            running=load.running if load is not None else 0,
            alternative=choice.alternative,
        )


__all__ = ["Decision", "Load", "Loads", "NoReplica", "RequestShape", "Router", "StagesFull"]
