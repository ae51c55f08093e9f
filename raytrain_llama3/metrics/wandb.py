"""The same scalars for Weights & Biases, where a project is named (the extra `wandb`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from raytrain_llama3.errors import ConfigError
from raytrain_llama3.messages import EvalRecord, StepRecord
from raytrain_llama3.metrics.record import AttemptStart, Ended, Event, Fault, Item, Recovered, Saved, StepMetrics
from raytrain_llama3.metrics.tensorboard import evaluation_scalars, recovery_scalars, scalars


class WandbSink:
    """One run of `project`, its local files under `folder`.

    Raises `ConfigError` when wandb is not installed or does not start. Its key, mode and host come from wandb's own
    environment variables.
    """

    name = "wandb"

    def __init__(self, project: str, run_name: str | None, folder: Path, config: Mapping[str, object]) -> None:
        try:
            import wandb
        except ImportError as error:
            problem = "is set, but wandb is not installed: pip install 'raytrain-llama3[wandb]', or leave it unset"
            raise ConfigError((f"wandb_project {project!r} {problem}",)) from error
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(project=project, name=run_name, dir=str(folder), config=dict(config))
        except wandb.Error as error:
            raise ConfigError((f"wandb_project {project!r}: wandb does not start: {error}",)) from error
        # wandb's own step only rises, and would drop the steps that come again after a restart.
        self._run.define_metric("*", step_metric="step")

    def write(self, item: Item) -> None:
        """Send the scalars of `item`."""
        match item:
            case StepMetrics():
                self._run.log({"step": item.step, **scalars(item)})
            case EvalRecord():
                self._run.log({"step": item.step, **evaluation_scalars(item)})
            case Saved(record):
                self._run.log({"step": record.step, "save-checkpoint-time": record.seconds})
            case Recovered():
                self._run.log({"step": item.resume_step, **recovery_scalars(item)})
            case AttemptStart() | StepRecord() | Event() | Fault() | Ended():
                pass

    def close(self) -> None:
        """Send what is left and end wandb's run."""
        self._run.finish()
