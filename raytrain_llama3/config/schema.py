"""Every option of a run: name, type, default and help, written once.

The option `tp_size` is the flag `--tp-size`, the variable `TP_SIZE` and the TOML key `tp_size`. A field's docstring
is its help; `aliases` are Megatron-LM's names for the same thing. The classes are the groups shown by `--help`;
`Config` is all of them together (those about checkpoints, data and pods are in `schema_checkpoints` and the like).
"The script" is the tutorial's train_llama3_8b_dynamic.sh, whose defaults are kept unless the help says why not.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from raytrain_llama3.config.schema_base import Options, option
from raytrain_llama3.config.schema_checkpoints import Checkpoints
from raytrain_llama3.config.schema_data import Data
from raytrain_llama3.config.schema_pods import Pods
from raytrain_llama3.config.values import Auto, Fraction, Offload, Ranks, Recompute, Rehearsal


class Hardware(Options):
    """Where it runs."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Kind of device; auto: cuda where there is a GPU."""
    num_nodes: Auto | PositiveInt = option("auto", "--nnodes")
    """Nodes to use; auto: the whole cluster."""
    gpus_per_node: Auto | PositiveInt = option("auto", "--nproc-per-node")
    """Ranks on each node, one a GPU; auto: all its GPUs. More than there are is lowered with a warning. On a CPU:
    the number of processes (auto: 1)."""
    ray_address: str | None = None
    """Ray cluster to join, host:port; unset: a Ray of our own, which ends with the run."""
    ray_dashboard: bool = True
    """Serve the Ray dashboard from a Ray of our own."""
    ray_dashboard_host: str = "127.0.0.1"
    """Address that the dashboard of a Ray of our own binds to; 0.0.0.0 opens it to the network, behind the token."""
    placement_timeout_s: PositiveInt = 300
    """How long to wait for the cluster to have room for every rank, seconds."""
    store_port: NonNegativeInt = 0
    """Port of torch.distributed's store on rank 0's node; 0: a free one."""


class Parallel(Options):
    """How the model and the batch are divided."""

    tp_size: PositiveInt = option(1, "--tensor-model-parallel-size")
    """Tensor-parallel ranks: each holds a slice of every matrix."""
    cp_size: PositiveInt = option(1, "--context-parallel-size")
    """Context-parallel ranks: each holds a part of every sequence. GPU only."""
    pp_size: PositiveInt = option(1, "--pipeline-model-parallel-size")
    """Pipeline stages: each holds a run of layers."""
    vpp_size: PositiveInt | None = option(None, "--virtual-pipeline-model-parallel-size")
    """Virtual stages on each pipeline rank (interleaved schedule)."""
    sequence_parallel: Auto | bool = "auto"
    """Divide norms and residuals over tensor-parallel ranks; auto: on when tp_size > 1."""
    use_distributed_optimizer: bool = True
    """Divide optimizer state over data-parallel ranks."""
    overlap_grad_reduce: bool = True
    """Reduce gradients while the backward pass goes on."""
    overlap_param_gather: bool = True
    """Gather updated weights while the forward pass goes on (with the two options above)."""


class Model(Options):
    """The model's shape; the defaults are Llama3-8B."""

    num_layers: PositiveInt = 32
    """Transformer layers."""
    hidden_size: PositiveInt = 4096
    """Width of the residual stream."""
    ffn_hidden_size: PositiveInt = 14336
    """Width of the SwiGLU MLP."""
    num_attention_heads: PositiveInt = 32
    """Query heads."""
    num_query_groups: PositiveInt = 8
    """Key/value heads (grouped-query attention)."""
    kv_channels: PositiveInt = 128
    """Width of one head."""
    seq_length: PositiveInt = 8192
    """Tokens a sample."""
    max_position_embeddings: PositiveInt | None = None
    """Longest position; unset: seq_length."""
    rotary_base: PositiveInt = 500_000
    """RoPE base. Llama3 uses 500000; the script says 1000000, which is another model."""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Part of each head that is rotated."""
    vocab_size: PositiveInt = 128_256
    """Token ids; padded once to a multiple of 128, whatever tp_size is, so that every layout loads a checkpoint."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """Llama3's is RMSNorm."""
    norm_epsilon: Annotated[float, Field(gt=0)] = option(1e-5, "--layernorm-epsilon")
    """Added to the variance inside norms."""
    apply_layernorm_1p: bool = False
    """Store norm gains as a distance from 1. The script turns it on, with LayerNorm in mind; Llama3 has neither."""
    init_method_std: Annotated[float, Field(gt=0)] = 0.0134
    """Standard deviation of initial weights."""
    attention_dropout: Fraction = 0.0
    """Dropout on attention weights."""
    hidden_dropout: Fraction = 0.0
    """Dropout on the residual stream."""


