"""Gradients of one layer's model against float64's: `gradients.py RUNS.json RESULTS.json`.

RUNS is a list of the command's flags; RESULTS gets for each the relative error of every weight's gradient. A few steps
come first, so that fp8's scales have settled on what they scale.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from in_process import forget, planned

from raytrain_llama3 import data
from raytrain_llama3.config import env
from raytrain_llama3.config.plan import RunPlan

_SETTLING = 4
_FUSED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Transformer Engine's norms are part of the layer that follows."""


def errors(plan: RunPlan, number: int) -> dict[str, float]:
    """By weight: |ours - float64's| / |float64's|, both as vectors."""
    import torch
    from megatron.core.utils import unwrap_model

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))
    import plain_llama

    from raytrain_llama3.data.feed import RankFeed, local_link
    from raytrain_llama3.messages import ProcessFacts, RankSpec, Rendezvous
    from raytrain_llama3.train.model import build_model
    from raytrain_llama3.train.optimizer import build_optimizer
    from raytrain_llama3.train.process import host_store, open_process
    from raytrain_llama3.train.step import Stepper
    from raytrain_llama3.train.stop import Votes

    c, layout = plan.config, plan.layout
    data.prepare(plan, lambda _: None)
    facts, rank = ProcessFacts(0, "here", {}, 0.0, 0.0), RankSpec(0, 1, 0, 0, 1, 0, "node", "127.0.0.1", 0)
    store = host_store("127.0.0.1", 0, 1)
    feed = RankFeed(local_link(plan), layout, 0)
    with open_process(plan, rank, Rendezvous("127.0.0.1", store.port, f"run-{number}"), facts, store) as process:
        chunks = build_model(plan, process)
        stepper = Stepper(plan, process, chunks, build_optimizer(plan, chunks))
        for step in range(_SETTLING):
            stepper.train(feed.micro_batches("train", step * layout.global_batch_size), Votes())
        parameters = {_plain_name(name): p for name, p in unwrap_model(chunks[0]).named_parameters()}
        exact = {name: p.detach().double().requires_grad_() for name, p in parameters.items()}
        batches = list(feed.micro_batches("train", _SETTLING * layout.global_batch_size))
        stepper.train(iter(batches), Votes())
        shape = plain_llama.Shape(c.num_layers, c.num_attention_heads, c.num_query_groups, c.kv_channels)
        with torch.device("cuda"):
            losses = [plain_llama.loss(exact, shape, torch.from_numpy(b).long().cuda()) for b in batches]
        torch.stack(losses).mean().backward()
        return {
            name: float((p.main_grad.double() - exact[name].grad).norm() / exact[name].grad.norm())
            for name, p in parameters.items()
        }


def _plain_name(name: str) -> str:
    for fused, plain in _FUSED.items():
        if name.endswith(fused):
            return name.removesuffix(fused) + plain
    return name


def main(runs: Path, results: Path) -> None:
    plans = [planned(flags) for flags in json.loads(runs.read_text())]
    env.apply(plans[0].worker_environment, ())
    found = []
    for number, plan in enumerate(plans):
        found.append(errors(plan, number))
        forget()
    results.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
