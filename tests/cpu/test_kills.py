"""A few of the soak's kills (`benchmarks/kills.py`); the soak itself does fifty."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SEED = 7


def test_after_any_kill_the_newest_published_checkpoint_is_resumed() -> None:
    soak = Path(__file__).resolve().parents[2] / "benchmarks" / "kills.py"
    done = subprocess.run(
        [sys.executable, str(soak), "--kills", "4", "--seed", str(SEED)],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"seed {SEED}" in done.stdout
    assert "1 × driver, 1 × node, 1 × rank, 1 × writer killed; nothing wrong" in done.stdout
