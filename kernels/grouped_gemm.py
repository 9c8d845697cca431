"""One GEMM per group of rows, each group with its own weight: the experts' work on tokens sorted by expert.

G groups (experts), P weights side by side (gate and up), N rows out, K columns in.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dsv3_jax.kernels import dispatch
from dsv3_jax.kernels.fp8_gemm import fp8_gemm
from dsv3_jax.kernels.quantize import weight_dequant


def grouped_gemm(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    x_scale: jax.Array | None = None,
    w_scale: jax.Array | None = None,
    more: tuple[jax.Array, ...] = (),
    out_dtype=jnp.float32,
    zero_rest: bool = True,
    mean_rows: int | None = None,
    config: dict | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Multiply each group's rows by that group's weight; the work follows the rows and the groups that have any.

    x (M, K): rows sorted by group, the first sum(group_sizes) of them in use; w (G, P, N, K); group_sizes (G,) int32, known on the
    device only. FP8 weights come with w_scale (G, P, ceil(N/128), ceil(K/128)); with x_scale (M, ceil(K/128)) as well x holds FP8
    codes and the product is the block-scaled FP8 one, without it w is dequantised to x's dtype. Accumulates in float32.
    more: weights of further groups, behind the others: (E, P, N, K), with (E, P, ceil(N/128), ceil(K/128)) where w has scales; group_sizes
    is then (G + E,). They stay where they are: to put both into one array, memory would have to hold each twice.
    mean_rows is a guess of the rows in a group for choosing tiles, M / G without it; config overrides what is chosen.
    Returns (M, P * N) of out_dtype; rows in no group are zero, or anything (NaN as well) without zero_rest.
    """
    can_run = _supports(x, w, w_scale)
    if implementation == "triton" and not can_run:
        dispatch.resolve("grouped_gemm", implementation)  # a GPU that is missing or too old is named first
        found = f"x {x.dtype}, w {w.dtype} {w.shape}"
        raise ValueError(f"implementation = 'triton': grouped_gemm needs bf16, or FP8 with N a multiple of 128, not {found}; use 'xla'")
    if dispatch.choose("grouped_gemm", implementation if can_run and x.size else "xla") == "triton":
        from dsv3_jax.kernels.triton_impl import grouped_gemm as kernel

        chosen = {"zero_rest": zero_rest, "mean_rows": mean_rows, "config": config}
        return kernel.grouped_gemm(x, w, group_sizes, x_scale, w_scale, out_dtype, more=more, **chosen)
    m, groups = x.shape[0], w.shape[0]
    tile = min(128, max(8, 1 << (m // groups).bit_length()))  # rows at a time, near the mean group
    tiles = -(-group_sizes // tile)
    ends, tile_ends = jnp.cumsum(group_sizes), jnp.cumsum(tiles)
    pad = [(0, tile), (0, 0)]
    x = jnp.pad(x, pad)
    x_scale = None if x_scale is None else jnp.pad(x_scale, pad)

    def one_tile(i, out):
        g = jnp.searchsorted(tile_ends, i, side="right")
        row = ends[g] - group_sizes[g] + (i - (tile_ends[g] - tiles[g])) * tile
        rows = jax.lax.dynamic_slice_in_dim(x, row, tile, 0)
        weight = _pick(g, w, *more[:1])
        scale = None if w_scale is None else _pick(g, w_scale, *more[1:])
        if x_scale is not None:
            assert scale is not None, "FP8 rows need FP8 weights"
            y = fp8_gemm(rows, jax.lax.dynamic_slice_in_dim(x_scale, row, tile, 0), weight, scale, jnp.float32, implementation="xla")
        else:
            weight = weight if scale is None else weight_dequant(weight, scale, rows.dtype, implementation="xla")
            y = jnp.einsum("mk,nk->mn", rows, weight.reshape(-1, weight.shape[-1]), preferred_element_type=jnp.float32)
        # A tile may reach into the next group's rows; that group comes later and overwrites them.
        return jax.lax.dynamic_update_slice_in_dim(out, y.astype(out_dtype), row, 0)

    out = jnp.zeros((m + tile, w.shape[1] * w.shape[2]), out_dtype)
    out = jax.lax.fori_loop(0, tile_ends[-1], one_tile, out)[:m]
    return jnp.where(jnp.arange(m)[:, None] < ends[-1], out, 0)


def _pick(g: jax.Array, a: jax.Array, more: jax.Array | None = None) -> jax.Array:
    """Element g of a and `more`, one behind the other."""
    at = lambda a, i: jax.lax.dynamic_index_in_dim(a, i, 0, keepdims=False)  # noqa: E731
    return at(a, g) if more is None else jax.lax.cond(g < len(a), lambda: at(a, g), lambda: at(more, g - len(a)))


def _supports(x: jax.Array, w: jax.Array, w_scale: jax.Array | None) -> bool:
    """Whether a kernel exists for these operands: one block of w's scales must not reach over two projections."""
    types = (jnp.bfloat16, jnp.float8_e4m3fn)
    return x.dtype in types and w.dtype in types and (w_scale is None or w.shape[1] == 1 or w.shape[2] % 128 == 0)
