"""The result of each instruction, compared with PyTorch and plain Python."""

import pytest
import torch
from ptx_kernels import each_lane, execute, kernel

I32, I64, F32 = torch.int32, torch.int64, torch.float32
HARD_FLOATS = torch.tensor(
    [
        *(0.0, -0.0, 1.0, -1.5, float("inf"), float("-inf"), float("nan"), 1e-40),
        *(65504.0, 65520.0, 3e-8, 2.0**-24, 1.00390625, 1.01171875, 3.4e38, 7.0),
    ]
)


def ints(seed=0, dtype=I32):
    info = torch.iinfo(dtype)
    drawn = torch.randint(info.min, info.max, (32,), dtype=dtype, generator=torch.Generator().manual_seed(seed))
    drawn[:6] = torch.tensor([0, 1, -1, info.min, info.max, 7], dtype=dtype)
    return drawn


def wrapped(values, bits=32):
    """Python integers as signed ones of so many bits."""
    half = 1 << bits - 1
    return torch.tensor([(v + half) % (2 * half) - half for v in values], dtype=I32 if bits == 32 else I64)


INTEGERS = {
    "add.s32 %r5, %r2, %r3;": lambda a, b: a + b,
    "add.s16x2 %r5, %r2, %r3;": lambda a, b: ((a >> 16) + (b >> 16)) % 2**16 << 16 | (a + b) % 2**16,
    "sub.s32 %r5, %r2, %r3;": lambda a, b: a - b,
    "mul.lo.s32 %r5, %r2, %r3;": lambda a, b: a * b,
    "mul.hi.s32 %r5, %r2, %r3;": lambda a, b: a * b >> 32,
    "mul.hi.u32 %r5, %r2, %r3;": lambda a, b: (a % 2**32) * (b % 2**32) >> 32,
    "mad.lo.s32 %r5, %r2, %r3, 5;": lambda a, b: a * b + 5,
    "min.s32 %r5, %r2, %r3;": min,
    "max.u32 %r5, %r2, %r3;": lambda a, b: max(a % 2**32, b % 2**32),
    "max.relu.s32 %r5, %r2, %r3;": lambda a, b: max(a, b, 0),
    "and.b32 %r5, %r2, %r3;": lambda a, b: a & b,
    "or.b32 %r5, %r2, %r3;": lambda a, b: a | b,
    "xor.b32 %r5, %r2, %r3;": lambda a, b: a ^ b,
    "not.b32 %r5, %r2;": lambda a, b: ~a,
    "neg.s32 %r5, %r2;": lambda a, b: -a,
    "shl.b32 %r5, %r2, 3;": lambda a, b: a << 3,
    "shl.b32 %r5, %r2, 40;": lambda a, b: 0,
    "shr.s32 %r5, %r2, 40;": lambda a, b: -1 if a < 0 else 0,
    "shr.u32 %r5, %r2, 7;": lambda a, b: a % 2**32 >> 7,
    "bfe.u32 %r5, %r2, 3, 5;": lambda a, b: a % 2**32 >> 3 & 31,
    "bfe.s32 %r5, %r2, 3, 5;": lambda a, b: ((a >> 3 & 31) ^ 16) - 16,
    "bfe.s32 %r5, %r2, 28, 8;": lambda a, b: a >> 28,
    "bfe.u32 %r5, %r2, 28, 8;": lambda a, b: a % 2**32 >> 28,
    "popc.b32 %r5, %r2;": lambda a, b: (a % 2**32).bit_count(),
    "prmt.b32 %r5, %r2, %r3, 0x5410U;": lambda a, b: (b & 0xFFFF) << 16 | a & 0xFFFF,
    "prmt.b32 %r5, %r2, %r3, 0x7632U;": lambda a, b: (b % 2**32 >> 16) << 16 | a % 2**32 >> 16,
    "prmt.b32 %r5, %r2, %r3, 0x8888U;": lambda a, b: -1 if a & 128 else 0,
    "selp.b32 %r5, %r2, %r3, %p1;": lambda a, b: b,
    "mul.wide.s32 %rd9, %r2, %r3; cvt.u32.u64 %r5, %rd9;": lambda a, b: a * b,
    "mul.wide.s32 %rd9, %r2, %r3; shr.s64 %rd9, %rd9, 32; cvt.u32.u64 %r5, %rd9;": lambda a, b: a * b >> 32,
    "mad.wide.u32 %rd9, %r2, %r3, 9; shr.u64 %rd9, %rd9, 32; cvt.u32.u64 %r5, %rd9;": lambda a, b: (
        (a % 2**32) * (b % 2**32) + 9 >> 32
    ),
    "cvt.s64.s32 %rd9, %r2; shr.s64 %rd9, %rd9, 16; cvt.u32.u64 %r5, %rd9;": lambda a, b: a >> 16,
    "cvt.u16.u32 %rs1, %r2; shl.b16 %rs1, %rs1, 4; cvt.u32.u16 %r5, %rs1;": lambda a, b: (a << 4) % 2**16,
    "mov.b32 {%rs1, %rs2}, %r2; mov.b32 %r5, {%rs2, %rs1};": lambda a, b: (a & 0xFFFF) << 16 | a % 2**32 >> 16,
    "mov.b64 %rd9, {%r2, %r3}; mul.hi.s64 %rd9, %rd9, 4294967296; cvt.u32.u64 %r5, %rd9;": lambda a, b: b,
}


