"""Llama3 as Megatron-core's GPT model, wrapped for data parallel, with weights that depend on the seed alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.train.precision import grad_reduce_in_fp32, model_precision, uses_half
from raytrain_llama3.train.process import Process


def build_model(plan: RunPlan, process: Process) -> list[DistributedDataParallel]:
    """This rank's model chunks (one, or one a virtual stage), initialised and ready for the schedules."""
    config = transformer_config(plan)
    chunks = [_build_chunk(plan, process, config, stage) for stage in range(plan.layout.vpp or 1)]
    for chunk in chunks:
        initialize_weights(chunk, plan)
    wrapped = [_wrap(plan, process, config, chunk, first=i == 0) for i, chunk in enumerate(chunks)]
    _connect(plan, config, wrapped)
    return wrapped


def forget_tables() -> None:
    """Let models go that were built before: Megatron-core 0.19 caches each table of rotary positions beside its module.

    That module's hooks know the data-parallel wrapper, so the whole model and its optimizer would stay.
    """
    for method in vars(RotaryEmbedding).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()


def transformer_config(plan: RunPlan) -> TransformerConfig:
    """Megatron-core's description of the model in this layout and precision."""
    c, layout, on_gpu = plan.config, plan.layout, plan.device == "cuda"
    return TransformerConfig(
        num_layers=c.num_layers,
        hidden_size=c.hidden_size,
        ffn_hidden_size=c.ffn_hidden_size,
        num_attention_heads=c.num_attention_heads,
        num_query_groups=c.num_query_groups,
        kv_channels=c.kv_channels,
        normalization=c.normalization,
        layernorm_zero_centered_gamma=c.apply_layernorm_1p,
        layernorm_epsilon=c.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=c.hidden_dropout,
        attention_dropout=c.attention_dropout,
        init_method_std=c.init_method_std,
        # Weights are drawn by initialize_weights, once, independently of the layout.
        perform_initialization=False,
        use_cpu_initialization=not on_gpu,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.sequence_parallel,
        calculate_per_token_loss=c.calculate_per_token_loss,
        deallocate_pipeline_outputs=True,
        # gloo has no batched point-to-point calls. With virtual stages on two ranks, sends to "next" and to "previous"
        # go to one peer, and batched ones would be taken for each other.
        batch_p2p_comm=on_gpu and layout.vpp is None,
        overlap_p2p_comm=on_gpu and layout.vpp is not None,
        gradient_accumulation_fusion=on_gpu,
        use_te_activation_func=on_gpu,
        masked_softmax_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        apply_rope_fusion=on_gpu,
        fused_single_qkv_rope=on_gpu,
        persist_layer_norm=on_gpu,
        cross_entropy_loss_fusion=on_gpu and c.cross_entropy_loss_fusion,
        # Transformer Engine's kernel takes no fp16.
        cross_entropy_fusion_impl="te" if on_gpu and c.dtype != "fp16" else "native",
        attention_backend=AttnBackend[c.attention_backend],
        **_recompute(plan),
        **_offload(plan),
        **model_precision(plan),
    )


def _recompute(plan: RunPlan) -> dict[str, Any]:
    c = plan.config
    modules = [*c.recompute_modules, *(["core_attn"] if c.recompute_activations else [])]
    if "layer" in modules:
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if modules:
        return {"recompute_granularity": "selective", "recompute_modules": sorted(set(modules))}
    return {}


def _offload(plan: RunPlan) -> dict[str, Any]:
    if not plan.config.offload_modules:
        return {}
    return {"fine_grained_activation_offloading": True, "offload_modules": list(plan.config.offload_modules)}


def _build_chunk(plan: RunPlan, process: Process, config: TransformerConfig, stage: int) -> GPTModel:
    c, vp_stage = plan.config, stage if plan.layout.vpp else None
    model = GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(plan, config, vp_stage),
        vocab_size=plan.padded_vocab_size,
        max_sequence_length=c.max_position_embeddings or c.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_percent=c.rotary_percent,
        rotary_base=c.rotary_base,
        vp_stage=vp_stage,
    )
    return model if plan.device == "cpu" else model.to(process.device)


