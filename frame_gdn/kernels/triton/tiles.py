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
def load_tokens(ptr, n, live, stride_n, d, D: tl.constexpr):
    """A (tokens, channels) tile, zero beyond the frame's tokens and beyond D."""
    return tl.load(ptr + n[:, None] * stride_n + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def load_tables(cos, sin, n, live, BLOCK: tl.constexpr, BD: tl.constexpr, D: tl.constexpr):
    """The rotary tables (tokens, BD / 2) of channel block BLOCK."""
    d = BLOCK * (BD // 2) + tl.arange(0, BD // 2)
    offs = n[:, None] * (D // 2) + d[None, :]
    keep = live[:, None] & (d < D // 2)[None, :]
    return tl.load(cos + offs, mask=keep, other=0.0), tl.load(sin + offs, mask=keep, other=0.0)


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
def load_sum(S_ptr, R_ptr, offs, keep, REVERSE: tl.constexpr):
    """What a frame's queries meet: the forward state plus the reverse one."""
    x = tl.load(S_ptr + offs, mask=keep, other=0.0)
    if REVERSE:
        x += tl.load(R_ptr + offs, mask=keep, other=0.0)
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
    left_ptr, left_n, k_ptr, k_n, beta_ptr, beta_n, cos_ptr, sin_ptr, tokens, i, j, z, eps,
    D: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr,
    KEYS: tl.constexpr, TABLES: tl.constexpr, WEIGHT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Block (i, j) of the sum over a frame's tokens of left (w k)ᵀ, and block j of that of w k.

    WEIGHT says what w is: "beta"; "den" for 1 / (zᵀ k + eps), k not yet rotated; "den_given" for the same of other
    tokens, at beta_ptr; "found" for the same at beta_ptr; or "none" for 1.
    """
    EXACT: tl.constexpr = PRECISION != "tf32"
    offs_n = tl.arange(0, BN)
    offs_i = i * BD + tl.arange(0, BD)
    offs_j = j * BD + tl.arange(0, BD)
    product = tl.zeros((BD, BD), dtype=tl.float32)
    total = tl.zeros((16, BD), dtype=tl.float32)  # summed over its rows once, after the loop
    # Too narrow for an asynchronous copy, beta is read a turn ahead by hand; the compiler does that for the tiles.
    if WEIGHT == "beta" or WEIGHT == "found":
        next_beta = tl.load(beta_ptr + offs_n * beta_n, mask=offs_n < tokens, other=0.0)
    for n0 in tl.range(0, tokens, BN, num_stages=STAGES):
        n = n0 + offs_n
        live = n < tokens
        if WEIGHT == "beta" or WEIGHT == "found":
            weight = next_beta.to(tl.float32)
            next_beta = tl.load(beta_ptr + (n + BN) * beta_n, mask=n + BN < tokens, other=0.0)
        raw = load_tokens(k_ptr, n, live, k_n, offs_j, D)
        left = raw
        if not KEYS or NB > 1:
            left = load_tokens(left_ptr, n, live, left_n, offs_i, D)
        key = raw.to(tl.float32)
        if WEIGHT == "den" or WEIGHT == "den_given":
            plain = key
            if WEIGHT == "den_given":
                plain = load_tokens(beta_ptr, n, live, beta_n, offs_j, D).to(tl.float32)
            weight = tl.where(live, 1.0 / (tl.sum(plain * z[None, :], 1) + eps), 0.0)
        if TABLES:
            cos, sin = load_tables(cos_ptr, sin_ptr, n, live, j, BD, D)
            key = rotate(key, cos, sin, BN, BD)
        written = key
        if WEIGHT != "none":
            written = key * weight[:, None]
        if KEYS and NB == 1:
            if EXACT or TABLES:
                left = key.to(tl.float32 if EXACT else raw.dtype)
        else:
            if KEYS and TABLES:
                cos, sin = load_tables(cos_ptr, sin_ptr, n, live, i, BD, D)
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
    ptr, n, live, stride_n, cos_ptr, sin_ptr, X_ptr, Y_ptr, j,
    D: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr,
    TABLES: tl.constexpr, BOTH: tl.constexpr, TRANSPOSED: tl.constexpr, TWO: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Block j of a tile of tokens, rotated by TABLES, times X, or X + Y where BOTH, or the TRANSPOSED of that."""
    EXACT: tl.constexpr = PRECISION != "tf32"
    d = tl.arange(0, BD)
    out = j * BD + d
    product = tl.zeros((BN, BD), dtype=tl.float32)
    for c in range(NB):
        inner = c * BD + d
        raw = load_tokens(ptr, n, live, stride_n, inner, D)
        x = raw.to(tl.float32)
        if TABLES:
            cos, sin = load_tables(cos_ptr, sin_ptr, n, live, c, BD, D)
            x = rotate(x, cos, sin, BN, BD)
        rows, row_size = token_operand(raw, x, TABLES, EXACT)
        if TRANSPOSED:
            keep = (out < D)[:, None] & (inner < D)[None, :]
            matrix = tl.trans(load_sum(X_ptr, Y_ptr, out[:, None] * D + inner[None, :], keep, BOTH))
        else:
            keep = (inner < D)[:, None] & (out < D)[None, :]
            matrix = load_sum(X_ptr, Y_ptr, inner[:, None] * D + out[None, :], keep, BOTH)
        high, low, size = matrix_operand(matrix.to(tl.float32), raw.dtype == tl.bfloat16, EXACT)
        product += matmul(rows, high, low, TWO, PRECISION) * (row_size * size)[:, None]
    return product


@triton.jit
def denominator(
    q_ptr, n, live, q_n, z_ptr, y_ptr,
    D: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """(z + y)ᵀ q of a tile of tokens."""
    den = tl.zeros((BN,), dtype=tl.float32)
    for c in range(NB):
        d = c * BD + tl.arange(0, BD)
        z = load_sum(z_ptr, y_ptr, d, d < D, REVERSE)
        den += tl.sum(load_tokens(q_ptr, n, live, q_n, d, D).to(tl.float32) * z[None, :], 1)
    return den
