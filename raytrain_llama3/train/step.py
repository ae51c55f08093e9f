"""One training step: micro-batches through the pipeline schedule, gradients finished, weights updated."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.data.source import Tokens
from raytrain_llama3.train.optimizer import apply
from raytrain_llama3.train.own_work import OwnWork
from raytrain_llama3.train.process import Process
from raytrain_llama3.train.stop import Votes


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What all ranks agree on after a step. `loss` is the mean over the global batch, nats a token."""

    loss: float
    tokens: int
    grad_norm: float
    applied: bool
    votes: Votes
    own_s: float
    """Not agreed: this rank's own work, seconds."""


class Stepper:
    """Runs steps and evaluations of one built model."""

    def __init__(
        self,
        plan: RunPlan,
        process: Process,
        chunks: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        end_of_document: int | None = None,
    ) -> None:
        self._plan, self._process, self._chunks, self._optimizer = plan, process, chunks, optimizer
        self._schedule = get_forward_backward_func()
        # Llama3 has rotary positions; the argument is there for learned ones and is the same for every batch.
        self._positions = torch.arange(plan.config.seq_length, device=process.device)[None]
        self._end = end_of_document if plan.config.reset_attention_mask else None
        self._own = OwnWork(chunks, on_gpu=plan.device == "cuda")
        # The feeder's memory is not to be written to, and nobody does.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")

    def train(
        self, batches: Iterator[Tokens | None], votes: Votes, before_update: Callable[[bool], None] | None = None
    ) -> StepOutcome:
        """One optimizer step over `num_micro_batches` arrays `[micro_batch, seq_length + 1]` from `batches`.

        `votes` are this rank's; they travel with the loss. `before_update` is called on all ranks, with whether the
        loss is finite, when the weights are still those that made the gradients.
        """
        self._own.start()
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        losses = self._run(batches, forward_only=False)
        total, tokens, agreed = self._agree(losses, votes)
        # The loss is there, so the forward passes are over: reading their events waits for nothing.
        own_s = self._own.seconds()
        is_finite = math.isfinite(total)
        if before_update is not None:
            before_update(is_finite)
        update = apply(self._optimizer, self._plan.config.clip_grad, loss_is_finite=is_finite)
        return StepOutcome(total / max(tokens, 1), tokens, update.grad_norm, update.applied, agreed, own_s)

    def evaluate(self, batches: Iterator[Tokens | None], votes: Votes) -> tuple[float, int, Votes]:
        """Sum of the loss (nats) and number of tokens over one global batch, without touching the weights.

        The third value is all ranks' votes.
        """
        self._own.start()
        for chunk in self._chunks:
            chunk.eval()
        with torch.no_grad():
            losses = self._run(batches, forward_only=True)
        for chunk in self._chunks:
            chunk.train()
        return self._agree(losses, votes)

    def agree(self, votes: Votes) -> Votes:
        """All ranks' votes, outside a step. Collective."""
        return self._agree([], votes)[2]

    def _run(self, batches: Iterator[Tokens | None], *, forward_only: bool) -> list[Tensor]:
        c, layout = self._plan.config, self._plan.layout
        batches = self._own.fetched(batches)
        # With virtual stages every chunk walks the same micro-batches in its own time.
        iterators: Any = _each_its_own(batches, len(self._chunks)) if len(self._chunks) > 1 else batches
        return list(
            self._schedule(
                forward_step_func=self._forward,
                data_iterator=iterators,
                model=self._chunks,
                num_microbatches=layout.num_micro_batches,
                seq_length=c.seq_length,
                micro_batch_size=layout.micro_batch_size,
                decoder_seq_length=c.seq_length,
                forward_only=forward_only,
            )
        )

    def _forward(self, batches: Iterator[Tokens | None], model: Any) -> tuple[Tensor, Any]:
        window = next(batches)
        # A stage between the first and the last looks at no tokens, and is given none.
        batch = {} if window is None else self._on_device(window)
        began = self._own.forward_began()
        output = model(
            batch.get("tokens"),
            batch.get("positions"),
            attention_mask=batch.get("attention_mask"),
            labels=batch.get("labels"),
        )
        self._own.forward_ended(began)
        return output, _per_token_loss

    def _on_device(self, window: Tokens) -> dict[str, Tensor]:
        """What the model takes of a micro-batch `[micro_batch, seq_length + 1]`; ids become int64 on the device."""
        ids = torch.from_numpy(window).to(self._process.device, non_blocking=True).long()
        batch = {"tokens": ids[:, :-1], "labels": ids[:, 1:], "positions": self._positions}
        if self._plan.layout.cp > 1:
            batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=self._process.cp_group)
        if self._end is not None:
            batch["attention_mask"] = within_documents(batch["tokens"], self._end)
        return {name: part.contiguous() for name, part in batch.items()}

    def _agree(self, losses: list[Tensor], votes: Votes) -> tuple[float, int, Votes]:
        """Sum loss, tokens and votes over all ranks in one small all-reduce."""
        mine = torch.zeros(5, dtype=torch.float64, device=self._process.device)
        if losses and self._process.tp_rank == 0:
            # Ranks of one tensor-parallel group hold the same loss: one of them speaks.
            mine[:2] = torch.stack(losses).sum(dim=0, dtype=torch.float64)
        mine[2:] = torch.tensor([votes.stop, votes.late, votes.unsaved], dtype=torch.float64)
        dist.all_reduce(mine)
        total, tokens, *counts = mine.tolist()
        return float(total), int(tokens), Votes(*map(int, counts))


def _per_token_loss(output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`output`: [micro_batch, seq], the loss of each token. Every token counts: documents are packed, not padded."""
    total = output.float().sum()
    tokens = torch.tensor(output.numel(), dtype=torch.int, device=output.device)
    return total, tokens, torch.stack([total.detach(), tokens.to(total.dtype)])


def within_documents(tokens: Tensor, end_of_document: int) -> Tensor:
    """What a position must not look at, `[micro_batch, 1, seq, seq]`: what follows it, and other documents.

    `tokens`: `[micro_batch, seq]`. An end-of-document id is the last of its document.
    """
    is_end = (tokens == end_of_document).long()
    document = is_end.cumsum(dim=1) - is_end
    apart = document[:, :, None] != document[:, None, :]
    later = torch.ones(apart.shape[1:], dtype=torch.bool, device=tokens.device).triu(1)
    return (apart | later)[:, None]


def _each_its_own(batches: Iterator[Tokens | None], count: int) -> list[Iterator[Tokens | None]]:
    held = list(batches)
    return [iter(held) for _ in range(count)]
