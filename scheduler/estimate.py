"""Keeps predictions honest: a factor per replica and stage, moved by what was observed."""

from __future__ import annotations

import math
from dataclasses import dataclass

SMOOTHING = 0.1
"""Weight of the newest observation: about ten requests after a change the factor has followed it."""

LOWEST, HIGHEST = 1 / 64, 64.0
"""Bounds of a factor: one absurd clock reading must not silence a replica for ever."""


@dataclass(frozen=True, slots=True)
class RunningEstimate:
    """Observed seconds over predicted seconds, smoothed on a logarithmic scale so that 2 and 1/2 weigh alike."""

    factor: float = 1.0
    num_observed: int = 0

    def updated(self, predicted_s: float, observed_s: float) -> RunningEstimate:
        """The estimate after one more observation. `predicted_s` is with the factor of that time.

        An observation without meaning (not positive, not finite) changes nothing.
        """
        if not (0 < predicted_s < math.inf and 0 < observed_s < math.inf):
            return self
        ratio = min(HIGHEST, max(LOWEST, observed_s / predicted_s))
        factor: float = self.factor * ratio**SMOOTHING
        return RunningEstimate(min(HIGHEST, max(LOWEST, factor)), self.num_observed + 1)
