"""Boxes of saved tensors come back as they were, however they lie, and what is damaged is named."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from raytrain_llama3.checkpoint.distcp import Blob, Box, Place, metadata_of, pack, write_files, write_index
from raytrain_llama3.checkpoint.reading import FolderSource, Reader, Target

ROWS, COLUMNS = 12, 10


def whole() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)


def box(start: int, end: int) -> Box:
    return Box("weight", torch.float32, (ROWS, COLUMNS), (start, 0), (end - start, COLUMNS))


def saved(folder: Path, *values: tuple[Box | Blob, torch.Tensor | bytes]) -> Reader:
    """A checkpoint of one file in which `values` lie."""
    part = write_files(folder, {"a.distcp": values})
    write_index(folder, [part])
    return Reader(FolderSource(folder))


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    """The tensor as two ranks saved it, five rows and seven."""
    return saved(tmp_path, (box(0, 5), whole()[:5].clone()), (box(5, ROWS), whole()[5:].clone()))


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ((0, 12), (0, 10)),
        ((0, 5), (0, 10)),
        ((3, 8), (0, 10)),
        ((2, 11), (4, 7)),
        ((6, 7), (9, 10)),
        ((0, 12), (5, 10)),
    ],
)
def test_any_box_is_read(reader: Reader, rows: tuple[int, int], columns: tuple[int, int]) -> None:
    found = reader.tensor("weight", (rows[0], columns[0]), (rows[1] - rows[0], columns[1] - columns[0]))
    assert torch.equal(found, whole()[slice(*rows), slice(*columns)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_numbers_of_another_type_are_converted(reader: Reader, dtype: torch.dtype) -> None:
    into = torch.zeros(ROWS, COLUMNS, dtype=dtype)
    reader.fill([Target(box(0, ROWS), into)])
    assert torch.equal(into, whole().to(dtype))


def test_a_place_with_gaps_is_filled_and_the_gaps_are_left_alone(reader: Reader) -> None:
    room = torch.full((ROWS, 2 * COLUMNS), -1.0)
    reader.fill([Target(box(0, ROWS), room[:, ::2])])
    assert torch.equal(room[:, ::2], whole())
    assert bool((room[:, 1::2] == -1).all())


def test_a_weight_that_needs_a_gradient_is_filled_in_place(reader: Reader) -> None:
    weight = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))
    reader.fill([Target(box(0, ROWS), weight.detach())])
    assert torch.equal(weight, whole())


@pytest.mark.parametrize("form", ["transposed", "part of a larger storage"])
def test_a_tensor_that_was_saved_as_a_view_is_read(tmp_path: Path, form: str) -> None:
    view = whole().T.contiguous().T if form == "transposed" else torch.cat([whole(), whole() + 1000])[ROWS:]
    reader = saved(tmp_path, (box(0, ROWS), view))
    assert torch.equal(reader.tensor("weight", (0, 0), (ROWS, COLUMNS)), view)
    assert torch.equal(reader.tensor("weight", (2, 3), (4, 5)), view[2:6, 3:8])


def test_tensors_that_take_as_many_bytes_are_not_mistaken_for_one_another(tmp_path: Path) -> None:
    square = torch.arange(64, dtype=torch.float32).view(8, 8)
    values = {"a": square.clone(), "b": square.T, "c": square.int(), "d": square + 1, "e": square.T.contiguous()}
    reader = saved(tmp_path, *((Box(key, t.dtype, (8, 8), (0, 0), (8, 8)), t) for key, t in values.items()))
    # Those that were the last to be written are asked for first.
    found = {key: reader.tensor(key, (0, 0), (8, 8)) for key in reversed(values)}
    assert all(torch.equal(found[key], value) for key, value in values.items())
    assert all(torch.equal(reader.tensor(key, (2, 0), (1, 8)), value[2:3]) for key, value in values.items())


def test_a_single_number_and_an_empty_tensor_are_read(tmp_path: Path) -> None:
    scalar = Box("scalar", torch.float32, (), (), ())
    empty = Box("empty", torch.float32, (0, 4), (0, 0), (0, 4))
    reader = saved(tmp_path, (scalar, torch.tensor(3.5)), (empty, torch.empty(0, 4)))
    assert reader.tensor("scalar", (), ()) == 3.5
    assert reader.tensor("empty", (0, 0), (0, 4)).shape == (0, 4)


def test_what_follows_comes_in_the_order_asked_for_once_all_is_there(reader: Reader) -> None:
    rows = [torch.zeros(1, COLUMNS) for _ in range(ROWS)]
    seen: list[int] = []

    def arrived(row: int) -> None:
        assert torch.equal(torch.cat(rows), whole())
        seen.append(row)

    order = [7, 0, 11, 3, 5, 1, 2, 10, 9, 8, 6, 4]
    reader.fill(Target(box(row, row + 1), rows[row], lambda row=row: arrived(row)) for row in order)  # type: ignore[misc]
    assert seen == order


def test_an_object_is_read_from_between_tensors(tmp_path: Path) -> None:
    reader = saved(
        tmp_path, (box(0, 5), whole()[:5].clone()), (Blob("extra"), pack({"a": 1})), (box(5, ROWS), whole()[5:].clone())
    )
    assert reader.object("extra") == {"a": 1}
    assert torch.equal(reader.tensor("weight", (0, 0), (ROWS, COLUMNS)), whole())


def test_a_file_that_was_cut_off_is_named_with_the_tensor(reader: Reader, tmp_path: Path) -> None:
    file = tmp_path / "a.distcp"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"weight in a\.distcp: "):
        reader.tensor("weight", (0, 0), (ROWS, COLUMNS))


def test_a_file_with_other_bytes_is_named_with_the_tensor(reader: Reader, tmp_path: Path) -> None:
    file = tmp_path / "a.distcp"
    file.write_bytes(b"?" * file.stat().st_size)
    with pytest.raises(ValueError, match=r"weight in a\.distcp: "):
        reader.tensor("weight", (0, 0), (ROWS, COLUMNS))


class Raw:
    """A source of bare numbers, which gives a few bytes at a time, as a connection does."""

    is_raw = True

    def __init__(self, content: bytes) -> None:
        self._content = content

    def metadata(self) -> Metadata:
        half = box(0, 5), box(5, ROWS)
        return metadata_of([Place(half[0], "0", 3, 200), Place(half[1], "0", 203, 280)])

    def open(self, file: str) -> io.IOBase:
        return Trickle(self._content)


class Trickle(io.BytesIO):
    def readinto(self, buffer: object, /) -> int:
        return super().readinto(memoryview(buffer)[:7])  # type: ignore[call-overload]


def test_bare_numbers_are_read_in_as_many_goes_as_it_takes() -> None:
    reader = Reader(Raw(b"..." + whole().numpy().tobytes()))
    assert torch.equal(reader.tensor("weight", (0, 0), (ROWS, COLUMNS)), whole())
    assert torch.equal(reader.tensor("weight", (4, 2), (3, 6)), whole()[4:7, 2:8])


def test_bare_numbers_that_end_early_are_named() -> None:
    reader = Reader(Raw(b"..." + whole().numpy().tobytes()[:-8]))
    with pytest.raises(ValueError, match="weight in 0: the file ends 8 bytes before"):
        reader.tensor("weight", (0, 0), (ROWS, COLUMNS))


def test_another_shape_and_a_tensor_that_is_not_there_are_named(reader: Reader) -> None:
    other = Box("weight", torch.float32, (3, 3), (0, 0), (3, 3))
    with pytest.raises(ValueError, match=r"weight has shape \[12, 10\] there, \[3, 3\] here"):
        reader.fill([Target(other, torch.empty(3, 3))])
    with pytest.raises(KeyError, match="bias is not in the checkpoint"):
        reader.tensor("bias", (0,), (1,))
