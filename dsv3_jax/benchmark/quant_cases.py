"""The kernels bound by one pass over memory: quantising, dequantising, and a plain copy as the card's own ceiling."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from dsv3_jax.benchmark.cases import FP8, Base, blocks, dequantised, scales, some_of
from dsv3_jax.benchmark.timing import Operands, Spec, difference
from dsv3_jax.kernels import quantize

COPIED = 2**31  # bytes


@dataclasses.dataclass(frozen=True)
class Quant(Base):
    """name: act_quant, rms_norm_quant, swiglu_quant (M rows of K columns out) or weight_dequant (N by K), bf16 on the other side."""

    name: str
    rows: int
    k: int
    looped = False

    @property
    def op(self) -> str:
        return self.name

    @property
    def bytes(self) -> float:
        """Read and written."""
        codes, wide = self.rows * self.k, 2 * self.rows * self.k
        if self.op == "weight_dequant":
            return codes + wide + 4 * blocks(self.rows) * blocks(self.k)
        return codes + wide * (2 if self.op == "swiglu_quant" else 1) + 4 * self.rows * blocks(self.k)

    @property
    def bound(self) -> float:
        """The two that round once are exact; the order of sums and the exponential of the others are free."""
        return 0.0 if self.op in ("act_quant", "weight_dequant") else 1e-3

    def sizes(self) -> dict[str, int]:
        return {"n" if self.op == "weight_dequant" else "m": self.rows, "k": self.k}

    def specs(self) -> tuple[Operands, Operands, Operands]:
        shape = (self.rows, self.k)
        if self.op == "weight_dequant":
            return (), (), (Spec(shape, FP8), scales(blocks(self.rows), blocks(self.k)))
        shared = (Spec((self.k,), jnp.bfloat16, "scales"),) if self.op == "rms_norm_quant" else ()
        return shared, (), (Spec((self.rows, 2, self.k) if self.op == "swiglu_quant" else shape, jnp.bfloat16),)

    def _run(self, shared, weight, implementation: str | None):
        if self.op == "weight_dequant":
            codes, scale = weight
            return quantize.weight_dequant(codes, scale, jnp.bfloat16, implementation=implementation)
        extra = (*shared, 1e-6) if self.op == "rms_norm_quant" else ()
        return getattr(quantize, self.op)(*weight, *extra, implementation=implementation)

    def call(self, shared, small, weight):
        return self._run(shared, weight, self.implementation)

    def error(self, shared, small, weight, out):
        if self.op == "weight_dequant":
            want = self._run(shared, weight, "xla")
            return jnp.where((out == want).all(), 0.0, jnp.maximum(difference(out, want), 1e-12))
        some = some_of(self.rows)
        want, got = self._run(shared, (weight[0][some],), "xla"), [x[some] for x in out]
        same = jnp.stack([(x == y).all() for x, y in zip(got, want, strict=True)]).all()
        return jnp.where(same, 0.0, jnp.maximum(difference(dequantised(*got), dequantised(*want)), 1e-12))


@dataclasses.dataclass(frozen=True)
class Copy(Base):
    """The card's own ceiling: a kernel that reads and writes every byte once."""

    size: int = COPIED
    looped = False

    @property
    def op(self) -> str:
        return "copy"

    @property
    def bound(self) -> float:
        return 0.0

    @property
    def bytes(self) -> float:
        return 2 * self.size

    def sizes(self) -> dict[str, int]:
        return {}

    def specs(self) -> tuple[Operands, Operands, Operands]:
        return (), (), (Spec((self.size // 4,), jnp.uint32, 7),)

    def call(self, shared, small, weight):
        return weight[0] ^ 1  # a plain copy may be left to the copy engine, or left out

    def error(self, shared, small, weight, out):
        return (out != 6).sum().astype(jnp.float32)

    def runs(self) -> str:
        return "xla"
