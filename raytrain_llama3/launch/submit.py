"""A training run as a job of a Ray cluster: handed in, followed through dropped connections, ended as the job is."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raytrain_llama3.config import env
from raytrain_llama3.errors import ClusterFormationError, ConfigError

STOPPED = 143
"""Ray's record of a stopped job holds no exit code: this is what our own driver ends with then."""
EXCLUDES = (
    "checkpoints/", "experiments/", "tensorboard_logs/", "logs/", "benchmark_cache_*/", "demo/", "*.egg-info/",
    ".mypy_cache/", ".ruff_cache/", ".pytest_cache/", "cluster/token",
)  # fmt: skip
"""Never uploaded, beside what .gitignore and .rayignore name and Ray leaves out itself (.git, .venv, __pycache__)."""

_STOP_SLACK_S = 15
"""Beside `grace_s`: for the driver to notice, to publish the checkpoint and to end its ranks."""
_LOOK_S = 1.0
_SILENT_S = 300.0
_GIVE_UP_S = 600.0
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Order:
    """What is submitted: the entrypoint, and what goes along with it."""

    arguments: tuple[str, ...]
    working_dir: Path
    grace_s: int
    environ: Mapping[str, str]
    python: str = "python"

    @property
    def entrypoint(self) -> str:
        """One line for the shell that Ray starts; exec, so that a stop's SIGTERM reaches the driver alone."""
        return "exec " + shlex.join([self.python, "-m", "raytrain_llama3", *self.arguments])

    @property
    def variables(self) -> dict[str, str]:
        """The job's environment: what the user has set for a run, and time to save when it is stopped."""
        return env.for_job(self.environ) | {"RAY_JOB_STOP_WAIT_TIME_S": str(self.grace_s + _STOP_SLACK_S)}

    @property
    def runtime_env(self) -> dict[str, Any]:
        """Ray's form of it."""
        return {"working_dir": str(self.working_dir), "excludes": list(EXCLUDES), "env_vars": self.variables}

    def files(self) -> dict[str, int]:
        """Paths that would be uploaded, with their bytes, by Ray's own reckoning."""
        from ray._private.ray_constants import get_runtime_env_default_excludes
        from ray._private.runtime_env import packaging

        root, found = self.working_dir.absolute(), dict[str, int]()

        def take(path: Path) -> None:
            if path.is_file():
                found[str(path.relative_to(root))] = path.stat().st_size

        excludes = [*EXCLUDES, *get_runtime_env_default_excludes()]
        packaging._dir_travel(root, [packaging._get_excludes(root, excludes)], take, include_gitignore=True)
        return dict(sorted(found.items()))

    def describe(self) -> str:
        """What `--dry-run` prints."""
        files = self.files()
        largest = sorted(files, key=lambda name: -files[name])[:_SHOWN]
        lines = [
            f"entrypoint   {self.entrypoint}",
            "environment  " + " ".join(f"{name}={value}" for name, value in self.variables.items()),
            f"upload       {len(files)} files, {_size(sum(files.values()))}, of {self.working_dir.absolute()}",
            *(f"  {_size(files[name]):>10}  {name}" for name in largest),
        ]
        if len(files) > len(largest):
            lines.append(f"  {'':>10}  and {len(files) - len(largest)} smaller ones")
        return "\n".join(lines)


class Cluster:
    """The job server of a Ray cluster. Every call is tried again through dropped connections."""

    def __init__(self, address: str) -> None:
        from ray.job_submission import JobSubmissionClient

        self.address = address
        try:
            self._client: Any = JobSubmissionClient(address)
        except (ConnectionError, RuntimeError) as error:
            raise ClusterFormationError(
                f"{address}: no job server answers: {error}. It is the dashboard's address; with token authentication "
                "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH must be set here"
            ) from error

    def submit(self, order: Order, submission_id: str | None = None) -> str:
        """Upload and hand in; the job's id."""
        try:
            return str(
                self._client.submit_job(
                    entrypoint=order.entrypoint, runtime_env=order.runtime_env, submission_id=submission_id
                )
            )
        except (RuntimeError, ValueError) as error:
            raise ConfigError((f"{self.address}: the job was not taken: {error}",)) from error

    def follow(self, job: str, write: Callable[[str], object]) -> int:
        """Write the job's log as it comes; its exit code once it has ended."""
        return asyncio.run(self._follow(job, write))

    async def _follow(self, job: str, write: Callable[[str], object]) -> int:
        printed, ended = 0, False
        while not ended:
            seen = 0
            # Whatever cut the stream, it begins anew from the log's start: what has been written is left out.
            with contextlib.suppress(Exception):
                async for chunk in self._chunks(job):
                    seen += len(chunk)
                    if seen > printed:
                        write(chunk[printed - seen :])
                        printed = seen
            ended = self._info(job).status.is_terminal()
            if not ended:
                await asyncio.sleep(_LOOK_S)
        info = self._info(job)
        with contextlib.suppress(Exception):
            write(self._client.get_job_logs(job)[printed:])
        return self._code(info)

    async def _chunks(self, job: str) -> AsyncIterator[str]:
        """The log as it grows, until the stream ends, the job has ended, or nothing has come for long."""
        stream = self._client.tail_job_logs(job).__aiter__()
        waiting: asyncio.Future[str] = asyncio.ensure_future(stream.__anext__())
        heard = time.monotonic()
        try:
            while time.monotonic() - heard < _SILENT_S:
                done, _ = await asyncio.wait([waiting], timeout=_LOOK_S)
                if done:
                    try:
                        yield waiting.result()
                    except StopAsyncIteration:
                        return
                    heard = time.monotonic()
                    waiting = asyncio.ensure_future(stream.__anext__())
                elif self._info(job).status.is_terminal():
                    return
        finally:
            waiting.cancel()

    def _info(self, job: str) -> Any:
        """The job's record. Raises `ClusterFormationError` when the server has not answered for ten minutes."""
        deadline = time.monotonic() + _GIVE_UP_S
        while True:
            try:
                return self._client.get_job_info(job)
            except Exception as error:
                if time.monotonic() > deadline:
                    raise ClusterFormationError(
                        f"{self.address}: has not answered for {_GIVE_UP_S:.0f} s; job {job} may go on ({error})"
                    ) from error
            time.sleep(_LOOK_S)

    @staticmethod
    def _code(info: Any) -> int:
        if info.driver_exit_code is not None:
            return int(info.driver_exit_code)
        return STOPPED if str(info.status) in ("STOPPED", "JobStatus.STOPPED") else 1


def job_arguments(items: Sequence[str]) -> tuple[list[str], list[str]]:
    """Ours and the run's: what stands before and after `--`."""
    if "--" not in items:
        return list(items), []
    at = list(items).index("--")
    return list(items[:at]), list(items[at + 1 :])


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
