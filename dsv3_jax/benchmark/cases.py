"""The GEMMs and attention that are measured: operands, call, exact result, and the bytes and operations that count.

M tokens, N rows out, K columns in, G experts, P weights side by side, R rows of an expert, B batch, S context, H heads.
Sizes and keys are those by which other libraries' figures are known, so that rows can be joined.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv3_jax.benchmark.timing import Operands, Spec, difference
from dsv3_jax.kernels import dispatch, fp8_gemm, quantize
from dsv3_jax.kernels.grouped_gemm import grouped_gemm
from dsv3_jax.kernels.mla_decode import mla_decode

LATENT, ROPE, SCALE = 512, 64, 192**-0.5
FP8, CHECKED = quantize.FP8, 256  # rows of a result that are compared with the exact one
_EXACT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Base:
    """config: tiles in place of the chosen ones; operands do not depend on it."""

    implementation: str | None = dataclasses.field(default=None, kw_only=True)
    config: Any = dataclasses.field(default=None, kw_only=True, compare=False)
    looped = True

    @property
    def op(self) -> str:
        """The name in a row."""
        raise NotImplementedError

    @property
    def bytes(self) -> float:
        raise NotImplementedError

    @property
    def flops(self) -> float:
        return 0.0

    @property
    def bound(self) -> float:
        return 1e-3

    def sizes(self) -> dict[str, int]:
        """The keys of a row that say what was measured."""
        raise NotImplementedError

    def specs(self) -> tuple[Operands, Operands, Operands]:
        raise NotImplementedError

    def call(self, shared, small, weight) -> Any:
        raise NotImplementedError

    def error(self, shared, small, weight, out) -> jax.Array:
        raise NotImplementedError

    def runs(self) -> str:
        """'xla' or 'triton'."""
        return dispatch.resolve(self.op, self.implementation)

    def tiles(self) -> dict:
        """What the kernel was compiled with, where there is a choice."""
        return {}


def scales(*shape: int) -> Spec:
    return Spec(shape, jnp.float32, "scales")


def blocks(x: int) -> int:
    return -(-x // quantize.BLOCK)


def some_of(rows: int) -> np.ndarray:
    """Rows to check, evenly spread, the first and the last among them."""
    return np.unique(np.linspace(0, rows - 1, CHECKED).astype(np.int64))


def dequantised(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Dequantise (M, K) with a scale for every 128 columns of a row."""
    return codes.astype(jnp.float32) * jnp.repeat(scale, quantize.BLOCK, axis=1)[:, : codes.shape[1]]


def _dequantised_weight(codes: jax.Array, scale: jax.Array) -> jax.Array:
    return codes.astype(jnp.float32) * quantize.expand_scale(scale, *codes.shape[-2:])


@dataclasses.dataclass(frozen=True)
class Gemm(Base):
    m: int
    n: int
    k: int

    @property
    def op(self) -> str:
        return "fp8_gemm"

    @property
    def flops(self) -> float:
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> float:
        return self.m * self.k + self.n * self.k + 2 * self.m * self.n

    def sizes(self) -> dict[str, int]:
        return {"m": self.m, "n": self.n, "k": self.k}

    def specs(self) -> tuple[Operands, Operands, Operands]:
        m, n, k = self.m, self.n, self.k
        return (Spec((m, k), FP8),), (scales(m, blocks(k)),), (Spec((n, k), FP8), scales(blocks(n), blocks(k)))

    def call(self, shared, small, weight):
        (a,), (a_scale,), (b, b_scale) = shared, small, weight
        if self.config:
            return fp8_gemm.on_triton(a, a_scale, b, b_scale, jnp.bfloat16, self.config)
        return fp8_gemm.fp8_gemm(a, a_scale, b, b_scale, jnp.bfloat16, implementation=self.implementation)

    def error(self, shared, small, weight, out):
        some = some_of(self.m)
        exact = jnp.einsum("mk,nk->mn", dequantised(shared[0][some], small[0][some]), _dequantised_weight(*weight), precision=_EXACT)
        return difference(out[some], exact)

    def tiles(self) -> dict:
        return self.config or (fp8_gemm.choose(self.m, self.n, self.k) if self.runs() == "triton" else {})


