"""The two kernels of `fp8_swiglu`: each reads its operands once, and writes both forms of the result.

`rows`: `[tokens, width]`, `columns`: `[width, tokens]`, both fp8; `scale`, `inverse` and `amax`: one fp32 number each,
the last raised to the largest magnitude seen. A program takes `ROWS` tokens and `COLUMNS` of the gates with their ups.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def forward(
    gate_and_up, rows, columns, scale, inverse, amax, tokens, ffn,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    inside = (row < tokens) & (column < ffn)
    gate = tl.load(gate_and_up + row * 2 * ffn + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_and_up + row * 2 * ffn + ffn + column, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    factor = tl.load(scale)
    _store(out * factor, rows + row * ffn + column, columns + column * tokens + row, inside, LARGEST)
    _note(tl.max(tl.abs(out)), factor, inverse, amax)


@triton.jit
def backward(
    gate_and_up, grad, rows, columns, scale, inverse, amax, tokens, ffn,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    inside = (row < tokens) & (column < ffn)
    gate = tl.load(gate_and_up + row * 2 * ffn + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_and_up + row * 2 * ffn + ffn + column, mask=inside, other=0.0).to(tl.float32)
    of_out = tl.load(grad + row * ffn + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    of_up = of_out * gate * sigmoid
    of_gate = of_out * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    factor = tl.load(scale)
    to_row, to_column = rows + row * 2 * ffn + column, columns + column * tokens + row
    _store(of_gate * factor, to_row, to_column, inside, LARGEST)
    _store(of_up * factor, to_row + ffn, to_column + ffn.to(tl.int64) * tokens, inside, LARGEST)
    _note(tl.maximum(tl.max(tl.abs(of_gate)), tl.max(tl.abs(of_up))), factor, inverse, amax)


@triton.jit
def _store(scaled, to_row, to_column, inside, LARGEST: tl.constexpr):
    cast = tl.clamp(scaled, -LARGEST, LARGEST).to(to_row.dtype.element_ty)
    tl.store(to_row, cast, mask=inside)
    tl.store(tl.trans(to_column), tl.trans(cast), mask=tl.trans(inside))


@triton.jit
def _note(largest, factor, inverse, amax):
    tl.atomic_max(amax, largest)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(inverse, 1.0 / factor)
