"""Device functions that several kernels share: loading tiles, rotary embedding, operands of products, products."""

import triton
import triton.language as tl

from .launch import INTERPRETED


@triton.jit
def empty_tuple():
    """The empty tuple, of a type that grows."""
    return ()


@triton.jit
def dot16(a, b, acc):
    """a b + acc of 16-bit operands; widened in the interpreter, which takes bfloat16's bits for integers."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def split_index(index, H, T):
    """Batch, frame and head of an index that counts heads first, then frames; in 64 bits, as offsets need them."""
    h = (index % H).to(tl.int64)
    t = (index // H % T).to(tl.int64)
    b = (index // H // T).to(tl.int64)
    return b, t, h


@triton.jit
def frame_sizes(shape, INT64: tl.constexpr):
    """Heads, frames and tokens of a frame. The tokens' number has the type that indices of tokens take from it, int64
    where a frame has offsets beyond 32 bits, as `launch.needs_int64` found."""
    H, T, S = shape
    return H, T, tl.cast(S, tl.int64 if INT64 else tl.int32)


@triton.jit
def token_indices(S, BN: tl.constexpr):
    """0 ... BN - 1 in the type of S, the number of a frame's tokens."""
    return tl.arange(0, BN).to(S.dtype)


@triton.jit
def locate(tensor, b, n, h):
    """The address of batch b, token or frame n and head h: `tensor` is (pointer, the strides of the three).

    In 64 bits, always: a stride may be any number. It is one address a program; the many offsets from there on, of a
    frame's tokens, have the type of `frame_sizes`.
    """
    return tensor[0] + b.to(tl.int64) * tensor[1] + n.to(tl.int64) * tensor[2] + h.to(tl.int64) * tensor[3]


@triton.jit
def is_active(mask_ptr, frame, HAS_MASK: tl.constexpr):
    """Whether a frame, counted over the batch, is not padding."""
    if HAS_MASK:
        return tl.load(mask_ptr + frame) != 0
    else:
        return True


@triton.jit
def frame_tokens(tensor, b, token, h):
    """A frame's tokens, from its first one on: their address and the stride of tokens."""
    return locate(tensor, b, token, h), tensor[2]


@triton.jit
def scalar_addresses(frame, n):
    """The addresses of one number of each of a frame's tokens n."""
    return frame[0] + n * frame[1]


@triton.jit
def token_addresses(frame, n, d):
    """The addresses of channels d of a frame's tokens n."""
    return scalar_addresses(frame, n)[:, None] + d[None, :]


@triton.jit
def load_scalars(frame, n, live):
    """One number of each token, zero beyond the frame's tokens."""
    return tl.load(scalar_addresses(frame, n), mask=live, other=0.0)


