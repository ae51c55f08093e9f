"""A disk that refuses what the ranks have written is borne for a while, then ends the run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, cast

import planning
import pytest
from test_events import FACTS
from test_store import save

from raytrain_llama3.checkpoint.folder import SIDECAR_NAME, iteration_path
from raytrain_llama3.checkpoint.store import CheckpointStore
from raytrain_llama3.errors import CheckpointError
from raytrain_llama3.launch.checkpoints import RunCheckpoints
from raytrain_llama3.launch.history import History
from raytrain_llama3.launch.keepers import Keepers
from raytrain_llama3.messages import SaveRecord
from raytrain_llama3.metrics import open_metrics


def refused(root: Path, step: int) -> SaveRecord:
    """A save whose sidecar cannot be written: there is a folder of its name."""
    record = save(root, step)
    (iteration_path(root, step) / SIDECAR_NAME).mkdir()
    return record


def test_a_disk_that_refuses_to_publish_is_borne_as_often_as_it_may_in_a_row(tmp_path: Path) -> None:
    root, out = tmp_path / "checkpoints", io.StringIO()
    flags = [*planning.TINY, "--save", str(root), "--max-failed-saves", "2"]
    metrics = open_metrics(FACTS, tmp_path / "logs", out, None, None, {})
    # Without memory checkpoints keepers never ask for the crew.
    keepers = Keepers(cast(Any, None), "run", is_wanted=False)
    store = CheckpointStore(root, None)
    with metrics, store.lock():
        checkpoints = RunCheckpoints(store, planning.planned(flags, planning.cpu()), metrics, History(), keepers)
        for step in (1, 2):
            checkpoints.take(refused(root, step))
            assert f"step {step} was not saved ({step} in a row, max_failed_saves 2)" in out.getvalue()
        checkpoints.take(save(root, 3))
        for step in (4, 5):
            checkpoints.take(refused(root, step))
        with pytest.raises(CheckpointError, match="3 saves in a row failed, more than max_failed_saves 2"):
            checkpoints.take(refused(root, 6))
    assert store.complete() == [3]
