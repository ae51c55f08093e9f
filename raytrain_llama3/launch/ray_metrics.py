"""The run's scalars as Ray's own application metrics: each node's metrics port gives them to Prometheus."""

from __future__ import annotations

from typing import Any

from raytrain_llama3.messages import EvalRecord
from raytrain_llama3.metrics.record import AttemptStart, Fault, Item, Recovered, StepMetrics

PREFIX = "raytrain_"
_HELP = {
    "step": "Steps done",
    "loss": "Training loss, nats a token, mean over a log interval",
    "validation_loss": "Loss on the validation split, nats a token",
    "learning_rate": "Learning rate",
    "grad_norm": "Norm of the gradient before clipping",
    "step_seconds": "Mean seconds a step",
    "tokens_per_second": "Tokens a second over all devices",
    "tflops_per_device": "Model TFLOP/s a device",
    "mfu": "Part of the dense peak, 0 to 1",
    "peak_memory_bytes": "Most device memory in use at once, of any rank",
    "attempt": "Attempts before this one",
    "faults": "Faults so far",
    "goodput": "Part of the run's time that went into steps that count, 0 to 1, at the last recovery",
}


class RayMetricsSink:
    """A sink of `metrics.Metrics`. Ray must be connected; `run` tells runs of one cluster apart."""

    name = "ray metrics"

    def __init__(self, run: str) -> None:
        from ray.util.metrics import Gauge

        gauge: Any = Gauge
        self._gauges = {name: gauge(PREFIX + name, description=text, tag_keys=("run",)) for name, text in _HELP.items()}
        self._tags = {"run": run}
        self._faults = 0

    def write(self, item: Item) -> None:
        """Set the gauges that `item` tells of."""
        match item:
            case StepMetrics():
                rates = item.throughput
                self._set("step", item.step)
                self._set("loss", item.loss)
                self._set("learning_rate", item.learning_rate)
                self._set("grad_norm", item.grad_norm)
                self._set("step_seconds", item.step_s)
                self._set("tokens_per_second", rates.tokens_per_s)
                self._set("tflops_per_device", rates.tflops_per_device)
                self._set("mfu", rates.mfu)
                self._set("peak_memory_bytes", item.peak_memory_bytes)
            case EvalRecord():
                self._set("validation_loss", item.loss)
            case AttemptStart():
                self._set("attempt", item.attempt)
            case Fault():
                self._faults += 1
                self._set("faults", self._faults)
            case Recovered():
                self._set("goodput", item.goodput)
            case _:
                pass

    def close(self) -> None:
        """Nothing is held: Ray's agent forgets a gauge with its process."""

    def _set(self, name: str, value: float | None) -> None:
        if value is not None:
            self._gauges[name].set(value, tags=self._tags)
