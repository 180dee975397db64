# type: ignore - what Triton compiles has types of Triton's own
"""Triton kernels on matrices as stored (quantized or plain), launched by `linear/device_codes.py`.

| kernel | computes |
|---|---|
| `decode` | the dequantized matrices of all experts |
| `add_escapes` | the escapes (numbers stored apart) of WINDOW4, after `decode` |
| `multiply` | x @ w.T, decoding w inside the product |
| `multiply_groups` | the same for rows of x sorted by expert, each with the matrix of its expert |

No launch synchronizes with the device. Where only the device knows how many rows of x an expert has, the grid covers
the worst case, and programs without work exit early.

Products are summed in float32, of weights decoded and rounded to x's dtype. `decode_tile` runs the same operations as
`Rows.dequantize`, so numbers are equal bit by bit. Launch with `enable_fp_fusion=False`, because fused multiply-adds
round differently. FP8 and FP4 are converted exactly through float16 and a power of two, without FP8 instructions.

Source: Triton (Tillet et al. 2019); FP4 and exponents: OCP Microscaling Formats 1.0; FP8: arXiv 2209.05433.

E experts of N rows and K columns. Tiles: BM rows of x, BN rows of the matrix, BK columns in GT groups. A group of
columns shares a factor and a zero point.

Common arguments: `matrix`, a `Matrix`; `kind`, its `MatrixKind`; `expert`, index of a matrix; `row` and `column`, the
first ones of a tile; `rows` (BN,), the stored rows of a tile; `has_row` (BN,), False for rows to mask; `groups`,
groups of a tile's columns, with `has` as their mask.
"""

import triton
import triton.language as tl

from . import arguments as constants

