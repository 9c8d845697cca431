"""The kernels on a Hopper GPU, against plain float32 products that share no code with them; collected with DSV3_TEST_PLATFORM=cuda alone.

Every weight of DeepSeek-V3 at every width of tensor parallelism, few and many rows; twice, bit for bit the same.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3_jax.kernels import quantize
from dsv3_jax.kernels.fp8_gemm import fp8_gemm
from dsv3_jax.kernels.grouped_gemm import grouped_gemm
from dsv3_jax.kernels.mla_decode import mla_decode
from dsv3_jax.kernels.mla_prefill import mla_prefill
from dsv3_jax.kernels.moe_sort import sort_by_expert
from dsv3_jax.kernels.norm import add_rms_norm
from dsv3_jax.kernels.route import route
from tests import tolerances

GEMM, ATTENTION, SCALE = 1e-3, 1e-5, 192**-0.5
WIDTHS = (1, 2, 4, 8, 16)
SHARDS = {(1, 2112, 7168), *((1, 24576 // w, 1536) for w in WIDTHS), *((1, 7168, 16384 // w) for w in WIDTHS)}
SHARDS |= {(2, n // w, 7168) for n in (18432, 2048) for w in WIDTHS} | {(1, 7168, k // w) for k in (18432, 2048) for w in WIDTHS}


def difference(x, y) -> float:
    x, y = (a.astype(jnp.float32) for a in (x, y))
    return float(1 - 2 * (x * y).sum() / ((x * x).sum() + (y * y).sum()))


def twice(f, *arguments):
    f = jax.jit(f)
    once, again = f(*arguments), f(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), once, again)
    return once


def codes(seed: int, *shape: int):
    bits = jax.random.bits(jax.random.key(seed), shape, jnp.uint8)
    return jax.lax.bitcast_convert_type(bits & 0xBF, jnp.float8_e4m3fn)  # below 2, never NaN


def scales(seed: int, *shape: int):
    return jnp.exp(jax.random.normal(jax.random.key(seed), shape))


def normal(seed: int, *shape: int):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def plain_rows(x, s):
    return x.astype(jnp.float32) * jnp.repeat(s, 128, -1)[..., : x.shape[-1]]


def plain_blocks(w, s):
    return plain_rows(w, jnp.repeat(s, 128, -2)[..., : w.shape[-2], :])


def blocks(n: int) -> int:
    return -(-n // 128)


def dot(x, w):
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision="highest", preferred_element_type=jnp.float32)


HEIGHTS = [(m, *shard) for shard in sorted(SHARDS) for m in (3, 64, 300)] + [(m, 1, 7168, 2048) for m in (1, 8, 16, 33, 65, 100, 128, 129)]


@pytest.mark.parametrize(("m", "p", "n", "k"), HEIGHTS)
def test_fp8_gemm(m, p, n, k):
    x, xs, w, ws = codes(0, m, k), scales(1, m, blocks(k)), codes(2, p, n, k), scales(3, p, blocks(n), blocks(k))
    out = twice(lambda *a: fp8_gemm(*a, jnp.float32 if m == 3 else jnp.bfloat16, implementation="triton"), x, xs, w, ws)
    want = jax.jit(lambda: dot(plain_rows(x, xs), plain_blocks(w, ws).reshape(-1, k)))()
    assert out.shape == want.shape and difference(out, want) < GEMM


SIZES = {"uneven": [0, 5, 0, 1, 130, 0, 64, 17], "one": [0, 0, 1, 0, 0, 0, 0, 0], "many": [700, 0, 900, 300, 1, 0, 129, 2000]}


@pytest.mark.parametrize("kind", ["fp8", "bf16", "w8"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("p", "n", "k"), [(2, 256, 896), (1, 896, 256)])
def test_grouped_gemm(kind, sizes, out_dtype, p, n, k):
    sizes = jnp.array(SIZES[sizes], jnp.int32)
    used, m = int(sizes.sum()), int(sizes.sum()) + 7
    w, ws = codes(0, 8, p, n, k), scales(1, 8, p, blocks(n), blocks(k))
    x, xs = (codes(2, m, k), scales(3, m, blocks(k))) if kind == "fp8" else (normal(2, m, k), None)
    weights = (normal(4, 8, p, n, k), None) if kind == "bf16" else (w, ws)
    plain = weights[0].astype(jnp.float32) if kind == "bf16" else plain_blocks(*weights)
    rows = plain_rows(x, xs) if kind == "fp8" else x.astype(jnp.float32)
    of = np.repeat(np.arange(8), np.asarray(sizes))
    want = jnp.concatenate([dot(rows[:used][of == g], plain[g].reshape(-1, k)) for g in range(8)])

    def run(x, xs, w, ws, sizes, more=()):
        return grouped_gemm(x, w, sizes, x_scale=xs, w_scale=ws, out_dtype=jnp.dtype(out_dtype), more=more, implementation="triton")

    out = twice(run, x, xs, *weights, sizes)
    assert difference(out[:used], want) < GEMM and not np.asarray(out[used:].astype(jnp.float32)).any()
    first, more = ([a if a is None else a[part] for a in weights] for part in (slice(5), slice(5, None)))
    split = twice(run, x, xs, *first, sizes, tuple(a for a in more if a is not None))
    np.testing.assert_array_equal(np.asarray(split.astype(jnp.float32)), np.asarray(out.astype(jnp.float32)))


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("rows", "k"), [(1, 2048), (64, 7168), (8192, 7168), (33, 1536), (8, 512), (5, 5120), (3, 200)])
def test_add_rms_norm(rows, k, dtype, add):
    x, update = (jax.random.normal(jax.random.key(i), (rows, k), dtype) for i in range(2))
    update, weight = update if add else None, jax.random.normal(jax.random.key(2), (k,), "float32" if rows % 2 else dtype)
    total, y = twice(lambda *a: add_rms_norm(*a, 1e-6, implementation="triton"), x, update, weight)
    wide = np.asarray(x, np.float64) + (np.asarray(update, np.float64) if add else 0)
    wide = wide.astype(x.dtype)
    np.testing.assert_array_equal(np.asarray(total), wide)
    wide = wide.astype(np.float64)
    want = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + 1e-6) * np.asarray(weight, np.float64)
    tolerances.within_one_rounding(y, want, 8 if dtype == "bfloat16" else tolerances.NORM_FLOAT32_BITS)


@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("lengths", [[1], [4096], [129, 1, 640, 64, 63, 65, 128, 2000], [700] * 40], ids=len)
def test_mla_decode(heads, lengths):
    b, s = len(lengths), 4096 if len(lengths) < 10 else 1024
    q, latent, n = normal(0, b, heads, 576), normal(1, b, s, 576), jnp.array(lengths, jnp.int32)
    seen = (jnp.arange(s) < n[:, None])[..., None]
    out = twice(lambda *a: mla_decode(*a, SCALE, implementation="triton"), q, jnp.where(seen, latent, jnp.nan), n)
    q, latent = q.astype(jnp.float32), jnp.where(seen, latent, 0).astype(jnp.float32)
    scores = jnp.einsum("bhc,bsc->bhs", q, latent, precision="highest") * SCALE
    weights = jax.nn.softmax(jnp.where(seen[:, None, :, 0], scores, -jnp.inf))
    assert difference(out, jnp.einsum("bhs,bsc->bhc", weights, latent[..., :512], precision="highest")) < ATTENTION


@pytest.mark.parametrize(
    ("t", "s", "start", "new"),
    [(16, 16, [0], [16]), (300, 512, [0, 200, 5], [300, 1, 0]), (128, 128, [0], [77]), (512, 1024, [512], [512])],
)
@pytest.mark.parametrize("heads", [4, 16])
def test_mla_prefill(t, s, start, new, heads):
    b = len(start)
    q, k, pe, v = normal(0, b, t, heads, 192), normal(1, b, s, heads, 128), normal(2, b, s, 64), normal(3, b, s, heads, 128)
    start, new = jnp.array(start, jnp.int32), jnp.array(new, jnp.int32)
    there = jnp.arange(s) < (start + new)[:, None]
    poison = (jnp.where(there.reshape(b, s, *[1] * (a.ndim - 2)), a, jnp.nan) for a in (k, pe, v))
    out = twice(lambda *a: mla_prefill(*a, SCALE, implementation="triton"), q, *poison, start, new)
    keys = jnp.concatenate([k, jnp.broadcast_to(pe[:, :, None], (b, s, heads, 64))], -1)
    scores = jnp.einsum("bthc,bshc->bhts", q, keys, precision="highest", preferred_element_type=jnp.float32) * SCALE
    seen = jnp.arange(s) <= (start[:, None] + jnp.arange(t))[..., None]
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf))
    want = jnp.einsum("bhts,bshc->bthc", weights, v.astype(jnp.float32), precision="highest")
    real = (jnp.arange(t) < new[:, None])[..., None, None]
    assert difference(jnp.where(real, out, 0), jnp.where(real, want, 0)) < ATTENTION
    assert not np.asarray(jnp.where(real, 0, out).astype(jnp.float32)).any()


@pytest.mark.parametrize("fmt", [None, "ue8m0"])
@pytest.mark.parametrize(("m", "k"), [(1, 7168), (64, 1536), (300, 2048), (5, 200), (4096, 7168)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_quantising_equals_xla_bit_for_bit(fmt, m, k, dtype):
    x = (jax.random.normal(jax.random.key(0), (m, k)) * jnp.exp2(jax.random.randint(jax.random.key(1), (m, 1), -20, 20))).astype(dtype)
    for row, value in enumerate((0.0, 1e-7, 1e4, 448.0, 2.0**-9)[:m]):
        x = x.at[row, :128].set(value)
    got, want = (jax.jit(lambda x, i=i: quantize.act_quant(x, fmt, implementation=i))(x) for i in ("triton", "xla"))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def test_weight_dequant_equals_xla_bit_for_bit():
    w, s = codes(0, 2, 576, 1000), scales(1, 2, 5, 8)
    got, want = (quantize.weight_dequant(w, s, jnp.bfloat16, implementation=i) for i in ("triton", "xla"))
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), np.asarray(want).view(np.uint16))


@pytest.mark.parametrize(("m", "k", "experts", "first", "here"), [(1, 8, 256, 0, 256), (64, 8, 256, 64, 32), (1000, 6, 64, 0, 64)])
def test_sort_by_expert(m, k, experts, first, here):
    rng = np.random.default_rng(0)
    ids, valid = rng.permuted(np.tile(np.arange(experts, dtype=np.int32), (m, 1)), axis=1)[:, :k], rng.random(m) < 0.8
    order, inverse, sizes = map(np.asarray, twice(lambda *a: sort_by_expert(*a, first, here, implementation="triton"), ids, valid))
    mine = (ids >= first) & (ids < first + here) & valid[:, None]
    key = np.where(mine, ids - first, here).ravel()
    np.testing.assert_array_equal(order, np.argsort(key, kind="stable"))
    np.testing.assert_array_equal(order[inverse], np.arange(m * k))
    np.testing.assert_array_equal(sizes, np.bincount(key, minlength=here + 1)[:here])


@pytest.mark.parametrize(
    ("experts", "groups", "live", "k", "scoring"),
    [(256, 8, 4, 8, "sigmoid"), (160, 8, 3, 6, "softmax"), (64, 1, 1, 6, "softmax"), (384, 1, 1, 8, "sigmoid")],
)
@pytest.mark.parametrize("m", [1, 64, 5000])
def test_route(experts, groups, live, k, scoring, m):
    """Experts whose scores differ by less than float32 resolves may change places: a few rows in a thousand at most."""
    logits, bias = jax.random.normal(jax.random.key(0), (m, experts)), 0.1 * jax.random.normal(jax.random.key(1), (experts,))
    settings = {
        "num_experts_per_tok": k, "n_group": groups, "topk_group": live, "scoring_func": scoring, "norm_topk_prob": scoring == "sigmoid",
        "topk_method": "noaux_tc" if scoring == "sigmoid" else "group_limited_greedy", "routed_scaling_factor": 2.5,
    }  # fmt: skip
    bias = bias if scoring == "sigmoid" else None
    ids, weights = map(np.asarray, twice(lambda x: route(x, bias, **settings, implementation="triton"), logits))
    want_ids, want = (np.asarray(a) for a in jax.jit(lambda x: route(x, bias, **settings, implementation="xla"))(logits))
    same = (ids == want_ids).all(1)
    assert same.mean() > 0.997
    np.testing.assert_allclose(weights[same], want[same], rtol=2e-6)
