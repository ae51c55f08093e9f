"""Traces of chosen ranks' chosen steps: a timeline, the dearest kernels, a memory snapshot, ranges for nsys."""

from __future__ import annotations

import torch
from megatron.core.utils import configure_nvtx_profiling
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.train.process import Process

_ROWS = 10
_MEMORY_EVENTS = 100_000


class Profiler:
    """Of steps `profile_step_start` up to, not including, `profile_step_end`; does nothing unless asked to."""

    def __init__(self, plan: RunPlan, process: Process) -> None:
        c = plan.config
        self._is_on = c.enable_profiling and process.rank in c.profile_ranks
        self._start, self._end = c.profile_step_start, c.profile_step_end
        self._folder, self._rank = plan.paths.logs, process.rank
        self._on_gpu = plan.device == "cuda"
        self._profile: torch.profiler.profile | None = None

    def before_step(self, step: int) -> None:
        """Begin at the first step of the range."""
        if not (self._is_on and self._start <= step < self._end):
            return
        if self._profile is None:
            self._begin()
        if self._on_gpu:
            # Under `nsys profile --capture-range cudaProfilerApi` this is what it records.
            torch.cuda.nvtx.range_push(f"step {step}")  # type: ignore[no-untyped-call]

    def after_step(self, step: int) -> list[str]:
        """After the last step of the range write what was recorded; lines about it for the console."""
        if self._profile is None:
            return []
        if self._on_gpu:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        return self._end_here() if step >= self._end - 1 else []

    def _begin(self) -> None:
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            configure_nvtx_profiling(enabled=True)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def _end_here(self) -> list[str]:
        assert self._profile is not None
        profile, self._profile, self._is_on = self._profile, None, False
        profile.stop()
        written = [self._folder / f"trace_rank_{self._rank}.json"]
        profile.export_chrome_trace(str(written[0]))
        if self._on_gpu:
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
            configure_nvtx_profiling(enabled=False)
            written.append(self._folder / f"memory_rank_{self._rank}.pickle")
            torch.cuda.memory._dump_snapshot(str(written[-1]))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        return [*self._table(profile), *(f"wrote {path}" for path in written)]

    def _table(self, profile: torch.profiler.profile) -> list[str]:
        steps = self._end - self._start
        events = profile.key_averages()
        spent = {e.key: (e.self_device_time_total if self._on_gpu else e.self_cpu_time_total) / 1000 for e in events}
        if self._on_gpu:
            # Operators' rows count the time of the kernels that they start once more.
            kernels = {e.key for e in events if e.device_type == DeviceType.CUDA}
            spent = {key: value for key, value in spent.items() if key in kernels}
        counts, whole = {e.key: e.count for e in events}, sum(spent.values())
        dearest = sorted(spent, key=lambda key: -spent[key])[:_ROWS]
        what = "kernels" if self._on_gpu else "operators"
        lines = [f"{whole / steps:.1f} ms of {what} a step, the dearest of them:"]
        for key in dearest:
            each, share = spent[key] / steps, 100 * spent[key] / whole
            lines.append(f"  {each:9.2f} ms {share:5.1f} % {counts[key] / steps:7.0f} x {key[:80]}")
        return lines
