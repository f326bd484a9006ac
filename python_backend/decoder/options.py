"""What the engine is told at its start, and what it tells about itself while it runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHTS = ("plain", "int8")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How one engine runs. `num_blocks` None is as many as `kv_cache_bytes` holds.

    A step computes at most `max_step_tokens`: the fewer, the less a new prompt delays the tokens of running
    sequences; the more, the sooner its first token comes.

    Raises:
        ValueError: a value out of range; the message names it and what is allowed.
    """

    device: str = "cpu"
    dtype: str = "float32"  # exact, and what every processor has
    weights: str = "plain"  # or "int8": half of bfloat16's memory traffic, and rounded; compiled operators only
    block_tokens: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int = 2**30
    max_sequences: int = 32
    max_step_tokens: int = 1024
    max_waiting: int = 256
    num_threads: int | None = None  # None leaves torch's own choice
    context_tokens: int | None = None  # None is all that the model and the cache allow
    prefix_cache: bool = True
    step_limit_s: float = 0.5  # prompts are cut so that a step beside running decodes takes about so long at most
    graphs: bool = True  # on a GPU, decode steps recorded as CUDA graphs
    runs_ahead: bool | None = None  # decode steps in fixed memory, one ahead of the host; None: on a GPU
    compile: bool = True  # on a CPU, operators compiled at the first start (a second or two) if there is a compiler

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r}; allowed: {', '.join(DTYPES)}")
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights {self.weights!r}; allowed: {', '.join(WEIGHTS)}")
        for name in ("block_tokens", "kv_cache_bytes", "max_sequences", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}; allowed: 1 or more")
        for name in ("num_blocks", "num_threads", "context_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} {value}; allowed: 1 or more, or none")
        if self.step_limit_s <= 0:
            raise ValueError(f"step_limit_s {self.step_limit_s}; allowed: above 0")
        if self.max_step_tokens < self.max_sequences:
            raise ValueError(
                f"max_step_tokens {self.max_step_tokens}; allowed: max_sequences ({self.max_sequences}) or "
                "more, since each running sequence has one token in a step"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of weights, cache and activations."""
        return DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Counts at the end of the last step; totals are since the engine was loaded."""

    num_running: int = 0
    num_waiting: int = 0
    free_blocks: int = 0  # idle blocks of the prefix cache among them
    total_blocks: int = 0
    num_steps: int = 0
    last_batch_sequences: int = 0  # sequences that decoded one token in the last step
    largest_batch_sequences: int = 0
    num_generated_tokens: int = 0
    pending_prefill_tokens: int = 0
    num_prompt_tokens: int = 0  # of all admitted sequences
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_preemptions: int = 0
