"""What `check` makes of what the nodes and devices answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytrain_llama3.launch import check, node_probe
from raytrain_llama3.messages import Finding, Verdict
from raytrain_llama3.train import probe

A, B = "10.0.0.1 device 0", "10.0.0.2 device 0"


def test_versions_that_differ_are_told_with_the_places_that_have_them() -> None:
    same, other = check._compare_versions({A: {"torch": "2.11", "NCCL": "2.28"}, B: {"torch": "2.11", "NCCL": "2.29"}})
    assert (same.value, same.verdict) == ("2.11", Verdict.OK)
    assert other.value == f"2.28 on {A}; 2.29 on {B}"
    assert other.verdict is Verdict.BAD
    assert not check.is_good([same, other])


def test_a_program_that_one_node_lacks_is_a_difference() -> None:
    (found,) = check._compare_versions({A: {"cuDNN": "9"}, B: {}})
    assert (found.value, found.verdict) == (f"9 on {A}; none on {B}", Verdict.BAD)


def test_a_table_folds_what_is_alike_and_names_who_differs() -> None:
    findings = [
        Finding("10.0.0.1", "devices", "8 × H100"),
        Finding("10.0.0.2", "devices", "8 × H100"),
        Finding("10.0.0.1", "/dev/shm", "1 GiB"),
        Finding("10.0.0.2", "/dev/shm", "0 GiB", Verdict.WARNING, "give it more"),
    ]
    lines = check.as_table(findings).splitlines()
    assert len(lines) == 4
    assert lines[0].split() == ["ok", "devices", "8", "×", "H100"]
    assert lines[2].split() == ["warning", "/dev/shm", "0", "GiB", "[10.0.0.2]"]
    assert lines[3].strip() == "give it more"
    assert check.is_good(findings)
    assert json.loads(check.as_json(findings))["findings"][3]["verdict"] == "warning"


@pytest.mark.parametrize(
    ("memory_mib", "verdict"), [("7000", Verdict.BAD), ("8192", Verdict.OK), ("143771", Verdict.OK)]
)
def test_a_gpu_has_8_gib_at_least(memory_mib: str, verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_probe.machine, "driver", lambda: "570.1")
    gpus = [["0", "GPU-1", "NVIDIA H200", "143771", "9.0"], ["1", "GPU-2", "NVIDIA H200", memory_mib, "9.0"]]
    found = {f.what: f for f in node_probe._devices("10.0.0.1", gpus, "cuda")}
    assert found["GPU memory"].verdict is verdict
    assert found["driver"].value == "570.1"
    assert found["devices"].value == "2 × NVIDIA H200, capability 9.0"


def test_64_gib_of_memory_a_gpu_are_advised_not_asked_for() -> None:
    assert node_probe._memory("10.0.0.1", 0).verdict is Verdict.OK
    many = node_probe._memory("10.0.0.1", 1000)
    assert many.verdict is Verdict.WARNING
    assert "64000 GiB here" in many.remedy


def test_an_address_that_no_interface_has_cannot_be_reached() -> None:
    assert node_probe._network("x", "127.0.0.1").value.startswith("127.0.0.1 on lo")
    assert node_probe._network("x", "192.0.2.7").verdict is Verdict.BAD


def test_a_token_is_seen_where_the_folder_is_shared_and_goes_again(tmp_path: Path) -> None:
    node_probe.leave(str(tmp_path / "shared"), "token")
    assert node_probe.sees(str(tmp_path / "shared"), "token")
    assert not node_probe.sees(str(tmp_path), "token")
    node_probe.take_away(str(tmp_path / "shared"), "token")
    assert not node_probe.sees(str(tmp_path / "shared"), "token")


@pytest.mark.parametrize(("loaded", "told"), [((9, 14, 0), 1), ((10, 0, 0), 1), ((9, 19, 0), 0), ((9, 20, 1), 0)])
def test_a_cudnn_that_torch_refuses_is_told_however_often_one_asks(
    monkeypatch: pytest.MonkeyPatch, loaded: tuple[int, int, int], told: int
) -> None:
    assert all(isinstance(number, int) for version in probe.cudnn_versions() for number in version)
    monkeypatch.setattr(probe, "cudnn_versions", lambda: (loaded, (9, 19, 0)))
    device = probe.DeviceProbe("here", "cuda", 0, "127.0.0.1")
    found = [[*device._cudnn()] for _ in range(2)]
    assert [len(each) for each in found] == [told, told]
    if told:
        assert found[1][0].value == f"{'.'.join(map(str, loaded))}, and torch was built with 9.19.0"
        assert found[1][0].verdict is Verdict.WARNING