@triton.jit
def load_tokens(frame, n, live, d, D: tl.constexpr):
    """A (tokens, channels) tile, zero beyond the frame's tokens and beyond D."""
    return tl.load(token_addresses(frame, n, d), mask=live[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store(addresses, x, keep):
    """x in the dtype of what it is stored to."""
    tl.store(addresses, x.to(addresses.dtype.element_ty), mask=keep)


@triton.jit
def frame_tables(tables, token, D: tl.constexpr):
    """The rotary tables (cosines, sines), each (N, D / 2), from a frame's first token on."""
    return tables[0] + token * (D // 2), tables[1] + token * (D // 2)


@triton.jit
def load_tables(tables, n, live, BLOCK: tl.constexpr, BD: tl.constexpr, D: tl.constexpr):
    """Cosines and sines (tokens, BD / 2) of channel block BLOCK."""
    d = BLOCK * (BD // 2) + tl.arange(0, BD // 2)
    offsets = n[:, None] * (D // 2) + d[None, :]
    keep = live[:, None] & (d < D // 2)[None, :]
    return tl.load(tables[0] + offsets, mask=keep, other=0.0), tl.load(tables[1] + offsets, mask=keep, other=0.0)


@triton.jit
def rotate(x, cos, sin, BN: tl.constexpr, BD: tl.constexpr):
    """Interleaved pairs (2i, 2i + 1) as complex numbers times cos + i sin, in float32."""
    even, odd = tl.split(tl.reshape(x, (BN, BD // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BN, BD))


@triton.jit
def power_of_two(size):
    """2^e <= size < 2^(e+1) and 2^-e, kept away from both ends of float32's range."""
    bits = size.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 1 << 23), 253 << 23)
    return bits.to(tl.float32, bitcast=True), ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def scaled_rows(x, EXACT: tl.constexpr):
    """x as a product's operand and the factor of each row: float16 of x / 2^e, or x itself."""
    if EXACT:
        return x, tl.full((x.shape[0],), 1.0, tl.float32)
    else:
        scale, inverse = power_of_two(tl.max(tl.abs(x), 1))
        return (x * inverse[:, None]).to(tl.float16), scale


@triton.jit
def scaled(x, EXACT: tl.constexpr):
    """x as a product's operand and the factor of the whole tile: float16 of x / 2^e, or x itself."""
    if EXACT:
        return x, 1.0
    else:
        scale, inverse = power_of_two(tl.max(tl.max(tl.abs(x), 1), 0))
        return (x * inverse).to(tl.float16), scale


@triton.jit
def load_sum(states, offsets, keep, REVERSE: tl.constexpr):
    """The sum of two states, the forward one and where REVERSE the reverse one: a frame's queries multiply it once."""
    x = tl.load(states[0] + offsets, mask=keep, other=0.0)
    if REVERSE:
        x += tl.load(states[1] + offsets, mask=keep, other=0.0)
    return x


@triton.jit
def matrix_operand(x, BF16: tl.constexpr, EXACT: tl.constexpr):
    """A float32 matrix as the right operand of products with tokens, in two parts, and its factor.

    bfloat16 needs no factor and leaves a rest that a second product adds; float16 is scaled by a power of two.
    """
    if EXACT:
        return x, x, 1.0
    elif BF16:
        high = x.to(tl.bfloat16)
        return high, (x - high.to(tl.float32)).to(tl.bfloat16), 1.0
    else:
        narrow, size = scaled(x, False)
        return narrow, narrow, size


@triton.jit
def token_operand(raw, x, CHANGED: tl.constexpr, EXACT: tl.constexpr):
    """Tokens as the left operand and the factor of each row: as loaded where nothing CHANGED them."""
    if EXACT:
        return x, tl.full((x.shape[0],), 1.0, tl.float32)
    elif not CHANGED:
        return raw, tl.full((x.shape[0],), 1.0, tl.float32)
    elif raw.dtype == tl.bfloat16:
        return x.to(tl.bfloat16), tl.full((x.shape[0],), 1.0, tl.float32)
    else:
        return scaled_rows(x, False)


@triton.jit
def matmul(tokens, high, low, TWO: tl.constexpr, PRECISION: tl.constexpr):
    """tokens @ (high + low), low only where TWO."""
    if PRECISION != "tf32":
        return tl.dot(tokens, high, input_precision=PRECISION)
    else:
        acc = tl.zeros((tokens.shape[0], high.shape[1]), dtype=tl.float32)
        acc = dot16(tokens, high, acc)
        if TWO:
            acc = dot16(tokens, low, acc)
        return acc


@triton.jit
def outer_products(
    left_tokens, k, weights, tables, tokens, i, j, z, eps,
    D: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr,
    KEYS: tl.constexpr, TABLES: tl.constexpr, WEIGHT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Block (i, j) of the sum over a frame's tokens of left (w k)ᵀ, and block j of that of w k.

    left_tokens, k and weights are a frame's (address, stride of tokens), `tokens` their number.
    WEIGHT says what w is: "beta", `weights`; "den" for 1 / (zᵀ k + eps), k not yet rotated; "den_given" for the same
    of the tokens that `weights` are; "stored" for the same as `weights`; or "none" for 1.
    """
    EXACT: tl.constexpr = PRECISION != "tf32"
    offs_n = token_indices(tokens, BN)
    offs_i = i * BD + tl.arange(0, BD)
    offs_j = j * BD + tl.arange(0, BD)
    product = tl.zeros((BD, BD), dtype=tl.float32)
    total = tl.zeros((16, BD), dtype=tl.float32)  # summed over its rows once, after the loop
    # Too narrow for an asynchronous copy, weights are read an iteration ahead by hand; the compiler does so for tiles.
    if WEIGHT == "beta" or WEIGHT == "stored":
        next_weight = load_scalars(weights, offs_n, offs_n < tokens)
    for n0 in tl.range(0, tokens, BN, num_stages=STAGES):
        n = n0 + offs_n
        live = n < tokens
        if WEIGHT == "beta" or WEIGHT == "stored":
            weight = next_weight.to(tl.float32)
            next_weight = load_scalars(weights, n + BN, n + BN < tokens)
        raw = load_tokens(k, n, live, offs_j, D)
        left = raw
        if not KEYS or NB > 1:
            left = load_tokens(left_tokens, n, live, offs_i, D)
        key = raw.to(tl.float32)
        if WEIGHT == "den" or WEIGHT == "den_given":
            plain = key
            if WEIGHT == "den_given":
                plain = load_tokens(weights, n, live, offs_j, D).to(tl.float32)
            weight = tl.where(live, 1.0 / (tl.sum(plain * z[None, :], 1) + eps), 0.0)
        if TABLES:
            cos, sin = load_tables(tables, n, live, j, BD, D)
            key = rotate(key, cos, sin, BN, BD)
        written = key
        if WEIGHT != "none":
            written = key * weight[:, None]
        if KEYS and NB == 1:
            if EXACT or TABLES:
                left = key.to(tl.float32 if EXACT else raw.dtype)
        else:
            if KEYS and TABLES:
                cos, sin = load_tables(tables, n, live, i, BD, D)
                left = rotate(left.to(tl.float32), cos, sin, BN, BD).to(tl.float32 if EXACT else raw.dtype)
            if EXACT:
                left = left.to(tl.float32)
        if KEYS and not TABLES:
            total += tl.sum(tl.reshape(written, (BN // 16, 16, BD)), 0)
        if EXACT:
            product = tl.dot(tl.trans(left), written, product, input_precision=PRECISION)
        else:
            rounded = written.to(raw.dtype)
            product = dot16(tl.trans(left), rounded, product)
            if WEIGHT != "beta":  # what enters the adjoint of the whole scan keeps its last bits
                product = dot16(tl.trans(left), (written - rounded.to(tl.float32)).to(raw.dtype), product)
    return product, tl.sum(total, 0)


@triton.jit
def tokens_times_matrix(
    frame, n, live, tables, matrices, j,
    D: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr,
    TABLES: tl.constexpr, BOTH: tl.constexpr, TRANSPOSED: tl.constexpr, TWO: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Block j of a tile of a frame's tokens, rotated by TABLES, times the first of two (D, D) matrices, or their sum
    where BOTH, or the TRANSPOSED of that."""
    EXACT: tl.constexpr = PRECISION != "tf32"
    d = tl.arange(0, BD)
    out = j * BD + d
    product = tl.zeros((BN, BD), dtype=tl.float32)
    for c in range(NB):
        inner = c * BD + d
        raw = load_tokens(frame, n, live, inner, D)
        x = raw.to(tl.float32)
        if TABLES:
            cos, sin = load_tables(tables, n, live, c, BD, D)
            x = rotate(x, cos, sin, BN, BD)
        rows, row_size = token_operand(raw, x, TABLES, EXACT)
        if TRANSPOSED:
            keep = (out < D)[:, None] & (inner < D)[None, :]
            matrix = tl.trans(load_sum(matrices, out[:, None] * D + inner[None, :], keep, BOTH))
        else:
            keep = (inner < D)[:, None] & (out < D)[None, :]
            matrix = load_sum(matrices, inner[:, None] * D + out[None, :], keep, BOTH)
        high, low, size = matrix_operand(matrix.to(tl.float32), raw.dtype == tl.bfloat16, EXACT)
        product += matmul(rows, high, low, TWO, PRECISION) * (row_size * size)[:, None]
    return product


@triton.jit
def denominator(
    q, n, live, states, row,
    D: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """(z + y)ᵀ q of a tile of tokens, z and y at offset `row` of the two states."""
    den = tl.zeros((BN,), dtype=tl.float32)
    for c in range(NB):
        d = c * BD + tl.arange(0, BD)
        z = load_sum(states, row + d, d < D, REVERSE)
        den += tl.sum(load_tokens(q, n, live, d, D).to(tl.float32) * z[None, :], 1)
    return den
