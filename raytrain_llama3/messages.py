"""Frozen values that travel between the driver and the actors.

Everything here is plain data: no torch, no Ray, nothing that needs a particular machine to unpickle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    """What a rank is doing, in the order in which an attempt goes through it."""

    START = "start"
    IMPORT = "import"
    PROCESS_GROUP = "process_group"
    MODEL = "model"
    LOAD = "load"
    FIRST_STEP = "first_step"
    TRAIN = "train"
    EVALUATE = "evaluate"
    SAVE = "save"
    DONE = "done"


class EndReason(StrEnum):
    """Why the training loop returned without an error."""

    TARGET = "target reached"
    DURATION = "exit_duration_in_mins reached before the target"
    STOP = "asked to stop"


class FailureKind(StrEnum):
    """How a rank was lost, as far as can be told."""

    EXCEPTION = "exception"
    OUT_OF_MEMORY = "out of memory"
    TIMED_OUT = "collective timed out"
    PEER_LOST = "connection to other ranks lost"
    DIED = "process died"
    CRASHED = "process crashed"
    NODE_DIED = "node died"
    HANG = "hang"
    NON_FINITE = "non-finite numbers"
    CORRUPTED = "weights differ between replicas"


class FaultKind(StrEnum):
    """What a rank can be told to suffer (`rehearse_faults`)."""

    KILL = "kill"
    """SIGKILL, in the middle of an all-reduce."""
    STOP = "stop"
    """SIGSTOP: the process stays and does nothing."""
    SEGFAULT = "segfault"
    EXIT = "exit"
    """`os._exit(0)`."""
    EXCEPTION = "exception"
    NAN = "nan"
    """The loss is NaN, from this step on."""
    BIT_FLIP = "bit_flip"
    """One bit of this rank's copy of a weight changes."""
    SLOW = "slow"
    """Every forward pass takes three times as long, from this step on."""
    KILL_SAVING = "kill_saving"
    """SIGKILL half-way through the first save at this step or later."""
    KILL_NODE = "kill_node"
    """SIGKILL to the node's raylet, whose workers end with it."""


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault that strikes `rank` in `attempt` during step `step` (1 is the first step of a run)."""

    attempt: int
    rank: int
    step: int
    kind: FaultKind

    def __str__(self) -> str:
        return f"{self.attempt}:{self.rank}:{self.step}:{self.kind}"


@dataclass(frozen=True, slots=True)
class DeviceSlot:
    """One device of one node, as granted by Ray, before ranks are given.

    `device_index` counts within the node (CUDA ordinal; on a CPU the slot number). `node_order` is the pod's
    RANK where known, else the node's address as a number: ranks follow it.
    """

    node_id: str
    node_ip: str
    node_order: int
    device_index: int


@dataclass(frozen=True, slots=True)
class KeeperAddress:
    """Where a keeper listens. Only who has the token is answered."""

    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Who a rank is in one attempt."""

    rank: int
    world_size: int
    node_rank: int
    local_rank: int
    local_world_size: int
    device_index: int
    node_id: str
    node_ip: str
    attempt: int
    keepers: tuple[KeeperAddress, ...] = ()
    """Who keeps this rank's memory checkpoints: each of them all of its part."""

    @property
    def name(self) -> str:
        """The name shown in the Ray dashboard and in messages."""
        return f"rank-{self.rank}@node-{self.node_rank}"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where rank 0's `TCPStore` listens. `prefix` is new for every attempt."""

    host: str
    port: int
    prefix: str


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a file was when it was written: its size, and the SHA-256 of its bytes in hexadecimal."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class KeptPart:
    """Where a keeper holds one rank's part of a memory checkpoint."""

    rank: int
    keeper: KeeperAddress


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The complete checkpoint that the driver chose."""

    path: str
    """Its folder; empty for one in memory."""
    step: int
    samples: int
    weights_only: bool = False
    """Take the weights alone, and start at step 0."""
    kept: tuple[KeptPart, ...] = ()
    """Of a checkpoint in memory: every rank's part."""
    kept_in_attempt: int = 0
    """Of a checkpoint in memory: the attempt that made it."""


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What a rank's process found out about itself once everything was imported."""

    pid: int
    hostname: str
    versions: dict[str, str]
    import_s: float
    started_at: float
    """Unix time at which the process started."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished training step, as every rank agrees on it (`loss` is in nats a token)."""

    step: int
    samples: int
    tokens: int
    loss: float
    learning_rate: float
    grad_norm: float
    step_s: float
    finished_at: float
    """Unix time, seconds."""
    peak_memory_bytes: int = 0
    skipped: bool = False
    """The optimizer left the weights alone (fp16 overflow, or a non-finite norm)."""
    product_flops: float = 0.0
    """What rank 0's GPU reached when it started, in the model's widest product alone, FLOP/s."""
    power_w: float = 0.0
    """What rank 0's GPU drew at the end of the step, watts; 0 where that is not known."""


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One evaluation: mean loss in nats a token over `tokens` validation tokens."""

    step: int
    loss: float
    tokens: int
    seconds: float
    finished_at: float


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """A checkpoint whose files are all written, waiting for the driver to publish it.

    `sidecar` holds what `checkpoint.store` writes beside the weights; plain JSON values only.
    """

    step: int
    samples: int
    path: str
    seconds: float
    """From the step's end until the last rank's files were on the disk."""
    sidecar: dict[str, object]
    files: dict[str, FileFacts] = field(default_factory=dict)
    wait_s: float | None = None
    """Of these, what training waited for; None: all of them."""


@dataclass(frozen=True, slots=True)
class SaveFailure:
    """A save that did not come about: its folder holds a part that nobody needs."""

    step: int
    path: str
    reason: str
    in_a_row: int
    """Saves that failed one after the other, this one among them."""


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds that a rank spent over `steps` steps in all, and of these in its own data and forward passes.

    Ranks wait for each other in every step, so their `step_s` are alike; `own_s` tells a slow one apart.
    """

    steps: int
    own_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Answer to a poll: where the rank is, and what happened since the last poll."""

    rank: int
    phase: Phase
    step: int
    moves: int = 0
    """Rises with every phase entered, step finished and evaluation round: stands still while a rank hangs."""
    waits_for: str = ""
    """What it waits for, in words, if for a while: which data, and of whom."""
    work: Work | None = None
    """Over the steps since the last poll; None where there was none."""
    steps: tuple[StepRecord, ...] = ()
    evals: tuple[EvalRecord, ...] = ()
    saves: tuple[SaveRecord | SaveFailure, ...] = ()
    """In the order in which they ended."""
    warnings: tuple[str, ...] = ()
    phase_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds spent in each phase left so far, by `Phase` value."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """What a rank's run ended with, when it ended well."""

    rank: int
    step: int
    samples: int
    reason: EndReason
    saved_step: int | None


