"""`ray job submit` onto a running cluster, whatever its authentication."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import pytest
from sandbox import DEMO, ROOT, Command, Sandbox

RAY = str(Path(sys.executable).with_name("ray"))


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def submitted(sandbox: Sandbox, program: list[str], extra: dict[str, str]) -> Command:
    """The job, ended; Ray's agent, which takes jobs, is ready some seconds after `ray start` is."""
    deadline = time.monotonic() + 60
    while True:
        job = sandbox.start_program(program, **extra)
        job.wait()
        if "No available agent" not in job.output or time.monotonic() > deadline:
            return job
        time.sleep(1)


@pytest.mark.parametrize("authentication", ["disabled", "token", "unset, after a run of our own Ray"])
def test_a_job_succeeds_and_a_bad_flag_fails_with_our_exit_code(sandbox: Sandbox, authentication: str) -> None:
    extra = {"RAY_USAGE_STATS_ENABLED": "0"}
    if authentication == "disabled":
        extra["RAY_AUTH_MODE"] = "disabled"
    elif authentication == "token":
        token = sandbox.work / "token"
        token.write_text("0123456789abcdef" * 4)
        extra |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    else:
        assert sandbox.run(*DEMO, "--train-iters", "1").process.returncode == 0
        assert sandbox.leftovers() == []
    dashboard = free_port()
    head = [RAY, "start", "--head", "--num-cpus=2", "--port", free_port(), "--dashboard-port", dashboard]
    head += ["--dashboard-agent-listen-port", free_port(), f"--temp-dir={sandbox.root}/r", "--disable-usage-stats"]
    starting = sandbox.start_program(head, **extra)
    assert starting.wait() == 0, starting.output

    submit = [RAY, "job", "submit", "--address", f"http://127.0.0.1:{dashboard}", "--working-dir", str(ROOT), "--"]
    program = [*submit, sys.executable, "-m", "raytrain_llama3"]
    places = ("--checkpoint-path", str(sandbox.work / "checkpoints"))
    config = ("--config", "configs/demo.toml", *DEMO[2:])
    job = submitted(sandbox, [*program, *config, *places, "--train-iters", "3"], extra)
    assert job.process.returncode == 0, job.output
    assert "succeeded" in job.output
    assert "target reached: step 3" in job.output
    assert (sandbox.work / "checkpoints" / "iter_0000003" / "COMMITTED").is_file()

    bad = submitted(sandbox, [*program, "--dtype", "int8"], extra)
    assert bad.process.returncode != 0
    assert "failed with exit code 2" in bad.output
    assert "--dtype int8: must be 'bf16', 'fp8', 'fp16' or 'fp32'" in bad.output