WINDOW4, INT4 = tl.constexpr(constants.WINDOW4), tl.constexpr(constants.INT4)
INT8, BYTES, SIGNED_BYTES = map(tl.constexpr, (constants.INT8, constants.BYTES, constants.SIGNED_BYTES))
FLOAT8, SCALED_FLOAT8 = tl.constexpr(constants.FLOAT8), tl.constexpr(constants.SCALED_FLOAT8)
FLOAT8_E5M2, PLAIN = tl.constexpr(constants.FLOAT8_E5M2), tl.constexpr(constants.PLAIN)
NIBBLES, FLOAT4, TABLE_NIBBLES = map(tl.constexpr, (constants.NIBBLES, constants.FLOAT4, constants.TABLE_NIBBLES))
WORDS4, WORDS8, ROW_WORDS = map(tl.constexpr, (constants.WORDS4, constants.WORDS8, constants.ROW_WORDS))
HALF_RUN = tl.constexpr(constants.CODE_RUN // 2)
GROUP_NUMBERS, GROUP_BYTES = tl.constexpr(constants.GROUP_NUMBERS), tl.constexpr(constants.GROUP_BYTES)
EXPONENTS, SMALL_FLOATS = tl.constexpr(constants.EXPONENTS), tl.constexpr(constants.SMALL_FLOATS)
NO_ZEROS, CONSTANT_ZERO = tl.constexpr(constants.NO_ZEROS), tl.constexpr(constants.CONSTANT_ZERO)
PLAIN_ZEROS, FIELDS8 = tl.constexpr(constants.PLAIN_ZEROS), tl.constexpr(constants.FIELDS8)
AWQ_FIELDS = tl.constexpr(constants.AWQ_FIELDS)
NO_OVERALL, DIVIDED = tl.constexpr(constants.NO_OVERALL), tl.constexpr(constants.DIVIDED)
Q8_0, Q4_0 = tl.constexpr(constants.Q8_0), tl.constexpr(constants.Q4_0)
Q4_K, Q5_K, Q6_K = tl.constexpr(constants.Q4_K), tl.constexpr(constants.Q5_K), tl.constexpr(constants.Q6_K)

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # True with TRITON_INTERPRET=1: runs on a CPU, for tests


@triton.jit
def round_to(numbers, dtype: tl.constexpr):
    """Rounds float32 to a dtype, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:  # Triton's interpreter would truncate
        bits = numbers.to(tl.uint32, bitcast=True)
        upper = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        result = tl.where(numbers == numbers, upper, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = numbers.to(dtype)
    return result


@triton.jit
def float_of_e4m3(bits):
    """Converts E4M3 bits (uint8) to float32."""
    # As float16 with the same exponent and mantissa bits, a number is 2^8 times too small (bias 15 instead of 7).
    wide = bits.to(tl.uint16)
    half = ((wide & 0x80) << 8 | (wide & 0x7F) << 7).to(tl.float16, bitcast=True)
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def float_of_e5m2(bits):
    """Converts E5M2 bits (uint8), the upper half of a float16, to float32."""
    return (bits.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def float_of_e2m1(codes):
    """Converts E2M1 bits (uint8, the sign in bit 3) to float32."""
    # As float16 with the same exponent and mantissa bits, a number is 2^14 times too small (bias 15 instead of 1).
    wide = codes.to(tl.uint16)
    half = ((wide & 8) << 12 | (wide & 7) << 9).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 16384.0


@triton.jit
def float_of_e8m0(bits):
    """Converts E8M0 exponents (uint8) to powers of two in float32. 0 is 2^-127, a subnormal float32; 255 is NaN."""
    wide = bits.to(tl.uint32)
    result = tl.where(wide == 0, 0x00400000, wide << 23)
    return tl.where(wide == 255, 0x7FC00000, result).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def repeat_factors(factors_BG, BN: tl.constexpr, BK: tl.constexpr, GT: tl.constexpr):
    """Repeats the factors of groups (BN, GT) over their columns: (BN, BK). Returns factors of shape (BN, 1) or (BN, BK)
    unchanged."""
    result = factors_BG
    if GT > 1 and GT < BK:
        result = tl.reshape(tl.broadcast_to(factors_BG[:, :, None], [BN, GT, BK // GT]), [BN, BK])
    return result


@triton.jit
def _row_bytes(body, body_row, rows, has_row, begin, end, NUM: tl.constexpr):
    """Loads bytes `begin` to `begin` + NUM of each row, masked from byte `end` on: uint8 (BN, NUM)."""
    indices = begin + tl.arange(0, NUM)
    has = has_row[:, None] & (indices < end)[None, :]
    return tl.load(body + rows[:, None] * body_row + indices[None, :], mask=has, other=0)


@triton.jit
def _codes(matrix, expert, row, rows, has_row, column, kind: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Loads a tile of codes as numbers, without zero points and factors: float32 (BN, BK)."""
    end, body = matrix.num_columns, matrix.body + expert * matrix.body_expert
    if kind.encoding == INT8 or kind.encoding == SIGNED_BYTES:
        codes_u8 = _row_bytes(body, matrix.body_row, rows, has_row, column, end, BK)
        numbers = codes_u8.to(tl.int8, bitcast=True).to(tl.float32)
    elif kind.encoding == BYTES:
        numbers = _row_bytes(body, matrix.body_row, rows, has_row, column, end, BK).to(tl.float32)
    elif kind.encoding == FLOAT8 or kind.encoding == SCALED_FLOAT8:
        numbers = float_of_e4m3(_row_bytes(body, matrix.body_row, rows, has_row, column, end, BK))
    elif kind.encoding == FLOAT8_E5M2:
        numbers = float_of_e5m2(_row_bytes(body, matrix.body_row, rows, has_row, column, end, BK))
    elif kind.encoding == INT4:  # in runs of 2 * HALF_RUN codes: low nibbles have the first half
        pairs = _row_bytes(body, matrix.body_row, rows, has_row, column // 2, end // 2, BK // 2)
        halves = tl.reshape(tl.join(pairs & 15, pairs >> 4), [BN, BK // 2 // HALF_RUN, HALF_RUN, 2])
        numbers = tl.reshape(tl.permute(halves, (0, 1, 3, 2)), [BN, BK]).to(tl.float32)
    elif kind.encoding == NIBBLES:
        pairs = _row_bytes(body, matrix.body_row, rows, has_row, column // 2, (end + 1) // 2, BK // 2)
        numbers = tl.interleave(pairs & 15, pairs >> 4).to(tl.float32)
    elif kind.encoding == FLOAT4:
        pairs = _row_bytes(body, matrix.body_row, rows, has_row, column // 2, end // 2, BK // 2)
        numbers = tl.interleave(float_of_e2m1(pairs & 15), float_of_e2m1(pairs >> 4))
    elif kind.encoding == TABLE_NIBBLES:
        pairs = _row_bytes(body, matrix.body_row, rows, has_row, column // 2, end // 2, BK // 2)
        codes = tl.interleave(pairs >> 4, pairs & 15).to(tl.int32)
        numbers = tl.load(matrix.extra + expert * matrix.extra_expert + codes).to(tl.float32)
    elif kind.encoding == WORDS4 or kind.encoding == WORDS8:
        # Words of neighboring columns: loads (BK / IN_WORD, BN), so that adjacent addresses are adjacent in the tile.
        NUM_BITS: tl.constexpr = 4 if kind.encoding == WORDS4 else 8
        IN_WORD: tl.constexpr = 32 // NUM_BITS
        indices = column // IN_WORD + tl.arange(0, BK // IN_WORD)
        has = (indices < end // IN_WORD)[:, None] & has_row[None, :]
        pointers = body + indices[:, None] * matrix.body_column + rows[None, :] * matrix.body_row
        words = tl.load(pointers, mask=has, other=0)
        fields = (words[:, None, :] >> (tl.arange(0, IN_WORD) * NUM_BITS)[None, :, None]) & ((1 << NUM_BITS) - 1)
        numbers = tl.trans(tl.reshape(fields, [BK, BN])).to(tl.float32)
    elif kind.encoding == ROW_WORDS:
        # Words of eight neighboring rows: loads (BK, BN / 8) words, and takes eight fields of each.
        columns, field = column + tl.arange(0, BK), tl.arange(0, 8)
        indices = (row + matrix.first_row % 8) // 8 + tl.arange(0, BN // 8)
        has_word = tl.max(tl.reshape(has_row.to(tl.int32), [BN // 8, 8]), axis=1) > 0
        has = (columns < end)[:, None] & has_word[None, :]
        pointers = body + columns[:, None] * matrix.body_column + indices[None, :] * matrix.body_row
        words = tl.load(pointers, mask=has, other=0)
        fields = (words[:, :, None] >> (_awq_nibble(field) * 4)[None, None, :]) & 15
        numbers = tl.trans(tl.reshape(fields, [BK, BN])).to(tl.float32)
    else:
        tl.static_assert(kind.encoding == WINDOW4, "unsupported encoding")
        numbers = _window4(matrix, expert, rows, has_row, column, BN, BK)
    return numbers


@triton.jit
def _awq_nibble(row):
    """Returns which nibble of an AWQ word holds row 0 to 7: even rows are in nibbles 0 to 3, odd ones in 4 to 7."""
    return row >> 1 | (row & 1) << 2


@triton.jit
def _window4(matrix, expert, rows, has_row, column, BN: tl.constexpr, BK: tl.constexpr):
    """Decodes WINDOW4, lossless 12-bit bfloat16, to float32 (BN, BK), escapes with exponent 0. Layout: see
    `formats/kinds/window4.py`."""
    NUM: tl.constexpr = BK // GROUP_NUMBERS
    groups = column // GROUP_NUMBERS + tl.arange(0, NUM)
    has = (has_row[:, None] & (groups < matrix.num_columns // GROUP_NUMBERS)[None, :])[:, :, None]
    body = matrix.body + expert * matrix.body_expert
    pointers = (body + rows[:, None] * matrix.body_row + groups[None, :] * GROUP_BYTES)[:, :, None]
    signs = tl.load(pointers + tl.arange(0, GROUP_NUMBERS)[None, None, :], mask=has, other=0).to(tl.uint32)
    halves = tl.arange(0, GROUP_NUMBERS // 2)[None, None, :]
    pairs = tl.load(pointers + GROUP_NUMBERS + halves, mask=has, other=0)
    codes = tl.permute(tl.join(pairs & 15, pairs >> 4), (0, 1, 3, 2))
    codes = tl.reshape(codes, [BN, NUM, GROUP_NUMBERS]).to(tl.uint32)
    base = tl.load(matrix.extra + expert * matrix.extra_expert).to(tl.uint32)
    exponents = tl.where(codes == 0, 0, codes + base) & 255
    bits = (signs & 0x80) << 24 | exponents << 23 | (signs & 0x7F) << 16
    ordered = tl.permute(tl.reshape(bits, [BN, NUM, 4, 2, 4, 2]), (0, 1, 3, 5, 2, 4))
    return tl.reshape(ordered, [BN, BK]).to(tl.float32, bitcast=True)


@triton.jit
def _zero_points(matrix, expert, rows, groups, has, kind: tl.constexpr):
    """Loads zero points of groups: float32 (BN, GT)."""
    zeros = matrix.zeros + expert * matrix.zeros_expert + groups[None, :] * matrix.zeros_group
    if kind.zeros == PLAIN_ZEROS:
        pointers = zeros + rows[:, None] * matrix.zeros_row
        result = tl.load(pointers, mask=has, other=0).to(tl.float32) + kind.zero_offset
    else:
        NUM_BITS: tl.constexpr = 8 if kind.zeros == FIELDS8 else 4
        IN_WORD: tl.constexpr = 32 // NUM_BITS
        stored_rows = matrix.first_row + rows
        row = (stored_rows % IN_WORD).to(tl.int32)
        index = _awq_nibble(row) if kind.zeros == AWQ_FIELDS else row
        pointers = zeros + (stored_rows // IN_WORD)[:, None] * matrix.zeros_row
        fields = tl.load(pointers, mask=has, other=0) >> (index * NUM_BITS)[:, None]
        result = ((fields + kind.zero_offset) & ((1 << NUM_BITS) - 1)).to(tl.float32)
    return result


@triton.jit
def _factors(matrix, expert, rows, has_row, groups, has, kind: tl.constexpr):
    """Loads factors of groups, multiplied or divided by the row's overall factor: float32 (BN, GT)."""
    pointers = matrix.scales + expert * matrix.scales_expert + groups[None, :] * matrix.scales_group
    pointers = pointers + (rows // matrix.scale_rows)[:, None] * matrix.scales_row
    scales = tl.load(pointers, mask=has, other=0)
    if kind.scales == EXPONENTS:
        factors = float_of_e8m0(scales)
    elif kind.scales == SMALL_FLOATS:
        factors = float_of_e4m3(scales)
    else:
        factors = scales.to(tl.float32)
    if kind.overall != NO_OVERALL:
        pointers = matrix.overall + expert * matrix.overall_expert
        overall = tl.load(pointers + rows * matrix.overall_row, mask=has_row, other=1.0)[:, None]
        if kind.overall == DIVIDED:
            factors = tl.div_rn(factors, tl.broadcast_to(overall, factors.shape))
        else:
            factors = factors * overall
    return factors


@triton.jit
def _load_float16(pointers, has):
    """Loads float16 numbers as float32, byte by byte: they may be unaligned."""
    low = tl.load(pointers, mask=has, other=0).to(tl.uint16)
    high = tl.load(pointers + 1, mask=has, other=0).to(tl.uint16)
    return (low | high << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _block32(body_rows, has_row, column, num_columns, ENCODING: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Decodes GGUF's blocks of 32 numbers to float32 (BN, BK). A block is a float16 scale, then a byte per number
    (Q8_0) or nibbles in INT4's order (Q4_0). `body_rows` (BN,): pointers to the rows."""
    NUM: tl.constexpr = BK // 32
    WIDTH: tl.constexpr = 32 if ENCODING == Q8_0 else 16  # bytes of codes in a block
    blocks = column // 32 + tl.arange(0, NUM)
    has = has_row[:, None] & (blocks < num_columns // 32)[None, :]
    pointers = body_rows[:, None] + blocks[None, :] * (2 + WIDTH)
    scales = _load_float16(pointers, has)
    codes = tl.load(pointers[:, :, None] + (2 + tl.arange(0, WIDTH))[None, None, :], mask=has[:, :, None], other=0)
    if ENCODING == Q8_0:
        numbers = codes.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        halves = tl.permute(tl.join(codes & 15, codes >> 4), (0, 1, 3, 2))
        numbers = tl.reshape(halves, [BN, NUM, 32]).to(tl.float32) - 8
    return tl.reshape(numbers * scales[:, :, None], [BN, BK])


@triton.jit
def _bytes_at(body_rows, has, begin, NUM: tl.constexpr):
    """Loads NUM bytes from byte `begin` on after each pointer in `body_rows`: uint8 (BN, NUM)."""
    return tl.load(body_rows[:, None] + (begin + tl.arange(0, NUM))[None, :], mask=has[:, None], other=0)


@triton.jit
def _block256(body_rows, has_row, column, num_columns, ENCODING: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Decodes half of a GGUF block of 256 numbers to float32 (BN, BK = 128). Layout: see `formats/kinds/gguf.py`."""
    tl.static_assert(BK == 128, "a tile is half a block")
    half, has = column // 128 % 2, has_row & (column < num_columns)  # half: 0 or 1
    if ENCODING == Q6_K:  # 6-bit codes: 128 bytes of low 4 bits, 64 bytes of high 2 bits, 16 scales, a factor of these
        block = body_rows + column // 256 * 210
        low = _bytes_at(block, has, half * 64, 64)
        codes = tl.reshape(tl.permute(tl.join(low & 15, low >> 4), (0, 2, 1)), [BN, BK])
        high = _bytes_at(block, has, 128 + half * 32, 32)[:, None, :] >> (tl.arange(0, 4) * 2)[None, :, None]
        codes = codes | tl.reshape(high & 3, [BN, BK]) << 4
        scales = _bytes_at(block, has, 192 + half * 8, 8).to(tl.int8, bitcast=True).to(tl.float32)
        factors = _load_float16(block + 208, has)[:, None] * scales
        numbers = (codes.to(tl.float32) - 32) * repeat_factors(factors, BN, BK, 8)
    else:
        # Factor of scales, factor of minima, 12 bytes of 6-bit scales and minima, the fifth bits for Q5_K, nibbles. A
        # number is code * scale - minimum; 32 numbers share these two.
        HEAD: tl.constexpr = 16 if ENCODING == Q4_K else 48
        block = body_rows + column // 256 * (HEAD + 128)
        pairs = tl.reshape(_bytes_at(block, has, HEAD + half * 64, 64), [BN, 2, 32])
        codes = tl.reshape(tl.permute(tl.join(pairs & 15, pairs >> 4), (0, 1, 3, 2)), [BN, BK])
        if ENCODING == Q5_K:
            shifts = half * 4 + tl.arange(0, 4)
            fifths = _bytes_at(block, has, 16, 32)[:, None, :].to(tl.int32) >> shifts[None, :, None]
            codes = codes | (tl.reshape(fifths & 1, [BN, BK]) << 4).to(tl.uint8)
        # The last four scales and minima have their low 4 bits in `rest`, their high 2 bits on top of the first four.
        low, high, rest = _bytes_at(block, has, 4, 4), _bytes_at(block, has, 8, 4), _bytes_at(block, has, 12, 4)
        scales = tl.where(half == 0, low & 63, rest & 15 | low >> 6 << 4).to(tl.float32)
        minima = tl.where(half == 0, high & 63, rest >> 4 | high >> 6 << 4).to(tl.float32)
        factors = _load_float16(block, has)[:, None] * scales
        offsets = -_load_float16(block + 2, has)[:, None] * minima
        numbers = codes.to(tl.float32) * repeat_factors(factors, BN, BK, 4) + repeat_factors(offsets, BN, BK, 4)
    return numbers


@triton.jit
def decode_tile(matrix, expert, row, has_row, column, kind: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Decodes a tile of an expert's matrix: float32 (BN, BK), or the stored dtype for PLAIN. `column` is a multiple of
    BK; for ROW_WORDS, `row` + `matrix.first_row` is a multiple of 8. Masked numbers are finite but arbitrary."""
    # `expert` and `row` are int64: a stack may exceed 2^31 numbers.
    columns = column + tl.arange(0, BK)
    if kind.encoding == PLAIN:
        has = has_row[:, None] & (columns < matrix.num_columns)[None, :]
        rows = row + tl.arange(0, BN)
        pointers = matrix.body + expert * matrix.body_expert + rows[:, None] * matrix.body_row
        numbers = tl.load(pointers + columns[None, :] * matrix.body_column, mask=has, other=0.0)
    else:
        row += expert * matrix.row_step
        rows = row + tl.arange(0, BN)
        if kind.is_reordered:
            rows = tl.load(matrix.extra + expert * matrix.extra_expert + rows, mask=has_row, other=0)
        if kind.encoding >= Q8_0:
            body = matrix.body + expert * matrix.body_expert + rows * matrix.body_row
            if kind.encoding == Q8_0 or kind.encoding == Q4_0:
                numbers = _block32(body, has_row, column, matrix.num_columns, kind.encoding, BN, BK)
            else:
                numbers = _block256(body, has_row, column, matrix.num_columns, kind.encoding, BN, BK)
        else:
            numbers = _codes(matrix, expert, row, rows, has_row, column, kind, BN, BK)
        if kind.encoding != WINDOW4 and kind.encoding < Q8_0:
            GT: tl.constexpr = kind.group_tile
            # Groups of the tile's columns: one per column, or GT of them.
            if kind.has_groups:
                pointers = matrix.groups + expert * matrix.groups_expert + columns
                groups = tl.load(pointers, mask=columns < matrix.num_columns, other=0)
            elif kind.width == 0:
                groups = tl.zeros([1], tl.int32)
            elif GT == BK:
                groups = columns // kind.width
            else:
                groups = column // kind.width + tl.arange(0, GT)
            has = has_row[:, None] & (groups < matrix.num_groups)[None, :]
            if kind.zeros == CONSTANT_ZERO:
                numbers = numbers - kind.zero_offset
            elif kind.zeros != NO_ZEROS:
                numbers = numbers - repeat_factors(_zero_points(matrix, expert, rows, groups, has, kind), BN, BK, GT)
            numbers = numbers * repeat_factors(_factors(matrix, expert, rows, has_row, groups, has, kind), BN, BK, GT)
            if kind.has_last_factor:
                numbers = numbers * matrix.last_factor
    return numbers


@triton.jit
def decode(matrix, out, num_rows, out_expert, out_row, lead, kind: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Dequantizes the matrices of all experts to `out`, rounded once to its dtype. Grid: tiles of rows of all experts,
    tiles of columns. `lead`: number of rows in an expert's first tile that precede its first row."""
    num_tiles = tl.cdiv(num_rows + lead, BN)
    expert = (tl.program_id(0) // num_tiles).to(tl.int64)
    row = (tl.program_id(0) % num_tiles).to(tl.int64) * BN - lead
    column = tl.program_id(1) * BK
    rows, columns = row + tl.arange(0, BN), column + tl.arange(0, BK)
    has_row = (rows >= 0) & (rows < num_rows)
    numbers = decode_tile(matrix, expert, row, has_row, column, kind, BN, BK)
    pointers = out + expert * out_expert + rows[:, None] * out_row + columns[None, :]
    has = has_row[:, None] & (columns < matrix.num_columns)[None, :]
    tl.store(pointers, round_to(numbers, out.dtype.element_ty), mask=has)


@triton.jit
def add_escapes(
    matrix, starts, columns, exponents, begins, out, num_rows, num_escapes,
    starts_expert, columns_expert, exponents_expert, out_expert, out_row, BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrites decoded numbers that are escapes, with their sign and mantissa from `matrix.body`. A row has escapes
    [starts[row], starts[row + 1]) of `columns` and `exponents`, plus `begins[expert]` if the escapes of all experts
    are concatenated. Grid: rows of all experts."""
    expert = (tl.program_id(0) // num_rows).to(tl.int64)
    row = (tl.program_id(0) % num_rows).to(tl.int64)
    stored_row = row + expert * matrix.row_step
    pointers = starts + expert * starts_expert + stored_row
    begin, end = tl.load(pointers), tl.load(pointers + 1)
    if begins is not None:
        before = tl.load(begins + expert)
        begin, end = begin + before, end + before
    begin, end = tl.maximum(begin, 0), tl.minimum(end, num_escapes)  # files may be damaged: stay in bounds
    body = matrix.body + expert * matrix.body_expert + stored_row * matrix.body_row
    for first in range(begin, end, BLOCK):
        indices = first + tl.arange(0, BLOCK)
        column = tl.load(columns + expert * columns_expert + indices, mask=indices < end, other=0).to(tl.int32) & 0xFFFF
        exponent = tl.load(exponents + expert * exponents_expert + indices, mask=indices < end, other=0).to(tl.uint32)
        has, index = (indices < end) & (column < matrix.num_columns), column % GROUP_NUMBERS
        # The byte of the group with the number's sign and mantissa: the inverse of the order in `_window4`.
        byte = (index >> 2 & 3) * 16 + (index >> 5) * 8 + (index & 3) * 2 + (index >> 4 & 1)
        signs = tl.load(body + column // GROUP_NUMBERS * GROUP_BYTES + byte, mask=has, other=0).to(tl.uint32)
        bits = (signs & 0x80) << 24 | exponent << 23 | (signs & 0x7F) << 16
        numbers = round_to(bits.to(tl.float32, bitcast=True), out.dtype.element_ty)
        tl.store(out + expert * out_expert + row * out_row + column, numbers, mask=has)


@triton.jit
def _product(
    x_rows, has_x, matrix, expert, row, has_row, kind: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Multiplies the rows of x at pointers `x_rows` (BM,), masked by `has_x`, by a tile of an expert's rows: float32
    (BM, BN)."""
    sums = tl.zeros([BM, BN], tl.float32)
    for column in range(0, matrix.num_columns, BK):
        columns = column + tl.arange(0, BK)
        has = has_x[:, None] & (columns < matrix.num_columns)[None, :]
        x = tl.load(x_rows[:, None] + columns[None, :], mask=has, other=0.0)
        numbers = decode_tile(matrix, expert, row, has_row, column, kind, BN, BK)
        if kind.encoding != PLAIN:
            numbers = round_to(numbers, x.dtype)
        if INTERPRETED:  # the interpreter cannot multiply bfloat16
            sums = tl.dot(x.to(tl.float32), tl.trans(numbers.to(tl.float32)), sums, input_precision="ieee")
        else:
            sums = tl.dot(x, tl.trans(numbers), sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["num_x"])
def multiply(
    x, matrix, out, num_x, num_rows, x_row, out_row, lead, kind: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Computes x @ w.T. Grid: tiles of rows of x, tiles of rows of the matrix. In this order, programs that decode the
    same rows of the matrix run at the same time, and read them from memory once."""
    first, row = tl.program_id(0) * BM, tl.program_id(1).to(tl.int64) * BN - lead
    x_rows, rows = first.to(tl.int64) + tl.arange(0, BM), row + tl.arange(0, BN)
    has_x, has_row = x_rows < num_x, (rows >= 0) & (rows < num_rows)
    sums = _product(x + x_rows * x_row, has_x, matrix, 0, row, has_row, kind, BM, BN, BK)
    pointers = out + x_rows[:, None] * out_row + rows[None, :]
    tl.store(pointers, round_to(sums, out.dtype.element_ty), mask=has_x[:, None] & has_row[None, :])


@triton.jit
def multiply_groups(
    x, matrix, out, ends, num_experts, num_rows, x_row, out_row, lead, kind: tl.constexpr,
    EXPERTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Multiplies rows of x, sorted by expert, by their expert's matrix; ends[e] is the end (exclusive) of expert e's
    rows. Grid: an upper bound of tiles of rows of x, tiles of rows of an expert. `EXPERTS`: a power of two, at least
    `num_experts`."""
    # Finds the expert of this tile of x: experts whose tiles are all before it are counted.
    tile, experts = tl.program_id(0), tl.arange(0, EXPERTS)
    ends_E = tl.load(ends + experts, mask=experts < num_experts, other=0)
    begins_E = tl.load(ends + experts - 1, mask=(experts < num_experts) & (experts > 0), other=0)
    tiles_E = tl.where(experts < num_experts, tl.cdiv(ends_E - begins_E, BM), 0)
    is_before = tl.cumsum(tiles_E) <= tile
    expert = tl.sum(((experts < num_experts) & is_before).to(tl.int32))
    if expert < num_experts:  # else the grid has more tiles than needed
        is_own = experts == expert
        begin = tl.sum(tl.where(is_own, begins_E, 0)) + (tile - tl.sum(tl.where(is_before, tiles_E, 0))) * BM
        end = tl.sum(tl.where(is_own, ends_E, 0))
        row = tl.program_id(1).to(tl.int64) * BN - lead
        x_rows, rows = begin.to(tl.int64) + tl.arange(0, BM), row + tl.arange(0, BN)
        has_x, has_row = x_rows < end, (rows >= 0) & (rows < num_rows)
        sums = _product(x + x_rows * x_row, has_x, matrix, expert.to(tl.int64), row, has_row, kind, BM, BN, BK)
        pointers = out + x_rows[:, None] * out_row + rows[None, :]
        tl.store(pointers, round_to(sums, out.dtype.element_ty), mask=has_x[:, None] & has_row[None, :])
