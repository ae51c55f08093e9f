from __future__ import annotations

import pytest
from planning import unreadable

from raytrain_llama3.config.load import load
from raytrain_llama3.config.schema import Faults
from raytrain_llama3.messages import FaultKind, PlannedFault

KINDS = "kill, stop, segfault, exit, exception, nan, bit_flip, slow, kill_saving, kill_node"


def planned_faults(text: str) -> tuple[PlannedFault, ...]:
    return load(["--rehearse-faults", text], {}).config.rehearse_faults


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("0:1:5:kill", [PlannedFault(0, 1, 5, FaultKind.KILL)]),
        (
            "0:1:5:kill,1:0:9:stop",
            [PlannedFault(0, 1, 5, FaultKind.KILL), PlannedFault(1, 0, 9, FaultKind.STOP)],
        ),
        # Spaces and a comma too many do no harm; the order stays.
        (
            " 2:3:4:nan ,\t0:0:1:bit_flip, ",
            [PlannedFault(2, 3, 4, FaultKind.NAN), PlannedFault(0, 0, 1, FaultKind.BIT_FLIP)],
        ),
        ("", []),
        (" , ", []),
        ("10:11:1200:kill_node", [PlannedFault(10, 11, 1200, FaultKind.KILL_NODE)]),
    ],
)
def test_planned_faults_are_read(text: str, faults: list[PlannedFault]) -> None:
    assert planned_faults(text) == tuple(faults)


@pytest.mark.parametrize("kind", FaultKind)
def test_every_kind_is_written_as_it_is_read(kind: FaultKind) -> None:
    fault = PlannedFault(1, 2, 3, kind)
    assert str(fault) == f"1:2:3:{kind.value}"
    assert planned_faults(str(fault)) == (fault,)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0:1:5", "'0:1:5'"),
        ("0:1:5:kill:now", "'0:1:5:kill:now'"),
        ("0:1:5:explode", "'0:1:5:explode'"),
        ("0:1:5:KILL", "'0:1:5:KILL'"),
        ("a:1:5:kill", "'a:1:5:kill'"),
        ("0:1.5:5:kill", "'0:1.5:5:kill'"),
        ("0::5:kill", "'0::5:kill'"),
        ("kill", "'kill'"),
        # Only what is wrong is named.
        ("0:1:5:kill, 1:1:x:stop", "'1:1:x:stop'"),
    ],
)
def test_what_is_no_planned_fault_is_named_with_how_to_write_one(text: str, told: str) -> None:
    (line,) = unreadable(["--rehearse-faults", text])
    assert line.startswith("--rehearse-faults")
    assert f"{told} is not ATTEMPT:RANK:STEP:KIND with a KIND of {KINDS}" in line


def test_a_variable_says_which_faults_too() -> None:
    loaded = load([], {"REHEARSE_FAULTS": "0:1:5:kill"})
    assert loaded.config.rehearse_faults == (PlannedFault(0, 1, 5, FaultKind.KILL),)
    (line,) = unreadable([], {"REHEARSE_FAULTS": "0:1"})
    assert "REHEARSE_FAULTS" in line
    assert "'0:1' is not ATTEMPT:RANK:STEP:KIND" in line


def test_planned_faults_are_taken_as_they_are_too() -> None:
    fault = PlannedFault(0, 1, 5, FaultKind.KILL)
    assert Faults(rehearse_faults=(fault,)).rehearse_faults == (fault,)
    assert Faults().rehearse_faults == ()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--attention-dropout", "1.0", "attention_dropout"),
        ("--adam-beta1", "-0.1", "adam_beta1"),
        ("--split", "99,1", "split"),
        ("--split", "99,-1,0", "split"),
        ("--split", "a,b,c", "split"),
    ],
)
def test_values_out_of_bounds_are_refused(option: str, value: str, said: str) -> None:
    lines = unreadable([f"{option}={value}"])
    assert lines
    assert all(said in line.replace("-", "_") for line in lines)


@pytest.mark.parametrize("text", ["99,1,0", " 99 , 1,0 ", "99.0,1.0,0.0"])
def test_a_split_is_three_numbers(text: str) -> None:
    assert load(["--split", text], {}).config.split == (99, 1, 0)
