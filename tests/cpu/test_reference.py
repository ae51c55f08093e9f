"""Megatron-core's model against plain PyTorch, same weights."""

from __future__ import annotations

from pathlib import Path

import plain_llama
import pytest
import torch
from megatron.core.utils import unwrap_model
from training import plan, spec

from raytrain_llama3.data.feed import RankFeed, local_link
from raytrain_llama3.messages import ProcessFacts, Rendezvous
from raytrain_llama3.train.model import build_model
from raytrain_llama3.train.optimizer import build_optimizer
from raytrain_llama3.train.process import host_store, open_process
from raytrain_llama3.train.step import Stepper, within_documents
from raytrain_llama3.train.stop import Votes


def test_first_loss_and_gradient_norm_agree(tmp_path: Path) -> None:
    run_plan = plan(tmp_path, "--dtype", "fp32", "--init-method-std", "0.05")
    c, layout = run_plan.config, run_plan.layout
    facts = ProcessFacts(0, "here", {}, 0.0, 0.0)
    store = host_store("127.0.0.1", 0, 1)
    batches = list(RankFeed(local_link(run_plan), layout, 0).micro_batches("train", 0))
    with open_process(run_plan, spec(0, 1), Rendezvous("127.0.0.1", store.port, "reference"), facts, store) as process:
        chunks = build_model(run_plan, process)
        module = unwrap_model(chunks[0])
        weights = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
        ours = Stepper(run_plan, process, chunks, build_optimizer(run_plan, chunks)).train(iter(batches), Votes())
    shape = plain_llama.Shape(c.num_layers, c.num_attention_heads, c.num_query_groups, c.kv_channels)
    loss = torch.stack([plain_llama.loss(weights, shape, torch.from_numpy(b).long()) for b in batches]).mean()
    loss.backward()
    grad_norm = torch.stack([w.grad.norm() for w in weights.values() if w.grad is not None]).norm()
    assert len(batches) == layout.num_micro_batches > 1
    assert all(w.grad is not None for w in weights.values())
    assert ours.loss == pytest.approx(loss.item(), abs=1e-4)
    assert ours.grad_norm == pytest.approx(grad_norm.item(), abs=1e-4)


def test_attention_stays_within_documents_when_asked(tmp_path: Path) -> None:
    end, run_plan = 255, plan(tmp_path, "--dtype", "fp32")
    facts = ProcessFacts(0, "here", {}, 0.0, 0.0)
    store = host_store("127.0.0.1", 0, 1)
    document = [end, *range(20, 37)]
    windows = torch.tensor([[first] * 15 + document for first in (3, 9)])
    tokens, labels = windows[:, :-1], windows[:, 1:]
    mask = within_documents(tokens, end)
    assert mask.shape == (2, 1, 32, 32)
    assert mask[0, 0, 20].logical_not().nonzero().flatten().tolist() == [16, 17, 18, 19, 20]
    assert mask[0, 0, 15].logical_not().nonzero().flatten().tolist() == list(range(16))
    with open_process(run_plan, spec(0, 1), Rendezvous("127.0.0.1", store.port, "masked"), facts, store) as process:
        (model,) = build_model(run_plan, process)
        positions = torch.arange(32)[None]
        apart = model(tokens, positions, attention_mask=mask, labels=labels)
        together = model(tokens, positions, attention_mask=None, labels=labels)
    assert torch.equal(apart[0, 16:], apart[1, 16:])
    assert not torch.allclose(together[0, 16:], together[1, 16:])
