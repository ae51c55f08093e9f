"""The kernels themselves, in Triton; `rotary` and `adam` say what they are given and where from.

Numbers are worked on in fp32, whatever they are kept in.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate_forward(
    mixed, angles, queries, keys, values, batch,
    GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, column, cos, sin = _of_token(token // batch, angles, HALF, ROWS)
    low, high = _places(row, column, token, GROUPS * PER_GROUP, HALF)
    inside = row < GROUPS * PER_GROUP
    a = tl.load(mixed + low, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(mixed + high, mask=inside, other=0.0).to(tl.float32)
    turned_a, turned_b = a * cos - b * sin, b * cos + a * sin
    group, part = row // PER_GROUP, row % PER_GROUP
    is_query, is_key = inside & (part < PER_GROUP - 2), inside & (part == PER_GROUP - 2)
    low, high = _places(group * (PER_GROUP - 2) + part, column, token, GROUPS * (PER_GROUP - 2), HALF)
    tl.store(queries + low, turned_a, mask=is_query)
    tl.store(queries + high, turned_b, mask=is_query)
    low, high = _places(group, column, token, GROUPS, HALF)
    tl.store(keys + low, turned_a, mask=is_key)
    tl.store(keys + high, turned_b, mask=is_key)
    is_value = inside & (part == PER_GROUP - 1)
    tl.store(values + low, a, mask=is_value)
    tl.store(values + high, b, mask=is_value)


@triton.jit
def rotate_backward(
    queries, keys, values, angles, mixed, batch,
    GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, column, cos, sin = _of_token(token // batch, angles, HALF, ROWS)
    inside = row < GROUPS * PER_GROUP
    group, part = row // PER_GROUP, row % PER_GROUP
    is_query, is_key = inside & (part < PER_GROUP - 2), inside & (part == PER_GROUP - 2)
    low, high = _places(group * (PER_GROUP - 2) + part, column, token, GROUPS * (PER_GROUP - 2), HALF)
    a = tl.load(queries + low, mask=is_query, other=0.0).to(tl.float32)
    b = tl.load(queries + high, mask=is_query, other=0.0).to(tl.float32)
    low, high = _places(group, column, token, GROUPS, HALF)
    a += tl.load(keys + low, mask=is_key, other=0.0).to(tl.float32)
    b += tl.load(keys + high, mask=is_key, other=0.0).to(tl.float32)
    is_value = inside & (part == PER_GROUP - 1)
    a_value = tl.load(values + low, mask=is_value, other=0.0).to(tl.float32)
    b_value = tl.load(values + high, mask=is_value, other=0.0).to(tl.float32)
    low, high = _places(row, column, token, GROUPS * PER_GROUP, HALF)
    tl.store(mixed + low, tl.where(is_value, a_value, a * cos + b * sin), mask=inside)
    tl.store(mixed + high, tl.where(is_value, b_value, b * cos - a * sin), mask=inside)


@triton.jit
def _of_token(position, angles, HALF: tl.constexpr, ROWS: tl.constexpr):
    """Heads as rows, half a head's width as columns, and how far each column turns at `position`."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, HALF)[None, :]
    angle = tl.load(angles + position * 2 * HALF + column)
    return row, column, tl.cos(angle), tl.sin(angle)


@triton.jit
def _places(head, column, token, heads, HALF: tl.constexpr):
    low = (token * heads + head) * 2 * HALF + column
    return low, low + HALF


@triton.jit
def sum_of_squares(owners, firsts, sizes, tensors, sums, DTYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    owner = tl.load(owners + tl.program_id(0))
    start = (tl.program_id(0) - tl.load(firsts + owner)).to(tl.int64) * CHUNK
    size = tl.load(sizes + owner)
    numbers = tl.load(tensors + owner).to(tl.pointer_type(DTYPE))
    found = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in range(0, CHUNK, BLOCK):
        at = start + place + tl.arange(0, BLOCK)
        number = tl.load(numbers + at, mask=at < size, other=0.0).to(tl.float32)
        found += number * number
    tl.store(sums + tl.program_id(0), tl.sum(found))


@triton.jit
def adam(
    owners, firsts, sizes, grads, weights, means, squares, remainders,
    factor, lr, beta1, beta2, eps, decay, correction1, correction2,
    GRAD: tl.constexpr, MOMENT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    owner = tl.load(owners + tl.program_id(0))
    start = (tl.program_id(0) - tl.load(firsts + owner)).to(tl.int64) * CHUNK
    size = tl.load(sizes + owner)
    grad_at = tl.load(grads + owner).to(tl.pointer_type(GRAD))
    weight_at = tl.load(weights + owner).to(tl.pointer_type(tl.int16))
    mean_at = tl.load(means + owner).to(tl.pointer_type(MOMENT))
    square_at = tl.load(squares + owner).to(tl.pointer_type(MOMENT))
    remainder_at = tl.load(remainders + owner).to(tl.pointer_type(tl.int16))
    for place in range(0, CHUNK, BLOCK):
        at = start + place + tl.arange(0, BLOCK)
        inside = at < size
        grad = tl.load(grad_at + at, mask=inside, other=0.0).to(tl.float32) * factor
        mean = tl.load(mean_at + at, mask=inside, other=0.0).to(tl.float32)
        square = tl.load(square_at + at, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(weight_at + at, mask=inside, other=0).to(tl.int32)
        low = tl.load(remainder_at + at, mask=inside, other=0).to(tl.int32)
        # The weight is the master rounded: where the rest is half or more (its first bit), it was rounded up.
        high = tl.where(low < 0, high - 1, high)
        master = ((high << 16) | (low & 0xFFFF)).to(tl.float32, bitcast=True)
        mean = beta1 * mean + (1.0 - beta1) * grad
        square = beta2 * square + (1.0 - beta2) * grad * grad
        change = (mean / correction1) / (tl.sqrt(square / correction2) + eps) + decay * master
        bits = (master - lr * change).to(tl.int32, bitcast=True)
        low = (bits & 0xFFFF).to(tl.int16)
        high = (bits >> 16) + tl.where(low < 0, 1, 0)
        tl.store(mean_at + at, mean.to(MOMENT), mask=inside)
        tl.store(square_at + at, square.to(MOMENT), mask=inside)
        tl.store(weight_at + at, high.to(tl.int16), mask=inside)
        tl.store(remainder_at + at, low, mask=inside)
