"""On a GPU a process that stands by takes over, on a device that the last one has left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_gpu_resume import finished, start

ENDLESS = ("--train-iters", "1000000", "--save-interval", "50", "--log-interval", "50", "--hang-timeout-s", "5")


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(("number", "kind"), [(signal.SIGKILL, "process died"), (signal.SIGSTOP, "hang")])
def test_a_standby_process_takes_over(tmp_path: Path, dtype: str, number: signal.Signals, kind: str) -> None:
    process = start(tmp_path, "--dtype", dtype, *ENDLESS)
    lines = [*until(process, "standby ready")]
    lines += until(process, "saved in")
    os.kill(pid_of_rank(tmp_path / "logs" / "attempt_0" / "rank_0.log"), number)
    lines += until(process, "recovered in")
    lines += until(process, "saved in")
    process.send_signal(signal.SIGTERM)
    lines += finished(process).splitlines()
    assert process.returncode == 143, "\n".join(lines)
    (recovery,) = told(tmp_path, "recovery")
    assert recovery["processes"] == {"kept": 0, "standby": 1, "new": 0}
    assert recovery["phases"]["import"] == 0
    (fault,) = told(tmp_path, "fault")
    assert kind in json.dumps(fault)
    assert not any("are held by others" in line for line in lines), "\n".join(lines)
    steps = [json.loads(line) for line in (tmp_path / "board" / "metrics.jsonl").read_text().splitlines()]
    first, again = ({s["step"]: s["loss"] for s in steps if s["kind"] == "step" and s["attempt"] == a} for a in (0, 1))
    both = first.keys() & again.keys()
    assert both
    assert {step: first[step] for step in both} == {step: again[step] for step in both}


def until(process: subprocess.Popen[str], text: str) -> list[str]:
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if text in line:
            return lines
    raise AssertionError(f"ended without {text!r}:\n" + "\n".join(lines))


def pid_of_rank(log: Path) -> int:
    return int(re.findall(r"process (\d+)", log.read_text())[-1])


def told(folder: Path, kind: str) -> list[dict[str, Any]]:
    records = map(json.loads, (folder / "board" / "events.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == kind]
