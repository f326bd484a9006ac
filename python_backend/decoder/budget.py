"""How many prompt tokens a step may compute beside running decodes, so that their next tokens come in time."""

from __future__ import annotations

MIN_TOKENS = 32  # a step computes at least so many: fewer cost nearly as much, and prompts must go on
NEW_WEIGHT = 0.3  # of the newest step in a mean over the last few


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

    def learn(self, num_decodes: int, num_prompt_tokens: int, duration_s: float) -> None:
        """Take note of what a step took."""
        if num_prompt_tokens == 0:
            self._decode_s = _mean(self._decode_s, duration_s)
        else:
            decode_s = self._decode_s if num_decodes else 0.0
            self._token_s = _mean(self._token_s, max(duration_s - decode_s, 0.0) / num_prompt_tokens)


def _mean(before: float, new: float) -> float:
    return new if before == 0 else before + NEW_WEIGHT * (new - before)