@dataclass(frozen=True, slots=True)
class Failure:
    """One lost rank: the first to fail in an attempt; the others are folded into `others`."""

    rank: int
    node_ip: str
    kind: FailureKind
    error: str
    """One line: exception class and message, or exit cause."""
    step: int
    attempt: int
    node_id: str = ""
    """Ray's id of the node, which is another after its raylet was started again."""
    exit_code: int | None = None
    """What the error asks the run to end with, where it is one of `errors`."""
    at: float = 0.0
    """Unix time at which it happened, as near as can be told."""
    detect_s: float = 0.0
    """Seconds from then until the driver knew."""
    log_path: str = ""
    log_tail: tuple[str, ...] = ()
    others: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run ended with, when it ended well."""

    reason: EndReason
    step: int
    samples: int
    saved_step: int | None
    attempts: int
    phase_seconds: dict[str, float]
    """Seconds from the start of the last attempt, by phase: Ray's own (`ray`, `place`, `actors`), then rank 0's."""


class Verdict(StrEnum):
    """What `check` thinks of one thing."""

    OK = "ok"
    WARNING = "warning"
    BAD = "BAD"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `check` looked at, in one place: a node, a device of it, or all of them."""

    where: str
    what: str
    value: str
    verdict: Verdict = Verdict.OK
    remedy: str = ""
