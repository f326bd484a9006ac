"""The step chooser over random arrivals, ends and cancels: the right tokens, in order, within its limits."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from python_backend.decoder.batch import Chunk, StepChooser
from python_backend.decoder.intake import expand_prompt
from python_backend.decoder.kv_cache import BlockPool
from python_backend.decoder.sequence import DecodeRequest, ImageEmbedding, Sequence
from python_backend.request import SamplingParameters
from tests.unit.decoder.conftest import IMAGE, byte_tokenizer, features

TOKENIZER = byte_tokenizer()
BLOCK_TOKENS = 2
IMAGES = tuple(ImageEmbedding(name, features(3)) for name in (b"a", b"b"))


def make_sequence(serial: int, token_ids: list[int], images: list[int]) -> Sequence:
    """A sequence over few tokens and two images, so that prefixes often agree."""
    ids = tuple(token_ids) + (IMAGE,) * len(images) + (9,)
    chosen = tuple(IMAGES[index] for index in images)
    request = DecodeRequest(str(serial), ids, chosen, SamplingParameters())
    prompt = expand_prompt(ids, chosen, IMAGE)
    return Sequence(request, lambda delta: None, serial, prompt, TOKENIZER, seed=0)


def content(sequence: Sequence) -> list[object]:
    """What each position of a sequence holds: a token id or a row of an image."""
    items: list[object] = list(sequence.token_ids)
    for span in sequence.spans:
        items[span.start : span.end] = [(span.image.digest, row) for row in range(span.end - span.start)]
    return items


class ChooserMachine(RuleBasedStateMachine):
    """A model that only remembers what was written into each place of the cache."""

    @initialize(
        num_blocks=st.integers(8, 20),
        max_sequences=st.integers(1, 5),
        spare_tokens=st.integers(0, 8),
        shares=st.booleans(),
    )
    def start(self, num_blocks: int, max_sequences: int, spare_tokens: int, shares: bool) -> None:
        self.max_tokens = num_blocks * BLOCK_TOKENS
        self.max_sequences, self.max_step_tokens = max_sequences, max_sequences + spare_tokens
        self.pool = BlockPool(num_blocks)
        self.chooser = StepChooser(self.pool, BLOCK_TOKENS, self.max_sequences, self.max_step_tokens, shares)
        self.cache: dict[tuple[int, int], tuple[object, ...]] = {}  # place: the whole prefix written there
        self.num_submitted = 0
        self.live: list[Sequence] = []

    @rule(token_ids=st.lists(st.integers(4, 5), max_size=4), images=st.lists(st.integers(0, 1), max_size=2))
    def submit(self, token_ids: list[int], images: list[int]) -> None:
        sequence = make_sequence(self.num_submitted, token_ids, images)
        self.num_submitted += 1
        self.live.append(sequence)
        self.chooser.add(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.chooser.remove(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.run_step(lambda: data.draw(st.integers(4, 5)), lambda: data.draw(st.integers(0, 9)) == 0)

    def run_step(self, next_token: object, ends: object) -> None:
        chunks = self.chooser.choose()
        self.check(chunks)
        for chunk in chunks:
            items = content(chunk.sequence)
            blocks = chunk.sequence.blocks
            for at in range(chunk.start, chunk.end):
                place = (blocks[at // BLOCK_TOKENS], at % BLOCK_TOKENS)
                self.cache[place] = tuple(items[: at + 1])
        for chunk in chunks:
            sequence = chunk.sequence
            items = content(sequence)
            for at in range(chunk.end):  # what attention reads is what this sequence needs
                place = (sequence.blocks[at // BLOCK_TOKENS], at % BLOCK_TOKENS)
                assert self.cache[place] == tuple(items[: at + 1])
            self.chooser.complete(chunk)
            if chunk.end == sequence.num_tokens:
                sequence.token_ids.append(next_token())  # type: ignore[operator]
                if ends() or sequence.num_tokens >= self.max_tokens:  # type: ignore[operator]
                    self.chooser.remove(sequence)
                    self.live.remove(sequence)

    def check(self, chunks: list[Chunk]) -> None:
        assert chunks, "somebody always goes on"
        oldest = min(self.live, key=lambda sequence: sequence.serial)
        assert any(chunk.sequence is oldest for chunk in chunks), "the oldest always goes on"
        assert sum(chunk.num_tokens for chunk in chunks) <= self.max_step_tokens
        assert len({chunk.sequence.serial for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            assert chunk.start == chunk.sequence.num_computed
            assert 0 < chunk.num_tokens <= chunk.sequence.num_uncomputed
            assert chunk.end <= len(chunk.sequence.blocks) * BLOCK_TOKENS
        decoding = {each.serial for each in self.chooser.running if each.is_decoding}
        assert decoding <= {chunk.sequence.serial for chunk in chunks}, "every running decode gets its token"

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "chooser"):
            return
        running = self.chooser.running
        self.pool.check_integrity([sequence.blocks for sequence in running])
        assert len(running) <= self.max_sequences
        serials = [sequence.serial for sequence in (*running, *self.chooser.waiting)]
        assert serials == sorted(sequence.serial for sequence in self.live), "first come, first served"

    def teardown(self) -> None:
        for _ in range(2000):
            if not getattr(self, "live", []):
                break
            self.run_step(lambda: 4, lambda: False)
        else:
            raise AssertionError("the sequences do not end")


TestChooser = ChooserMachine.TestCase
TestChooser.settings = settings(max_examples=60, stateful_step_count=30)


def test_two_images_never_share_a_block_and_equal_ones_do() -> None:
    first, same, other = (make_sequence(serial, [4], images) for serial, images in enumerate(([0], [0], [1])))

    keys = [list(sequence.block_keys(BLOCK_TOKENS, 2)) for sequence in (first, same, other)]

    assert keys[0] == keys[1]
    assert not set(keys[0]) & set(keys[2])


def test_a_newer_prompt_waits_behind_the_running_decodes() -> None:
    chooser = StepChooser(BlockPool(20), BLOCK_TOKENS, 4, 4, shares_prefixes=False)
    old, new = make_sequence(0, [], []), make_sequence(1, [4] * 9, [])
    chooser.add(old)
    chooser.complete(chooser.choose()[0])
    old.token_ids.append(5)
    chooser.add(new)

    chunks = chooser.choose()

    assert [(chunk.sequence.serial, chunk.start, chunk.num_tokens) for chunk in chunks] == [(0, 1, 1), (1, 0, 3)]


def test_a_prompt_is_admitted_when_those_that_run_have_a_block_each_left_to_grow() -> None:
    pool = BlockPool(5)
    chooser = StepChooser(pool, BLOCK_TOKENS, 4, 20, shares_prefixes=False)
    for serial in range(2):
        chooser.add(make_sequence(serial, [4, 4], []))  # three tokens: two blocks
    chooser.choose()
    assert [each.serial for each in chooser.running] == [0, 1]

    chooser.add(make_sequence(2, [], []))  # one block, and it is there
    chooser.choose()
    assert [each.serial for each in chooser.waiting] == [2]

    chooser.remove(chooser.running[-1])
    chooser.choose()
    assert [each.serial for each in chooser.running] == [0, 2]
