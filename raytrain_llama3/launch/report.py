"""Faults and recoveries in words and numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raytrain_llama3.launch.crew import Member
from raytrain_llama3.messages import Failure, Phase
from raytrain_llama3.metrics import Metrics

_TRAINING = (Phase.PROCESS_GROUP, Phase.MODEL, Phase.LOAD, Phase.FIRST_STEP)


def describe(failure: Failure) -> list[str]:
    """A fault for people: who, where, why, the last lines of its log, and the others in one line."""
    lines = [
        f"rank {failure.rank} on {failure.node_ip} failed at step {failure.step} ({failure.kind}): {failure.error}"
    ]
    if failure.others:
        lines.append(f"ranks {', '.join(map(str, failure.others))} fell with it")
    if failure.log_tail:
        lines.append(f"the last lines of {failure.log_path}:")
        lines += [f"  | {line}" for line in failure.log_tail]
    return lines


def write_stacks(folder: Path, stacks: Mapping[int, str]) -> Path:
    """One file with every rank's Python stacks, in rank order."""
    path = folder / "stacks.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(f"===== rank {rank}\n{text}\n" for rank, text in sorted(stacks.items())))
    return path


def imported_s(members: Sequence[Member]) -> float:
    """Seconds for which an attempt had to wait for imports: none, where every process was there before."""
    return max((m.process.facts.import_s for m in members if m.process.facts and m.process.is_new), default=0.0)


@dataclass(slots=True)
class Recovery:
    """A fault that is being got over. `step` is the last that was trained before it."""

    failure: Failure
    step: int
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase, as far as it has come."""

    def tell(
        self, metrics: Metrics, members: Sequence[Member], training: Mapping[str, float], resume_step: int
    ) -> None:
        """Say that the next attempt has done its first step; `training` are rank 0's own phases."""
        imported = imported_s(members)
        waited_s = max(self.seconds.get("start", 0.0) - imported, 0.0)
        own = {str(name): training[name] for name in _TRAINING if name in training}
        phases = {"detect": self.failure.detect_s, **self.seconds, "start": waited_s, "import": imported, **own}
        origins = Counter(m.process.origin for m in members)
        metrics.recovered(
            phases,
            lost_steps=max(self.step - resume_step, 0),
            resume_step=resume_step,
            processes={origin: origins[origin] for origin in ("kept", "standby", "new")},
        )