class Precision(Options):
    """Number formats."""

    dtype: Literal["bf16", "fp8", "fp16", "fp32"] = "bf16"
    """Format of the products. fp8 keeps bf16 weights and needs a GPU of capability 8.9 (H100, L40) or more."""
    use_bf16: bool = option(True, "--bf16")
    """The script's switch; dtype decides, and a contradiction is one warning."""
    grad_reduce_in_bf16: bool = True
    """Accumulate and reduce gradients in bf16 rather than fp32 (with half-precision weights)."""
    optimizer_moments_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Format of Adam's two moments on a GPU; auto: fp32, or bf16 where only that fits. bf16 saves 4 bytes a parameter,
    and 8B then fits one 141 GB GPU."""
    fp8_format: Literal["hybrid", "e4m3"] = "hybrid"
    """hybrid: e4m3 forward, e5m2 for gradients."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "delayed"
    """How fp8 scales are found."""
    fp8_amax_history_len: PositiveInt = 1024
    """Steps of maxima that delayed scaling looks back on."""
    fp8_amax_compute_algo: Literal["max", "most_recent"] = "max"
    """Which of those maxima counts."""
    fp8_param_gather: bool = False
    """Keep and gather weights in fp8. The script turns it on; off here because it needs fp32 moments, and pays only
    with data parallelism."""
    fp8_attention: bool = False
    """With dtype fp8, attention in fp8 too: a step of 8B takes 3 % less. Needs heads of 128 channels and Hopper or
    later. Off: a small model learns far worse with it where scales follow old maxima, and 2 % worse with
    --fp8-amax-history-len 1 --fp8-amax-compute-algo most_recent (docs/performance.md)."""
    attention_backend: Literal["auto", "fused", "flash", "unfused", "local"] = "auto"
    """Attention kernel. The script says fused; auto lets Transformer Engine take the fastest that fits."""
    cross_entropy_loss_fusion: bool = True
    """Fused loss kernel (GPU)."""
    recompute_activations: bool = False
    """The script's switch for --recompute-modules core_attn, which fused attention makes needless."""
    recompute_modules: Recompute = ()
    """Parts of a layer computed again in the backward pass instead of kept, with commas between: core_attn (for
    attention without a fused kernel), mlp, or layer (all of it: least memory, a third more time)."""
    offload_modules: Offload = ()
    """Parts of a layer whose inputs wait for the backward pass in the host's memory, with commas between: qkv_linear,
    core_attn, attn_proj. GPU only."""


class Training(Options):
    """Batches, schedule and optimizer."""

    micro_batch_size: PositiveInt = 1
    """Samples in one forward pass of one rank."""
    global_batch_size: PositiveInt = 128
    """Samples in one optimizer step over all ranks."""
    train_samples: PositiveInt = 1_953_125_000
    """Samples to train on, in all."""
    train_iters: PositiveInt | None = None
    """Steps to train for: an alternative to train_samples."""
    lr_decay_samples: PositiveInt = 1_949_218_748
    """Samples over which the learning rate falls; follows train_samples or train_iters if only they are set."""
    lr_warmup_samples: NonNegativeInt = 3_906_252
    """Samples over which the learning rate rises; a hundredth of train_samples or train_iters if only they are set."""
    learning_rate: Annotated[float, Field(gt=0)] = option(1.5e-4, "--lr")
    """Highest learning rate."""
    min_learning_rate: NonNegativeFloat = option(1e-5, "--min-lr")
    """Learning rate after the decay."""
    lr_decay_style: Literal["cosine", "linear", "constant", "inverse-square-root"] = "cosine"
    """Shape of the decay."""
    weight_decay: NonNegativeFloat = 0.1
    """AdamW's decoupled weight decay."""
    adam_beta1: Fraction = 0.9
    """Decay of the first moment."""
    adam_beta2: Fraction = 0.95
    """Decay of the second moment."""
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest gradient norm; 0: no clipping."""
    calculate_per_token_loss: bool = True
    """Weigh every token of the global batch alike."""
    seed: NonNegativeInt = 1234
    """Decides initial weights, sample order, mock data and dropout."""
    fast_test_mode: bool = False
    """Quick check: 1000 samples, decay 800, warm-up 100, global batch 32, over whatever else says so."""
    max_nonfinite_steps: PositiveInt = 3
    """Steps in a row with a NaN or infinite loss or gradient norm before the run stops (exit 4)."""
    exit_duration_in_mins: Annotated[float, Field(gt=0)] | None = None
    """Save and end after this many minutes. The script's 235 would end a run unasked."""