def _layer_spec(plan: RunPlan, config: TransformerConfig, vp_stage: int | None) -> Any:
    if plan.device == "cuda":
        from raytrain_llama3.train.kernels import SwiGLU

        spec: ModuleSpec = get_gpt_layer_with_transformer_engine_spec(use_te_activation_func=True)
        spec.submodules.mlp.keywords["submodules"].activation_func = SwiGLU
        return spec
    from raytrain_llama3.train.cpu_device import norm_class

    norm = norm_class(plan.config.normalization)
    layer: ModuleSpec = get_gpt_layer_local_spec(normalization=plan.config.normalization)
    layer.submodules.input_layernorm = norm
    layer.submodules.pre_mlp_layernorm = norm
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)


def _wrap(
    plan: RunPlan, process: Process, config: TransformerConfig, chunk: GPTModel, *, first: bool
) -> DistributedDataParallel:
    c = plan.config
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=c.use_distributed_optimizer,
        overlap_grad_reduce=c.overlap_grad_reduce,
        overlap_param_gather=c.overlap_param_gather and c.use_distributed_optimizer and c.overlap_grad_reduce,
        grad_reduce_in_fp32=grad_reduce_in_fp32(plan),
        fp8_param_gather=c.dtype == "fp8" and c.fp8_param_gather,
        # Later pipeline chunks reduce while earlier ones compute: one bucket is enough there.
        bucket_size=max(40_000_000, 1_000_000 * plan.layout.dp) if c.overlap_grad_reduce else None,
    )
    module = Float16Module(config, chunk) if uses_half(plan) else chunk
    return DistributedDataParallel(config, ddp, module, disable_bucketing=not first or process.pp_rank > 0)


def _connect(plan: RunPlan, config: TransformerConfig, chunks: list[DistributedDataParallel]) -> None:
    """Give the schedules their hooks: when to reduce, when to gather, how to finish gradients."""

    def one_or_all(calls: list[Any]) -> Any:
        return calls[0] if len(calls) == 1 else calls

    config.finalize_model_grads_func = finalize_model_grads
    if plan.config.overlap_grad_reduce:
        config.no_sync_func = one_or_all([chunk.no_sync for chunk in chunks])
        if len(chunks) > 1:
            config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
            if chunks[0].ddp_config.overlap_param_gather:
                config.param_sync_func = [chunk.start_param_sync for chunk in chunks]


@torch.no_grad()
def initialize_weights(chunk: GPTModel, plan: RunPlan) -> None:
    """Draw every matrix from N(0, std) as a pure function of (seed, its global name, its layer).

    Each rank draws a whole matrix and keeps its own slice, so that the weights are the same for every TP, PP and
    virtual-stage layout. Projections back into the residual stream use std / sqrt(2 · layers), as Megatron-LM and
    GPT-2 do (Radford et al. 2019). Norm weights keep their ones.
    """
    std = plan.config.init_method_std
    residual_std = std / math.sqrt(2 * plan.config.num_layers)
    for shard in _matrices(chunk):
        to_residual = shard.key.endswith(("linear_proj.weight", "linear_fc2.weight"))
        layers = shard.prepend_axis_num
        shape, offset = shard.global_shape[layers:], shard.global_offset[layers:]
        # Drawn where the weights are: a CPU generator would take minutes for 8B.
        generator = torch.Generator(device=shard.data.device)
        generator.manual_seed(_seed_of(plan.config.seed, shard.key, shard.global_offset[:layers]))
        whole = torch.empty(shape, dtype=torch.float32, device=shard.data.device)
        whole.normal_(0.0, residual_std if to_residual else std, generator=generator)
        mine = tuple(slice(o, o + n) for o, n in zip(offset, shard.data.shape, strict=True))
        shard.data.copy_(whole[mine])


def _matrices(chunk: GPTModel) -> Iterator[ShardedTensor]:
    parameters = {id(p) for p in chunk.parameters() if p.ndim >= 2}
    for entry in chunk.sharded_state_dict().values():
        if isinstance(entry, ShardedTensorFactory) and id(entry.data) in parameters:
            yield from _tensors(entry.build())
        elif isinstance(entry, ShardedTensor) and id(entry.data) in parameters:
            yield entry


def _tensors(built: Any) -> Iterator[ShardedTensor]:
    if isinstance(built, ShardedTensor):
        yield built
    else:
        for item in built.values() if isinstance(built, dict) else built:
            yield from _tensors(item)


def _seed_of(seed: int, key: str, layer: tuple[int, ...]) -> int:
    digest = hashlib.blake2b(f"{seed}/{key}/{layer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)
