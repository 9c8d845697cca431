"""C = A B^T from FP8 codes with block scales, accumulated in float32 and promoted every 128 of K."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dsv3_jax.kernels import dispatch, tiles
from dsv3_jax.kernels.quantize import BLOCK


def fp8_gemm(
    a: jax.Array, a_scale: jax.Array, b: jax.Array, b_scale: jax.Array, out_dtype=jnp.float32, *, implementation: str | None = None
) -> jax.Array:
    """Multiply quantised activations by a quantised weight.

    a (M, K) float8_e4m3fn with a_scale (M, ceil(K/128)); b (..., N, K) float8_e4m3fn with b_scale (..., ceil(N/128), ceil(K/128)):
    leading dims of b are weights side by side. Returns (M, prod(...) * N) of out_dtype.
    Source: fp8_gemm of the reference's kernel.py.
    """
    k = a.shape[1]
    if implementation == "triton" and k % 16:  # rows that the copy engine cannot read
        raise ValueError(f"implementation = 'triton': fp8_gemm needs K to be a multiple of 16, and it is {k}; use 'xla'")
    if dispatch.choose("fp8_gemm", "xla" if k % 16 or not a.size else implementation) == "triton":
        return on_triton(a, a_scale, b, b_scale, out_dtype)
    m, k = a.shape
    rows = jnp.repeat(b_scale, BLOCK, axis=-2)[..., : b.shape[-2], :]
    b, rows = b.reshape(-1, k), rows.reshape(-1, b_scale.shape[-1])
    pad = -k % BLOCK
    a, b = jnp.pad(a, ((0, 0), (0, pad))), jnp.pad(b, ((0, 0), (0, pad)))

    def add_block(i, acc):
        block_a = jax.lax.dynamic_slice_in_dim(a, i * BLOCK, BLOCK, 1).astype(jnp.float32)
        block_b = jax.lax.dynamic_slice_in_dim(b, i * BLOCK, BLOCK, 1).astype(jnp.float32)
        product = jnp.einsum("mk,nk->mn", block_a, block_b)
        scale_a = jax.lax.dynamic_slice_in_dim(a_scale, i, 1, 1)
        scale_b = jax.lax.dynamic_slice_in_dim(rows, i, 1, 1)
        return acc + product * scale_a * scale_b.T

    acc = jnp.zeros((m, b.shape[0]), jnp.float32)
    return jax.lax.fori_loop(0, (k + pad) // BLOCK, add_block, acc).astype(out_dtype)


def choose(m: int, n: int, k: int) -> dict:
    """The kernel for M rows by a weight (N, K), 'decode' or 'large', as "kernel", and its tiles."""
    from dsv3_jax.kernels.triton_impl import fp8_gemm_decode, fp8_gemm_large

    likely = {"kernel": "decode" if m <= fp8_gemm_decode.MOST_ROWS else "large"}
    kernel = tiles.lookup("fp8_gemm", m, n, k, default=likely)["kernel"]
    return {"kernel": kernel} | (fp8_gemm_decode if kernel == "decode" else fp8_gemm_large).choose(m, n, k)


def on_triton(a, a_scale, b, b_scale, out_dtype, config: dict | None = None):
    """As fp8_gemm, on the kernel and with the tiles that `config` names in place of those that `choose` returns."""
    from dsv3_jax.kernels.triton_impl import fp8_gemm_decode, fp8_gemm_large

    n, k = b.shape[-2:]
    weights = [(b.reshape(-1, k), b_scale.reshape(-1, b_scale.shape[-1]))]
    if b.ndim > 2 and n % BLOCK:  # each weight has a ragged last block of scales
        weights = list(zip(b.reshape(-1, n, k), b_scale.reshape(-1, *b_scale.shape[-2:]), strict=True))
    chosen = dict(config or choose(a.shape[0], *weights[0][0].shape))
    gemm = {"decode": fp8_gemm_decode.fp8_gemm_decode, "large": fp8_gemm_large.fp8_gemm_large}[chosen.pop("kernel")]
    parts = [gemm(a, a_scale, *w, out_dtype, chosen) for w in weights]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
