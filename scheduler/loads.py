"""What a request needs and what each replica has before it: all that a decision looks at."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from scheduler.cost import IMAGE_TOKENS

NOTHING: frozenset[bytes] = frozenset()


@dataclass(slots=True)
class Load:
    """What one replica has before it. Its owner may change it in place between decisions.

    Of an encoder count `pending_*`, `free_slots` and `cached`; of a decoder `running`, `pending_tokens`,
    `free_kv_tokens`, `cached` and `prefixes`. None is unknown, and then it does not count.
    """

    pending_images: int = 0  # encoder: accepted, not yet encoded, of the usual size
    pending_tokens: int = 0  # decoder: prompt and answer tokens of what runs or arrives; encoder: of other images
    running: int = 0  # decoder: sequences that run or arrive
    free_slots: int | None = None  # encoder: embeddings that fit
    free_kv_tokens: int | None = None  # decoder: context tokens that fit
    cached: Collection[bytes] = NOTHING  # keys of images that need no encode, or no copy and no prefill
    prefixes: Collection[bytes] = NOTHING  # decoder: keys of prompt beginnings in its cache
    is_available: bool = True


@dataclass(slots=True)
class Loads:
    """The loads of all replicas, by name. One that is missing is not available."""

    encoders: Mapping[str, Load]
    decoders: Mapping[str, Load]
    # Kept by a ledger, so that a decision need not look at all: the names of the replicas that changed since the last
    # decision, which takes them out, and by key of an image the encoders that have it. None: not known.
    changed: set[str] | None = field(default=None, compare=False)
    holders: Mapping[bytes, Collection[str]] | None = field(default=None, compare=False)


@dataclass(slots=True)  # a frozen one takes three times as long to make; nobody changes it
class RequestShape:
    """The size of a request. `prompt_tokens` counts those of the images too."""

    num_images: int = 0
    prompt_tokens: int = 0
    max_tokens: int = 256
    image_tokens: int = IMAGE_TOKENS  # of each image
    image_keys: tuple[bytes, ...] = ()  # one per image where known; equal keys are equal images
    prefix_key: bytes | None = None  # names the first `prefix_tokens` of the prompt
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        if self.image_keys and len(self.image_keys) != self.num_images:
            raise ValueError(f"{len(self.image_keys)} image_keys for {self.num_images} images; allowed: none or all")

    @property
    def total_tokens(self) -> int:
        """The longest that its context can become."""
        return self.prompt_tokens + self.max_tokens

    @property
    def image_units(self) -> float:
        """What one of its images costs an encoder, in images of 336 x 336."""
        return self.image_tokens / IMAGE_TOKENS


@dataclass(slots=True)
class RecentKeys:
    """The last `capacity` keys noted: what a replica that caches so many still has. Not thread-safe."""

    capacity: int
    _keys: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def note(self, keys: Iterable[bytes]) -> list[bytes]:
        """Makes keys the newest; the oldest beyond the capacity are forgotten: the result."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        forgotten = []
        while len(self._keys) > self.capacity:
            forgotten.append(self._keys.popitem(last=False)[0])
        return forgotten

    def forget(self) -> None:
        """Forgets all: the replica was restarted."""
        self._keys.clear()
