from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LINTER = Path(sys.executable).parent / "lint-imports"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(LINTER), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_the_contracts_of_pyproject_toml_are_kept() -> None:
    done = lint(REPOSITORY)
    assert done.returncode == 0, done.stdout
    assert "3 kept, 0 broken" in done.stdout


BREACHES = [
    ("errors.py", "import raytrain_llama3.messages", "raytrain_llama3.errors is not allowed to import"),
    (
        "launch/recovery.py",
        "from raytrain_llama3.train import worker",
        "launch.recovery -> raytrain_llama3.train.worker",
    ),
    ("train/step.py", "from raytrain_llama3.launch import session", "train.step -> raytrain_llama3.launch.session"),
    ("data/order.py", "from raytrain_llama3.metrics import record", "data.order -> raytrain_llama3.metrics.record"),
    ("metrics/console.py", "import torch", "metrics.console -> torch"),
    ("launch/gang.py", "from megatron.core import parallel_state", "launch.gang -> megatron"),
    ("data/feed.py", "import ray", "data.feed -> ray"),
    ("newcomer.py", "import raytrain_llama3.errors", "newcomer"),
]


@pytest.fixture(scope="module")
def breaches(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the linter says of a copy of the package with one breach in each of these modules, inside a function."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(REPOSITORY / "raytrain_llama3", folder / "raytrain_llama3")
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    for module, line, _ in BREACHES:
        with (folder / "raytrain_llama3" / module).open("a", encoding="utf-8") as file:
            file.write(f"\n\ndef breach():\n    {line}\n")
    done = lint(folder)
    assert done.returncode == 1
    assert "0 kept, 3 broken" in done.stdout
    return done.stdout


@pytest.mark.parametrize("said", [said for _, _, said in BREACHES])
def test_the_contracts_see_what_breaks_them(said: str, breaches: str) -> None:
    assert said in " ".join(breaches.split())
