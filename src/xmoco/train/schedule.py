"""Schedules: pure functions of the step, so that resuming or replaying needs no state."""

import math


def learning_rate(
    step: int, total_steps: int, *, peak: float, offset: float, warmup_steps: int
) -> float:
    """Cosine from ``peak`` down to ``offset · peak``, after a linear warm-up.

    The paper's "cosine scheduler with coefficient 0.5 and offset 0.1":
    lr0 · (offset + (1 − offset) · 0.5 · (1 + cos π t/T)).
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * (offset + (1 - offset) * 0.5 * (1 + math.cos(math.pi * done)))