@dataclasses.dataclass(frozen=True)
class Grouped(Base):
    """Every expert has the same number of rows; n = P * N."""

    experts: int
    rows: int
    n: int
    k: int
    parts: int = 1
    fp8: bool = True

    @property
    def op(self) -> str:
        return "grouped_fp8_gemm" if self.fp8 else "grouped_bf16_gemm"

    @property
    def flops(self) -> float:
        return 2 * self.experts * self.rows * self.n * self.k

    @property
    def bytes(self) -> float:
        return self.experts * self.n * self.k * (1 if self.fp8 else 2)

    def sizes(self) -> dict[str, int]:
        return {"experts": self.experts, "rows": self.rows, "n": self.n, "k": self.k}

    def specs(self) -> tuple[Operands, Operands, Operands]:
        g, m, p, n, k = self.experts, self.experts * self.rows, self.parts, self.n // self.parts, self.k
        sizes = (Spec((g,), jnp.int32, self.rows),)
        if not self.fp8:
            return (Spec((m, k), jnp.bfloat16),), sizes, (Spec((g, p, n, k), jnp.bfloat16),)
        weight = (Spec((g, p, n, k), FP8), scales(g, p, blocks(n), blocks(k)))
        return (Spec((m, k), FP8), scales(m, blocks(k))), sizes, weight

    def call(self, shared, small, weight):
        x, x_scale = shared if self.fp8 else (*shared, None)
        w, w_scale = weight if self.fp8 else (*weight, None)
        how = {"config": self.config, "implementation": self.implementation}
        return grouped_gemm(x, w, small[0], x_scale=x_scale, w_scale=w_scale, out_dtype=jnp.bfloat16, **how)

    def error(self, shared, small, weight, out):
        """Of some rows of the first, the middle and the last expert."""
        exact, got = [], []
        for g in sorted({0, self.experts // 2, self.experts - 1}):
            some = g * self.rows + some_of(self.rows)
            rows = [x[some] for x in shared]
            w = [x[g] for x in weight]
            x = dequantised(*rows) if self.fp8 else rows[0].astype(jnp.float32)
            w = (_dequantised_weight(*w) if self.fp8 else w[0].astype(jnp.float32)).reshape(self.n, self.k)
            exact.append(jnp.einsum("mk,nk->mn", x, w, precision=_EXACT))
            got.append(out[some])
        return difference(jnp.concatenate(got), jnp.concatenate(exact))

    def runs(self) -> str:
        return dispatch.resolve("grouped_gemm", self.implementation)

    @property
    def kind(self) -> str:
        return "fp8" if self.fp8 else "bf16"

    def tiles(self) -> dict:
        if self.config or self.runs() != "triton":
            return self.config or {}
        from dsv3_jax.kernels.triton_impl import grouped_gemm as kernel

        return kernel.choose(self.kind, self.rows, self.n, self.k)


@dataclasses.dataclass(frozen=True)
class Mla(Base):
    """All calls share the lengths, as a model's layers do, and so one plan of the work."""

    batch: int
    context: int
    heads: int

    @property
    def op(self) -> str:
        return "mla_decode"

    @property
    def bound(self) -> float:
        return 1e-5

    @property
    def flops(self) -> float:
        return 2 * self.batch * self.context * self.heads * (2 * LATENT + ROPE)

    @property
    def bytes(self) -> float:
        return self.batch * self.context * (LATENT + ROPE) * 2

    def sizes(self) -> dict[str, int]:
        return {"batch": self.batch, "context": self.context, "heads": self.heads}

    def specs(self) -> tuple[Operands, Operands, Operands]:
        b, s, h, width = self.batch, self.context, self.heads, LATENT + ROPE
        return (Spec((b,), jnp.int32, s),), (Spec((b, h, width), jnp.bfloat16),), (Spec((b, s, width), jnp.bfloat16),)

    def call(self, shared, small, weight):
        (lengths,), (q,), (latent,) = shared, small, weight
        return mla_decode(q, latent, lengths, SCALE, LATENT, implementation=self.implementation)

    def error(self, shared, small, weight, out):
        """Of the first and the last row."""
        some = np.unique([0, self.batch - 1])
        q, latent = small[0][some].astype(jnp.float32), weight[0][some].astype(jnp.float32)
        scores = jnp.einsum("bhc,bsc->bhs", q, latent, precision=_EXACT) * SCALE
        exact = jnp.einsum("bhs,bsc->bhc", jax.nn.softmax(scores), latent[..., :LATENT], precision=_EXACT)
        return difference(out[some], exact)