class Watching(Options):
    """Evaluation, logs and profiles."""

    log_interval: PositiveInt = 1
    """Steps a console line."""
    log_throughput: bool = True
    """Show TFLOP/s and MFU."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Level of the ranks' own log files."""
    eval_interval: NonNegativeInt = 100
    """Steps between evaluations; 0: none."""
    eval_iters: PositiveInt = 32
    """Global batches an evaluation."""
    enable_profiling: bool = option(False, "--profile")
    """Write a torch profiler trace and the ten dearest kernels of the chosen ranks beside the logs; on a GPU also a
    memory snapshot and ranges for nsys."""
    profile_ranks: Ranks = (0,)
    """Ranks that are profiled, with commas between."""
    profile_step_start: NonNegativeInt = 4
    """First profiled step."""
    profile_step_end: NonNegativeInt = 6
    """Step before which profiling ends."""
    wandb_project: str | None = None
    """Weights & Biases project; unset: not used."""
    wandb_run_name: str | None = None
    """Its run name; unset: EXP_NAME."""


class Faults(Options):
    """Time limits, restarts, and what stands ready for them."""

    max_restarts: NonNegativeInt = 3
    """Faults in a row, with no new checkpoint in between, that the run gets over; one more ends it (exit 138)."""
    max_preemptions: NonNegativeInt = 20
    """The same for nodes that go away: taken back, shut down, or out of reach."""
    restart_window_s: PositiveInt = 86_400
    """Only what went wrong in this many last seconds counts."""
    node_strikes: PositiveInt = 3
    """Faults of its own after which a node is left out, where others can take its place."""
    spare_nodes: NonNegativeInt = 0
    """Nodes kept ready beside those in use, processes started, to take the place of one that is lost."""
    elastic_min_nodes: PositiveInt | None = None
    """Go on with fewer data-parallel ranks when a node is lost, down to so many nodes; unset: wait for another node."""
    node_rejoin_timeout_s: NonNegativeInt = 300
    """How long to wait for a lost node, or another in its place, before going on with fewer or giving up, seconds."""
    standby_processes: Auto | NonNegativeInt = "auto"
    """Processes on each node that have everything imported and wait for a fault; auto: one a GPU, on a CPU one."""
    hang_timeout_s: Annotated[float, Field(gt=0)] = 600
    """A rank that finishes no step for this long is taken to hang, seconds."""
    slow_phase_timeout_s: Annotated[float, Field(gt=0)] = 1800
    """The same while a rank starts, in its first step, in an evaluation and in a save."""
    straggler_factor: Annotated[float, Field(gt=1)] = 1.5
    """Warn of a rank whose own work takes so many times the other ranks' median, step after step."""
    replica_check_interval: NonNegativeInt = 0
    """Steps between comparisons of the weights over data-parallel ranks, against silent corruption; 0: none."""
    rehearse_faults: Rehearsal = ()
    """Faults to suffer on purpose: ATTEMPT:RANK:STEP:KIND, with commas between. Kinds: kill, stop, segfault, exit,
    exception, nan, bit_flip, slow, kill_saving, kill_node."""
    grace_s: PositiveInt = 60
    """After a first SIGTERM or Ctrl-C: time for one step, a checkpoint and a clean end, seconds."""
    distributed_timeout_minutes: PositiveInt = 60
    """How long torch.distributed waits for other ranks."""
    manual_gc: bool = True
    """Collect Python garbage every 100 steps on all ranks at once, not whenever each likes."""
    empty_unused_memory_level: Annotated[int, Field(ge=0, le=2)] = 1
    """Give cached GPU memory back: 0 never, 1 after an evaluation, 2 after every step."""


class Config(Faults, Watching, Checkpoints, Data, Training, Precision, Model, Parallel, Pods, Hardware):
    """All options of one run, as asked for: `auto` is still `auto` here (see `plan.RunPlan` for what it became)."""


GROUPS: tuple[type[Options], ...] = (
    Hardware, Pods, Parallel, Model, Precision, Training, Data, Checkpoints, Watching, Faults,
)  # fmt: skip

POSITIONALS = ("checkpoint_path", "tensorboard_logs_path", "tokenizer_arg", "data_arg")
"""The script's four arguments, in its order."""

FIXED = {
    "--use-mcore-models": "1",
    "--swiglu": "1",
    "--group-query-attention": "1",
    "--untie-embeddings-and-output-weights": "1",
    "--disable-bias-linear": "1",
    "--position-embedding-type": "rope",
}
"""Flags whose value Llama3 fixes: accepted as they are, refused when contradicted."""

IMPLIES = {"--mock-data": ("data_arg", "MOCK"), "--fp16": ("dtype", "fp16")}
"""Megatron-LM's switches that say the value of an option."""


def aliases(name: str) -> tuple[str, ...]:
    """Megatron-LM's flags for the option `name`."""
    extra = Config.model_fields[name].json_schema_extra
    return tuple(str(a) for a in extra["aliases"]) if isinstance(extra, dict) else ()  # type: ignore[union-attr]


def flag_of(name: str) -> str:
    """`tp_size` is `--tp-size`."""
    return "--" + name.replace("_", "-")


def is_switch(name: str) -> bool:
    """Whether the flag may stand alone (`--manual-gc`)."""
    annotation = Config.model_fields[name].annotation
    return annotation is bool or bool in getattr(annotation, "__args__", ())
