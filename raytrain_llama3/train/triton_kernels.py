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
def sum_of_squares(
    owners, firsts, sizes, tensors, sums,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    owner, start, size = _of_chunk(owners, firsts, sizes, CHUNK)
    numbers = _first(tensors, owner, DTYPE, ALIGNED)
    found = tl.zeros((BLOCK,), dtype=tl.float32)
    # Without a mask, reads are as wide as they can be: sizes that are known only here would rule that out.
    if start + CHUNK <= size:
        for place in range(0, CHUNK, BLOCK):
            number = tl.load(numbers + (start + place + tl.arange(0, BLOCK))).to(tl.float32)
            found += number * number
    else:
        for place in range(0, CHUNK, BLOCK):
            at = start + place + tl.arange(0, BLOCK)
            number = tl.load(numbers + at, mask=at < size, other=0.0).to(tl.float32)
            found += number * number
    tl.store(sums + tl.program_id(0), tl.sum(found))


@triton.jit
def adam(
    owners, firsts, sizes, grads, weights, means, squares, remainders,
    factor, lr, beta1, beta2, eps, decay, correction1, correction2,
    GRAD: tl.constexpr, MOMENT: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    owner, start, size = _of_chunk(owners, firsts, sizes, CHUNK)
    grad_at = _first(grads, owner, GRAD, ALIGNED)
    weight_at = _first(weights, owner, tl.int16, ALIGNED)
    mean_at = _first(means, owner, MOMENT, ALIGNED)
    square_at = _first(squares, owner, MOMENT, ALIGNED)
    remainder_at = _first(remainders, owner, tl.int16, ALIGNED)
    if start + CHUNK <= size:
        for place in range(0, CHUNK, BLOCK):
            at = start + place + tl.arange(0, BLOCK)
            grad, mean, square = tl.load(grad_at + at), tl.load(mean_at + at), tl.load(square_at + at)
            high, low = tl.load(weight_at + at), tl.load(remainder_at + at)
            high, low, mean, square = _stepped(
                grad, high, mean, square, low, factor, lr, beta1, beta2, eps, decay, correction1, correction2
            )
            tl.store(mean_at + at, mean.to(MOMENT))
            tl.store(square_at + at, square.to(MOMENT))
            tl.store(weight_at + at, high)
            tl.store(remainder_at + at, low)
    else:
        for place in range(0, CHUNK, BLOCK):
            at = start + place + tl.arange(0, BLOCK)
            inside = at < size
            grad = tl.load(grad_at + at, mask=inside, other=0.0)
            mean, square = (
                tl.load(mean_at + at, mask=inside, other=0.0),
                tl.load(square_at + at, mask=inside, other=0.0),
            )
            high, low = tl.load(weight_at + at, mask=inside, other=0), tl.load(remainder_at + at, mask=inside, other=0)
            high, low, mean, square = _stepped(
                grad, high, mean, square, low, factor, lr, beta1, beta2, eps, decay, correction1, correction2
            )
            tl.store(mean_at + at, mean.to(MOMENT), mask=inside)
            tl.store(square_at + at, square.to(MOMENT), mask=inside)
            tl.store(weight_at + at, high, mask=inside)
            tl.store(remainder_at + at, low, mask=inside)


@triton.jit
def _of_chunk(owners, firsts, sizes, CHUNK: tl.constexpr):
    """Which tensor this program's chunk is of, where in it the chunk starts, and the tensor's size."""
    owner = tl.load(owners + tl.program_id(0))
    start = (tl.program_id(0) - tl.load(firsts + owner)).to(tl.int64) * CHUNK
    return owner, start, tl.load(sizes + owner)


@triton.jit
def _first(addresses, owner, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    first = tl.load(addresses + owner).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    return first


@triton.jit
def _stepped(grad, high, mean, square, low, factor, lr, beta1, beta2, eps, decay, correction1, correction2):
    grad, mean, square = grad.to(tl.float32) * factor, mean.to(tl.float32), square.to(tl.float32)
    high, low = high.to(tl.int32), low.to(tl.int32)
    # The weight is the master rounded: where the rest is half or more (its first bit), it was rounded up.
    high = tl.where(low < 0, high - 1, high)
    master = ((high << 16) | (low & 0xFFFF)).to(tl.float32, bitcast=True)
    mean = beta1 * mean + (1.0 - beta1) * grad
    square = beta2 * square + (1.0 - beta2) * grad * grad
    change = (mean / correction1) / (tl.sqrt(square / correction2) + eps) + decay * master
    bits = (master - lr * change).to(tl.int32, bitcast=True)
    low = (bits & 0xFFFF).to(tl.int16)
    high = (bits >> 16) + tl.where(low < 0, 1, 0)
    return high.to(tl.int16), low, mean, square
