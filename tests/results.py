"""Outcomes of steps, as tests need them."""

from typing import Any

from pserver.types import StepResult


def step_result(round_number: int, **about: Any) -> StepResult:
    """What a trainer hears of a step that was counted, alone in its round; `about` says what is different."""
    usual: dict[str, Any] = {
        "accepted": True,
        "stepped": True,
        "overflow": False,
        "reason": "",
        "error": "",
        "num_trainers": 1,
        "staleness": 0,
        "grad_norm": None,
        "num_nonfinite": 0,
        "options": (),
    }
    return StepResult(round=round_number, **usual | about)
