from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from raytrain_llama3.config import machine
from raytrain_llama3.config.load import load
from raytrain_llama3.config.plan import DeviceSupply
from raytrain_llama3.errors import HardwareError

MIB = 2**20
TWO_GPUS = """0, GPU-aaaa, NVIDIA H100 80GB HBM3, 81559, 9.0
1, GPU-bbbb, NVIDIA H100 80GB HBM3, 81000, 9.0
"""
BOTH = DeviceSupply("cuda", (2,), "NVIDIA H100 80GB HBM3", 81000 * MIB, 9.0)
FIRST = DeviceSupply("cuda", (1,), "NVIDIA H100 80GB HBM3", 81559 * MIB, 9.0)
SECOND = DeviceSupply("cuda", (1,), "NVIDIA H100 80GB HBM3", 81000 * MIB, 9.0)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only program on the PATH: an `nvidia-smi` that answers as the real one does with two GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '%s' '{TWO_GPUS}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return program


def supply(*argv: str, environ: dict[str, str] | None = None) -> DeviceSupply:
    return machine.local_supply(load(argv, {}).config, environ or {})


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, BOTH),
        ("0,1", BOTH),
        ("0", FIRST),
        ("1", SECOND),
        ("GPU-bbbb", SECOND),
        ("GPU-bb", SECOND),
        ("1, 0", BOTH),
    ],
)
@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.usefixtures("driver")
def test_the_gpus_that_this_process_may_use(visible: str | None, expected: DeviceSupply, device: str) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert supply("--device", device, environ=environ) == expected


@pytest.mark.usefixtures("driver")
def test_a_cpu_that_is_asked_for_is_used_beside_gpus() -> None:
    memory = psutil.virtual_memory().total
    assert supply("--device", "cpu") == DeviceSupply("cpu", (1,), "CPU", memory)
    assert supply("--device", "cpu", "--gpus-per-node", "4") == DeviceSupply("cpu", (4,), "CPU", memory // 4)


@pytest.mark.parametrize("visible", ["", "-1", "7"])
@pytest.mark.usefixtures("driver")
def test_where_no_gpu_may_be_used_auto_means_the_cpu(visible: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": visible}
    assert supply(environ=environ).device == "cpu"
    with pytest.raises(HardwareError, match="shows no GPU"):
        supply("--device", "cuda", environ=environ)


def test_a_driver_that_fails_shows_no_gpu(driver: Path) -> None:
    driver.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed, because it could not talk to the driver'\nexit 9\n")
    assert supply().device == "cpu"


def test_a_driver_that_does_not_answer_is_named(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_TIMEOUT_S", 0.2)
    driver.write_text("#!/bin/sh\nread forever < /dev/zero\n")
    with pytest.raises(HardwareError, match=r"nvidia-smi has not answered"):
        supply()
