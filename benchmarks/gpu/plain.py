"""The peer: Megatron-core and Transformer Engine as their own examples put them together, one process, no launcher.

`python plain.py --precision bf16 --layers 32 --micro-batches 8 --steps 5` prints one JSON line: seconds of each step's
forward and backward passes, and of its update.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

import shape
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

_HALF = torch.bfloat16


def config(layers: int, *, fp8: bool) -> TransformerConfig:
    """Llama3-8B with `layers` layers."""
    precision = {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024} if fp8 else {}
    if fp8:
        precision["fp8_amax_compute_algo"] = "max"
    return TransformerConfig(
        num_layers=layers, hidden_size=shape.HIDDEN, ffn_hidden_size=shape.FFN, num_attention_heads=shape.HEADS,
        num_query_groups=shape.GROUPS, kv_channels=shape.HEAD, normalization="RMSNorm", layernorm_epsilon=1e-5,
        gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False, hidden_dropout=0.0,
        attention_dropout=0.0, bf16=True, params_dtype=_HALF, gradient_accumulation_fusion=False,
        bias_activation_fusion=True, masked_softmax_fusion=True, bias_dropout_fusion=True, apply_rope_fusion=True,
        cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te", init_method_std=0.0134, **precision,
    )  # fmt: skip


def build(layers: int, *, fp8: bool) -> tuple[TransformerConfig, Any, Any]:
    """The configuration, the wrapped model and its optimizer."""
    c = config(layers, fp8=fp8)
    model = GPTModel(
        c, get_gpt_layer_with_transformer_engine_spec(), shape.VOCAB, shape.SEQ, position_embedding_type="rope",
        rotary_base=500_000, share_embeddings_and_output_weights=False,
    ).cuda()  # fmt: skip
    sharded = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=False)
    wrapped = DistributedDataParallel(c, sharded, Float16Module(c, model))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-4, bf16=True, params_dtype=_HALF, use_distributed_optimizer=True, clip_grad=1.0,
            fp8_recipe="delayed" if fp8 else None, use_precision_aware_optimizer=True, main_grads_dtype=_HALF,
            exp_avg_dtype=_HALF, exp_avg_sq_dtype=_HALF,
        ),
        [wrapped],
    )  # fmt: skip
    c.finalize_model_grads_func, c.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    return c, wrapped, optimizer


def tokens() -> Iterator[torch.Tensor]:
    """Windows `[1, seq + 1]` of random ids."""
    generator = torch.Generator(device="cuda").manual_seed(7)
    while True:
        yield torch.randint(0, shape.VOCAB, (1, shape.SEQ + 1), generator=generator, device="cuda")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=("bf16", "fp8"), required=True)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    torch.cuda.set_device(0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda:0"))
    parallel_state.initialize_model_parallel(1, 1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    _, model, optimizer = build(given.layers, fp8=given.precision == "fp8")
    positions, batches, schedule = torch.arange(shape.SEQ, device="cuda")[None], tokens(), get_forward_backward_func()

    def forward(iterator: Iterator[torch.Tensor], module: Any) -> tuple[torch.Tensor, Any]:
        window = next(iterator)
        out = module(window[:, :-1].contiguous(), positions, None, labels=window[:, 1:].contiguous())
        return out, lambda o: (o.float().mean(), {"loss": o.detach().float().mean()})

    passes, updates = [], []
    for _ in range(given.steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        schedule(
            forward_step_func=forward, data_iterator=batches, model=[model], num_microbatches=given.micro_batches,
            seq_length=shape.SEQ, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        torch.cuda.synchronize()
        middle = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        passes.append(middle - began)
        updates.append(time.perf_counter() - middle)
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps({"passes_s": passes, "updates_s": updates, "peak_gib": peak}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
