"""Megatron-core's optimizer and its learning rate schedule, both counted in samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config

from raytrain_llama3.checkpoint.shards import parts_of
from raytrain_llama3.config import estimate
from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.train.precision import optimizer_precision


def build_optimizer(plan: RunPlan, chunks: list[DistributedDataParallel]) -> MegatronOptimizer:
    """The optimizer over every chunk's gradient buffers (sharded over data-parallel ranks where asked)."""
    c = plan.config
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=c.learning_rate,
            min_lr=c.min_learning_rate,
            weight_decay=c.weight_decay,
            adam_beta1=c.adam_beta1,
            adam_beta2=c.adam_beta2,
            adam_eps=c.adam_eps,
            clip_grad=c.clip_grad,
            use_distributed_optimizer=c.use_distributed_optimizer,
            overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
            **optimizer_precision(plan),
        ),
        chunks,
    )
    if estimate.keeps_remainders(c, plan.device):
        from raytrain_llama3.train.adam import take_over

        take_over(optimizer, chunks)
    get_model_config(chunks[0]).grad_scale_func = optimizer.scale_loss
    return optimizer


def build_schedule(plan: RunPlan, optimizer: MegatronOptimizer, samples: int) -> OptimizerParamScheduler:
    """The learning rate as a function of samples consumed; needs no state of its own in a checkpoint."""
    c = plan.config
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=c.learning_rate,
        min_lr=c.min_learning_rate,
        lr_warmup_steps=plan.warmup_samples,
        lr_decay_steps=plan.decay_samples,
        lr_decay_style=c.lr_decay_style,
        start_wd=c.weight_decay,
        end_wd=c.weight_decay,
        wd_incr_steps=max(plan.decay_samples, 1),
        wd_incr_style="constant",
    )
    schedule.step(increment=samples)
    return schedule


@dataclass(frozen=True, slots=True)
class Update:
    """What `apply` did: the gradient norm before clipping, and whether the weights moved."""

    grad_norm: float
    applied: bool


@torch.no_grad()
def apply(optimizer: MegatronOptimizer, clip_grad: float, *, loss_is_finite: bool) -> Update:
    """Clip and step, or leave the weights alone when the loss or the gradient norm is not finite.

    The same calls as `MegatronOptimizer.step`, which would clip by a NaN norm and so spread it over every weight.
    Every rank sees the same norm and decides the same.
    """
    if optimizer.prepare_grads() or not loss_is_finite:
        return Update(math.nan, applied=False)
    step = _reading_step(optimizer)
    norm = float(optimizer.get_grad_norm()) * (1.0 if step is None else step.scale)
    if not math.isfinite(norm):
        return Update(norm, applied=False)
    if step is not None:
        step.clip = min(1.0, clip_grad / (norm + 1e-6)) if clip_grad > 0 else 1.0
    elif clip_grad > 0:
        for part in parts_of(optimizer):
            if part.get_parameters():
                _clip(part, clip_grad, norm)
    return Update(norm, applied=bool(optimizer.step_with_ready_grads()))


def _reading_step(optimizer: MegatronOptimizer) -> Any | None:
    """The `adam.RemainderAdam` of all parts, which scales and clips gradients as it reads them, or None."""
    inner = (getattr(part, "optimizer", None) for part in parts_of(optimizer))
    steps = (getattr(each, "multi_tensor_adam_param_remainder", None) for each in inner)
    return next((step for step in steps if hasattr(step, "clip")), None)


def _clip(part: Any, clip_grad: float, norm: float) -> None:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    clip_grad_by_total_norm_fp32(
        part.get_parameters(),
        max_norm=clip_grad,
        total_norm=norm,
        use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
    )
