"""What a decoder's next step computes, by counts alone: the engine chooses by these rules, and so does the simulator.

Running decodes come first, one token each; then prompts that were begun; then waiting requests, in order, as long as
there is room for all their known tokens.
"""

from __future__ import annotations

MIN_TOKENS = 32  # a step computes at least so many: fewer cost nearly as much, and prompts must go on
NEW_WEIGHT = 0.3  # of the newest step in a mean over the last few


def count_free_tokens(num_decodes: int, max_step_tokens: int, budget: PromptBudget | None) -> int:
    """Prompt tokens that fit into a step beside so many decodes."""
    num_free = max_step_tokens - num_decodes
    return num_free if budget is None else min(num_free, budget.tokens(num_decodes))


def may_admit(num_running: int, max_sequences: int, num_new_blocks: int, num_available_blocks: int) -> bool:
    """Whether one more may run that needs so many blocks of the cache.

    A block is left for each that runs: it may soon need one, and would preempt the newest for it.
    """
    return num_running < max_sequences and num_new_blocks + num_running <= num_available_blocks


class PromptBudget:
    """Learns what decodes and prompt tokens cost from the steps that were run. Owned by the engine thread."""

    def __init__(self, limit_s: float, max_tokens: int) -> None:
        self._limit_s = limit_s
        self._max_tokens = max_tokens
        self._decode_s = 0.0  # a step without prompts
        self._token_s = 0.0  # what one prompt token adds; 0 until the first was seen

    def tokens(self, num_decodes: int) -> int:
        """Prompt tokens for a step with so many decodes; all that fit when nobody waits for the step's end."""
        if num_decodes == 0 or self._token_s == 0:
            return self._max_tokens
        wanted = int((self._limit_s - self._decode_s) / self._token_s)
        return max(MIN_TOKENS, min(wanted, self._max_tokens))

    def learn(self, num_decodes: int, num_prompt_tokens: int, duration_s: float, num_steps: int = 1) -> None:
        """Take note of what a step took, or each of several equal ones without prompts."""
        if num_prompt_tokens == 0:
            self._decode_s = _mean(self._decode_s, duration_s, num_steps)
        else:
            decode_s = self._decode_s if num_decodes else 0.0
            self._token_s = _mean(self._token_s, max(duration_s - decode_s, 0.0) / num_prompt_tokens)


def _mean(before: float, new: float, times: int = 1) -> float:
    return new if before == 0 else new + (1 - NEW_WEIGHT) ** times * (before - new)
