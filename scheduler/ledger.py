"""What every replica has before it, kept by those who place requests and end them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from scheduler.decision import Decision
from scheduler.loads import Loads, RecentKeys, RequestShape

MAX_PREFIXES = 2048
"""Keys of prompt beginnings remembered per decoder: of so many it is assumed that they are in its cache."""


@dataclass(slots=True, eq=False)
class Place:
    """What one attempt of a request holds at the replicas of its decision."""

    decision: Decision
    num_tokens: int  # charged to the decoder
    is_encoded: bool = False
    is_given_back: bool = False


class Ledger:
    """Loads, changed by what happens to requests. Not thread-safe: its owner holds a lock.

    `loads` are those of an idle server (`Router.idle`); from now on only the ledger changes them, and it tells the
    router which ones did.
    """

    def __init__(self, loads: Loads) -> None:
        self.loads = loads
        self._images_of = {name: RecentKeys(load.free_slots or 0) for name, load in loads.encoders.items()}
        self._changed: set[str] = {*loads.encoders, *loads.decoders}
        self._holders: dict[bytes, set[str]] = {}
        for name, load in loads.encoders.items():
            load.cached = self._images_of[name]
        loads.changed, loads.holders = self._changed, self._holders
        self._prefixes_of = {name: RecentKeys(MAX_PREFIXES) for name in loads.decoders}
        self._prefixes = RecentKeys(MAX_PREFIXES * len(loads.decoders))  # of any decoder
        for name, load in loads.decoders.items():
            load.prefixes = self._prefixes_of[name]

    def with_known_prefix(self, shape: RequestShape, prefixes: Sequence[tuple[bytes, int]]) -> RequestShape:
        """The shape with the longest beginning of its prompt that a decoder has read; see `scheduler.prefix`."""
        known = next(((key, size) for key, size in reversed(prefixes) if key in self._prefixes), None)
        return shape if known is None else replace(shape, prefix_key=known[0], prefix_tokens=known[1])

    def note_prefixes(self, decoder: str, prefixes: Sequence[tuple[bytes, int]]) -> None:
        """A decoder will have read these beginnings."""
        keys = [key for key, _ in prefixes]
        self._prefixes_of[decoder].note(keys)
        self._prefixes.note(keys)

    def take(self, decision: Decision, shape: RequestShape) -> Place:
        """Charges a request to the replicas it goes to."""
        place = Place(decision, shape.total_tokens)
        decoder = self.loads.decoders[decision.decoder]
        decoder.running += 1
        decoder.pending_tokens += place.num_tokens
        self._changed.add(decision.decoder)
        for name in decision.encoders:
            encoder = self.loads.encoders[name]
            encoder.pending_images += 1
            encoder.free_slots = (encoder.free_slots or 0) - 1
            self._changed.add(name)
        if shape.image_keys:
            for name, key in zip(decision.encoders, shape.image_keys, strict=True):
                # Noted before it is there: the same image that comes meanwhile goes to the same encoder.
                self._note_image(name, key)
        return place

    def note_encoded(self, place: Place) -> None:
        """Takes the images of a request off the encoders' queues; nothing if that was done."""
        if not place.is_encoded:
            place.is_encoded = True
            for name in place.decision.encoders:
                self.loads.encoders[name].pending_images -= 1
                self._changed.add(name)

    def give_back(self, place: Place) -> None:
        """Ends the charges of a request; nothing if that was done."""
        if place.is_given_back:
            return
        place.is_given_back = True
        self.note_encoded(place)
        decision = place.decision
        decoder = self.loads.decoders[decision.decoder]
        decoder.running -= 1
        decoder.pending_tokens -= place.num_tokens
        self._changed.add(decision.decoder)
        for name in decision.encoders:
            encoder = self.loads.encoders[name]
            encoder.free_slots = (encoder.free_slots or 0) + 1
            self._changed.add(name)

    def set_available(self, name: str, is_available: bool) -> None:
        """A replica died or came back; either way its store is empty."""
        for loads in (self.loads.encoders, self.loads.decoders):
            if name in loads:
                loads[name].is_available = is_available
        self._changed.add(name)
        if name in self._images_of:
            self._forget(name, list(self._images_of[name]))
            self._images_of[name].forget()
        if name in self._prefixes_of:
            self._prefixes_of[name].forget()

    def _note_image(self, name: str, key: bytes) -> None:
        self._holders.setdefault(key, set()).add(name)
        self._forget(name, self._images_of[name].note([key]))

    def _forget(self, name: str, keys: Iterable[bytes]) -> None:
        for key in keys:
            holders = self._holders[key]
            holders.discard(name)
            if not holders:
                del self._holders[key]
