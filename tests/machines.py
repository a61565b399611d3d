"""What the tests that let hypothesis or dice drive whole worlds have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from hypothesis import HealthCheck, settings


def machine_settings(examples: int, steps: int, *, derandomize: bool) -> settings:
    """For `run_state_machine_as_test`: nothing depends on how fast the machine is."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=derandomize,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def run_seeds(run: Callable[[int], Counter[str]], seeds: Iterable[int]) -> Counter[str]:
    """What happened in all runs together; an error names the seed of its run."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen += run(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    return seen