@pytest.mark.parametrize("text", INTEGERS)
def test_integers(text):
    a, b = ints(0), ints(1)
    got = each_lane(f"setp.ne.b32 %p1, 0, 0; {text}", a, b, out=I32, registers=("%r2", "%r3"), result="%r5")
    assert got.equal(wrapped([INTEGERS[text](x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]))


def test_division_rounds_to_zero():
    a, b = ints(0), ints(1)
    b[:6] = torch.tensor([3, -3, 7, 5, 2, -2], dtype=I32)
    quotient = each_lane("div.s32 %r5, %r2, %r3;", a, b, out=I32, registers=("%r2", "%r3"), result="%r5")
    remainder = each_lane("rem.s32 %r5, %r2, %r3;", a, b, out=I32, registers=("%r2", "%r3"), result="%r5")
    assert quotient.equal(torch.div(a, b, rounding_mode="trunc"))
    assert remainder.equal(torch.fmod(a, b))


FLOATS = {
    "add.f32 %f5, %f2, %f3;": lambda a, b: a + b,
    "sub.f32 %f5, %f2, %f3;": lambda a, b: a - b,
    "mul.f32 %f5, %f2, %f3;": lambda a, b: a * b,
    "fma.rn.f32 %f5, %f2, %f3, %f2;": lambda a, b: (a.double() * b.double() + a.double()).float(),
    "max.f32 %f5, %f2, %f3;": torch.fmax,
    "min.f32 %f5, %f2, %f3;": torch.fmin,
    "max.NaN.f32 %f5, %f2, %f3;": torch.maximum,
    "min.NaN.f32 %f5, %f2, %f3;": torch.minimum,
    "max.f32 %f5, %f2, %f3, %f2;": torch.fmax,
    "min.f32 %f5, %f2, %f2, %f3;": torch.fmin,
    "neg.f32 %f5, %f2;": lambda a, b: -a,
    "abs.f32 %f5, %f2;": lambda a, b: a.abs(),
    "div.full.f32 %f5, %f2, %f3;": lambda a, b: a / b,
    "div.rn.f32 %f5, %f2, %f3;": lambda a, b: a / b,
    "rcp.rn.f32 %f5, %f2;": lambda a, b: 1 / a,
    "sqrt.rn.f32 %f5, %f2;": lambda a, b: a.double().sqrt().float(),
    "ex2.approx.f32 %f5, %f2;": lambda a, b: a.double().exp2().float(),
    "cvt.sat.f32.f32 %f5, %f2;": lambda a, b: a.nan_to_num(0.0).clamp(0, 1),
    "cvt.f32.bf16 %f5, %rs1;": None,
}


@pytest.mark.parametrize("text", [text for text, f in FLOATS.items() if f])
def test_floats(text):
    a = torch.cat([HARD_FLOATS, torch.randn(16, generator=torch.Generator().manual_seed(1))])
    b = torch.cat([HARD_FLOATS.roll(5), torch.randn(16, generator=torch.Generator().manual_seed(2))])
    got = each_lane(text, a, b, out=F32, registers=("%f2", "%f3"), result="%f5")
    torch.testing.assert_close(got, FLOATS[text](a, b), rtol=0, atol=0, equal_nan=True)


PAIRS = {
    "add.f32x2 %rd9, %rd7, %rd8;": lambda a, b: a + b,
    "sub.rn.f32x2 %rd9, %rd7, %rd8;": lambda a, b: a - b,
    "mul.f32x2 %rd9, %rd7, %rd8;": lambda a, b: a * b,
    "fma.rn.f32x2 %rd9, %rd7, %rd8, %rd7;": lambda a, b: (a.double() * b.double() + a.double()).float(),
}


@pytest.mark.parametrize("text", PAIRS)
def test_pairs_of_floats(text):
    """Two numbers in 64 bits, as sm_100 and sm_120 have them: neither half sees the other."""
    a, b = torch.randn(2, 32, 2)
    a[:16, 0], b[:16, 1] = HARD_FLOATS, HARD_FLOATS.roll(5)
    pairs = [x.view(I64).flatten() for x in (a, b)]
    got = each_lane(text, *pairs, out=I64, registers=("%rd7", "%rd8"), result="%rd9")
    torch.testing.assert_close(got.view(F32).view(32, 2), PAIRS[text](a, b), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
@pytest.mark.parametrize("sign", [1, -1], ids=["add", "sub"])
def test_sums_of_a_half_and_a_float(sign, name, dtype):
    a, b = torch.randn(32).to(dtype), torch.randn(32)
    a[:16] = HARD_FLOATS.to(dtype)
    text = f"{'add' if sign > 0 else 'sub'}.rn.f32.{name} %f5, %rs1, %f3;"
    got = each_lane(text, a.view(torch.int16), b, out=F32, registers=("%rs1", "%f3"), result="%f5")
    torch.testing.assert_close(got, a.float() + sign * b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_products_of_halves_added_to_a_float(name, dtype):
    a, b, c = torch.randn(32).to(dtype), torch.randn(32).to(dtype), torch.randn(32)
    a[:16], b[:16] = HARD_FLOATS.to(dtype), HARD_FLOATS.roll(5).to(dtype)
    text = f"fma.rn.f32.{name} %f5, %rs1, %rs2, %f3;"
    halves, registers = (a.view(torch.int16), b.view(torch.int16), c), ("%rs1", "%rs2", "%f3")
    got = each_lane(text, *halves, out=F32, registers=registers, result="%f5")
    exact = (a.double() * b.double() + c.double()).float()
    torch.testing.assert_close(got, exact, rtol=0, atol=0, equal_nan=True)


NANS = torch.tensor([0x7FC00000, -0x00400000, 0x7F812345, -1], dtype=I32).repeat(8)


@pytest.mark.parametrize(
    "text",
    [
        "add.f32 %f5, %f2, 0f3F800000;",
        "fma.rn.f32 %f5, %f2, %f2, %f2;",
        "mul.f32 %f5, 0f00000000, 0f7F800000;",
        "max.f32 %f5, %f2, %f2;",
        "min.NaN.f32 %f5, %f2, 0f40935D8E;",
        "add.f32x2 %rd9, %rd8, %rd8; mov.b64 {%f5, _}, %rd9;",
        "rsqrt.approx.ftz.f32 %f5, 0fBF800000;",
    ],
)
def test_every_nan_that_is_computed_has_the_same_bits(text):
    """0x7fffffff, whatever the operands were: so lanes that hold copies of a value store equal bytes."""
    text = f"mov.b64 %rd8, {{%f2, %f2}}; {text}"
    assert (each_lane(text, NANS, out=I32, registers=("%f2",), result="%f5") == 0x7FFFFFFF).all()


@pytest.mark.parametrize("text", ["mov.f32 %f5, %f2;", "selp.f32 %f5, %f2, 0f00000000, %p1;"])
def test_a_nan_that_is_moved_keeps_its_bits(text):
    text = f"setp.eq.b32 %p1, 0, 0; {text}"
    assert each_lane(text, NANS, out=I32, registers=("%f2",), result="%f5").equal(NANS)


def test_rsqrt_flushes_denormals():
    a = torch.cat([HARD_FLOATS, torch.rand(16)])
    got = each_lane("rsqrt.approx.ftz.f32 %f5, %f2;", a, out=F32, registers=("%f2",), result="%f5")
    flushed = torch.where((a != 0) & (a.abs() < 2.0**-126), 0.0 * a, a)
    torch.testing.assert_close(got, (1 / flushed.double().sqrt()).float(), rtol=0, atol=0, equal_nan=True)


def test_abs_flushes_denormals():
    got = each_lane("abs.ftz.f32 %f5, %f2;", HARD_FLOATS.repeat(2)[:32], out=F32, registers=("%f2",), result="%f5")
    a = HARD_FLOATS.repeat(2)[:32].abs()
    torch.testing.assert_close(got, torch.where(a < 2.0**-126, 0.0 * a, a), rtol=0, atol=0, equal_nan=True)


def test_registers_of_inline_assembly_have_no_percent_sign():
    """As in libdevice's exp of a float64: two scopes, one name."""
    a = torch.randn(32, dtype=torch.float64)
    text = "{ .reg .b32 tmp; mov.b64 {%r5, tmp}, %fd2; } { .reg .b32 tmp, tmp2; mov.b64 {tmp2, tmp}, %fd2; "
    got = each_lane(f"{text} add.s32 %r6, tmp, %r5; }}", a, out=I32, registers=("%fd2",), result="%r6")
    low, high = a.view(I32).view(32, 2).unbind(1)
    assert torch.equal(got, low + high)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_narrow_floats(name, dtype):
    """To nearest and back, beside PyTorch's own conversions; random ones are near ties."""
    ties = (torch.randn(16).to(dtype).float().view(I32) + torch.randint(-2, 3, (16,), dtype=I32)).view(F32)
    a = torch.cat([HARD_FLOATS, ties])
    narrow = each_lane(f"cvt.rn.{name}.f32 %rs1, %f2;", a, out=torch.int16, registers=("%f2",), result="%rs1")
    assert_same(narrow.view(dtype), a.to(dtype))
    back = each_lane(f"cvt.f32.{name} %f5, %rs1;", narrow, out=F32, registers=("%rs1",), result="%f5")
    assert_same(back, a.to(dtype).float())
    text = f"cvt.rn.{name}x2.f32 %r5, %f3, %f2;"
    both = each_lane(text, a, a.flip(0), out=I32, registers=("%f2", "%f3"), result="%r5")
    assert_same(both.view(dtype).view(32, 2), torch.stack([a, a.flip(0)], 1).to(dtype))


def test_float32_to_tf32():
    """To nearest with 11 bits, ties away from zero, beside float64 arithmetic; random ones are near ties."""
    ties = ((torch.randn(16).view(I32) & ~0x1FFF) + 0x1000 + torch.randint(-1, 2, (16,), dtype=I32)).view(F32)
    a = torch.cat([HARD_FLOATS, ties])
    got = each_lane("cvt.rna.tf32.f32 %r5, %f2;", a, out=I32, registers=("%f2",), result="%r5").view(F32)
    fraction, exponent = a.double().frexp()
    rounded = fraction.sign() * (fraction.abs() * 2**11 + 0.5).floor() / 2**11
    wanted = torch.where(a.isfinite(), rounded.ldexp(exponent), a.double()).float()
    normal = ~(a.abs() < torch.finfo(F32).tiny)  # below, fewer bits are left
    assert_same(got[normal], wanted[normal])


def assert_same(got, wanted):
    torch.testing.assert_close(got.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


COMPARISONS = {
    "eq": torch.eq, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
    "ne": lambda a, b: (a < b) | (a > b), "num": lambda a, b: ~(a.isnan() | b.isnan()),
    "nan": lambda a, b: a.isnan() | b.isnan(),
    "equ": lambda a, b: ~((a < b) | (a > b)), "neu": torch.ne,
    "geu": lambda a, b: ~(a < b), "leu": lambda a, b: ~(a > b),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_with_nan(name):
    a, b = torch.cat([HARD_FLOATS, HARD_FLOATS]), torch.cat([HARD_FLOATS, HARD_FLOATS.roll(3)])
    text = f"setp.{name}.f32 %p1|%p2, %f2, %f3; selp.b32 %r5, 1, 0, %p1; selp.b32 %r6, 2, 0, %p2; or.b32 %r5, %r5, %r6;"
    got = each_lane(text, a, b, out=I32, registers=("%f2", "%f3"), result="%r5")
    assert got.equal(torch.where(COMPARISONS[name](a, b), 1, 2).int())


SHUFFLES = {
    "shfl.sync.bfly.b32 %r5, %r2, 5, 31, -1;": lambda lane: lane ^ 5,
    "shfl.sync.idx.b32 %r5, %r2, 3, 31, -1;": lambda lane: 3,
    "shfl.sync.up.b32 %r5, %r2, 4, 0, -1;": lambda lane: max(lane - 4, lane if lane < 4 else 0),
    "shfl.sync.down.b32 %r5, %r2, 4, 31, -1;": lambda lane: lane + 4 if lane < 28 else lane,
    # segments of eight lanes
    "shfl.sync.idx.b32 %r5, %r2, 9, 6175, -1;": lambda lane: lane // 8 * 8 + 1,
}


@pytest.mark.parametrize("text", SHUFFLES)
def test_shuffles(text):
    got = each_lane(text, torch.arange(32, dtype=I32), out=I32, registers=("%r2",), result="%r5")
    assert got.tolist() == [SHUFFLES[text](lane) for lane in range(32)]


def test_redux():
    a = ints(3) // 64
    got = each_lane("redux.sync.add.s32 %r5, %r2, -1;", a, out=I32, registers=("%r2",), result="%r5")
    assert got.equal(a.sum(dtype=I32).expand(32))


def test_lanes_part_and_meet_again():
    """Each lane adds up as many numbers as it is, then all shuffle: that needs them all in one place."""
    body = """
        mov.u32 %r2, 0; mov.u32 %r3, 0;
        LOOP: setp.ge.u32 %p1, %r2, %r1;
        @%p1 bra DONE;
        add.s32 %r3, %r3, %r2; add.s32 %r2, %r2, 1;
        bra LOOP;
        DONE: shfl.sync.bfly.b32 %r4, %r3, 1, 31, -1;
        mad.wide.u32 %rd5, %r1, 4, %rd1;
        st.global.b32 [%rd5], %r4;
    """
    out = torch.zeros(32, dtype=I32)
    execute(kernel(body, 1), out)
    assert out.tolist() == [(lane ^ 1) * ((lane ^ 1) - 1) // 2 for lane in range(32)]


def fragments(text: str, *matrices, results: int) -> torch.Tensor:
    """Words ``[32, n]`` of each matrix into ``%r20`` and on, instructions, ``results`` words from ``%r60`` on."""
    lines, register = [], 20
    for i, matrix in enumerate(matrices):
        lines.append(f"mad.wide.u32 %rd20, %r1, {4 * matrix.shape[1]}, %rd{i + 1};")
        for j in range(matrix.shape[1]):
            lines.append(f"ld.global.b32 %r{register}, [%rd20+{4 * j}];")
            register += 1
    lines += [text, f"mad.wide.u32 %rd20, %r1, {4 * results}, %rd{len(matrices) + 1};"]
    lines += [f"st.global.b32 [%rd20+{4 * j}], %r{60 + j};" for j in range(results)]
    out = torch.zeros(32, results, dtype=I32)
    execute(kernel("\n".join(lines), len(matrices) + 1), *matrices, out)
    return out


LANE = torch.arange(32)
GROUP, WITHIN = LANE // 4, LANE % 4


@pytest.mark.parametrize(
    ("name", "dtype", "depth"), [("bf16", torch.bfloat16, 16), ("f16", torch.float16, 16), ("tf32", F32, 8)]
)
def test_mma(name, dtype, depth):
    """Fragments as the PTX ISA draws them, put together here by indexing; TF32 takes the upper 19 bits."""
    a, b, c = torch.randn(16, depth).to(dtype), torch.randn(8, depth).to(dtype), torch.randn(16, 8)
    packed = 4 // dtype.itemsize
    inner = torch.arange(packed)

    def words(matrix, rows, half):
        """Of each lane the four bytes of its row that are its own, in one half of the depth."""
        columns = (half * depth // 2 + WITHIN * packed)[:, None] + inner
        return matrix[rows[:, None], columns].contiguous().view(I32)

    a_words = torch.cat([words(a, GROUP + 8 * (i % 2), i // 2) for i in range(4)], 1)
    b_words = torch.cat([words(b, GROUP, i) for i in range(2)], 1)
    places = [(GROUP + 8 * (i // 2), 2 * WITHIN + i % 2) for i in range(4)]
    c_words = torch.stack([c[place] for place in places], 1).view(I32)
    kind = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{name}.{name}.f32"
    text = f"{kind} {{%r60,%r61,%r62,%r63}}, {{%r20,%r21,%r22,%r23}}, {{%r24,%r25}}, {{%r26,%r27,%r28,%r29}};"
    got = fragments(text, a_words, b_words, c_words, results=4).view(F32)
    if name == "tf32":
        a, b = ((m.view(I32) & -8192).view(F32) for m in (a, b))
    wanted = (a.double() @ b.double().T + c.double()).float()
    assert got.equal(torch.stack([wanted[place] for place in places], 1))


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrices_of_shared_memory(trans):
    """By rows that lie 48 bytes apart; what stmatrix stores ldmatrix loads."""
    body = f"""
        mov.u32 %r2, tile;
        mad.lo.s32 %r3, %r1, 48, %r2;
        stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r3], {{%r20,%r21,%r22,%r23}};
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r60,%r61,%r62,%r63}}, [%r3];
    """
    matrices = torch.randint(-30000, 30000, (4, 8, 8), dtype=torch.int16)

    def words_of(matrices):
        pairs = matrices[:, GROUP[:, None], 2 * WITHIN[:, None] + torch.arange(2)]
        return pairs.contiguous().view(I32)[..., 0].T.contiguous()

    text = kernel("PLACE", 2, shared=32 * 48)
    loads = "mad.wide.u32 %rd20, %r1, 16, %rd1; ld.global.v4.b32 {%r20,%r21,%r22,%r23}, [%rd20];"
    stores = "mad.wide.u32 %rd20, %r1, 16, %rd2; st.global.v4.b32 [%rd20], {%r60,%r61,%r62,%r63};"
    out = torch.zeros(32, 4, dtype=I32)
    execute(text.replace("PLACE", loads + body + stores), words_of(matrices), out)
    assert out.equal(words_of(matrices.transpose(1, 2) if trans else matrices))
