"""What must hold of a run's numbers whatever befell it, read from what it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from sandbox import records

GLOBAL_BATCH = 16


def curve(folder: Path) -> list[float]:
    """The loss of each step of a run, from step 1 on: of a step that was trained again, the later one.

    Checks that no step is missing, and that those that count used each sample once.
    """
    last = {step["step"]: step for step in records(folder, "step")}
    assert sorted(last) == list(range(1, len(last) + 1))
    assert [last[step]["samples"] for step in sorted(last)] == [GLOBAL_BATCH * step for step in sorted(last)]
    return [last[step]["loss"] for step in sorted(last)]


def assert_trained_again_alike(folder: Path, tolerance: float = 0.0) -> None:
    """Some steps were trained again after a fault, and gave the losses that they gave before it."""
    attempts: dict[int, dict[int, float]] = {}
    for step in records(folder, "step"):
        attempts.setdefault(step["attempt"], {})[step["step"]] = step["loss"]
    again = [
        (losses[step], loss)
        for attempt, losses in attempts.items()
        for step, loss in attempts.get(attempt + 1, {}).items()
        if step in losses
    ]
    assert again
    for before, after in again:
        assert after == (pytest.approx(before, abs=tolerance) if tolerance else before)


def assert_alike(losses: list[float], reference: list[float], tolerance: float = 0.0) -> None:
    """Step by step, as far as both go; bit for bit unless there is a tolerance."""
    both = min(len(losses), len(reference))
    assert both > 0
    assert losses[:both] == (pytest.approx(reference[:both], abs=tolerance) if tolerance else reference[:both])
    assert reference[0] - reference[-1] > 0.5, "a model that does not learn would prove nothing"
