"""One sentence about a failure: which rank, where in the training, what happened, what helps."""

from __future__ import annotations

import traceback

MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")
TIMEOUT = ("timed out", "timeout", "watchdog caught collective")
LOST = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "remote process exited",
    "connection was likely closed",
)
RESUME = "The same command goes on from the last checkpoint."


def explain_failure(error: BaseException, rank: int, where: object, timeout: float) -> str:
    """`where` is the position in the training, None before it began."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    low = text.lower()
    operation = traceback.extract_tb(error.__traceback__)[-1].name if error.__traceback__ else "an operation"
    place = f"rank {rank}, {where or 'while starting'}"
    if isinstance(error, MemoryError) or any(word in low for word in MEMORY):
        return (
            f"{place}: out of memory. Lower data.batch; or keep it and raise optim.accumulate (smaller "
            "micro-batches), set model.checkpoint_activations=true or train.precision=bf16, or use more ranks. If a "
            "survey or an evaluation ran out of memory, set data.eval_batch below 64. "
            f"({text[:200]})"
        )
    if any(word in low for word in TIMEOUT):
        return (
            f"{place}: {operation} waited {timeout:g} s (train.timeout) for another rank, which hangs or cannot "
            f"be reached. {RESUME} ({text[:200]})"
        )
    if any(word in low for word in LOST):
        return f"{place}: another rank exited during {operation}; its own output says why. {RESUME} ({text[:200]})"
    return f"{place}: {text[:500]}"
