"""`check` on this machine: what it tries, what it skips on a CPU, and what it says for people and for programs."""

from __future__ import annotations

import json
import re

from sandbox import Sandbox

TRIED = {"bf16 product", "attention", "all-reduce"}
LOOKED_AT = {"devices", "system memory", "/dev/shm", "open files", "free disk", "network"}
VERSIONS = {"raytrain_llama3", "Python", "torch", "Megatron-core", "Transformer Engine", "CUDA"}
NEEDS_MORE = {"driver", "GPU memory", "fp8 layer", "shared folder"}


def test_a_cpu_is_tried_and_what_needs_a_gpu_or_a_second_node_is_skipped_aloud(sandbox: Sandbox) -> None:
    checked = sandbox.run("check", "--json", "--device", "cpu", "--gpus-per-node", "2")
    assert checked.process.returncode == 0, checked.output
    told = json.loads(checked.output)
    assert told["ok"] is True
    verdicts = {finding["what"]: finding["verdict"] for finding in told["findings"]}
    assert verdicts.keys() >= TRIED | LOOKED_AT | VERSIONS | NEEDS_MORE
    assert {what for what, verdict in verdicts.items() if verdict == "skipped"} == NEEDS_MORE
    assert {verdicts[what] for what in TRIED | VERSIONS} == {"ok"}
    values = {finding["what"]: finding["value"] for finding in told["findings"]}
    assert re.match(r"2 devices, \d+\.\d\d GB/s", values["all-reduce"])
    assert values["torch"].startswith("2.11")
    places = {finding["where"] for finding in told["findings"] if finding["what"] == "bf16 product"}
    assert len(places) == 2
    assert sandbox.leftovers() == []
