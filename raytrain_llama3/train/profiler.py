"""A torch profiler trace of rank 0's chosen steps."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity

from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.train.process import Process


class Profiler:
    """Traces steps `profile_step_start` up to, not including, `profile_step_end`; does nothing unless asked to."""

    def __init__(self, plan: RunPlan, process: Process) -> None:
        c = plan.config
        self._is_on = c.enable_profiling and process.rank == 0
        self._start, self._end = c.profile_step_start, c.profile_step_end
        self._folder = plan.paths.logs
        self._profile: torch.profiler.profile | None = None

    def before_step(self, step: int) -> None:
        """Begin at the first step of the range."""
        if self._is_on and self._profile is None and self._start <= step < self._end:
            self._profile = torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self._profile.start()

    def after_step(self, step: int) -> None:
        """After the last step of the range write `trace_rank_0.json`, for chrome://tracing or Perfetto."""
        if self._profile is not None and step >= self._end - 1:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._folder / "trace_rank_0.json"))
            self._profile, self._is_on = None, False
