"""How a model computes, as opposed to what it is: the choices that leave its parameters' meaning alone."""

from __future__ import annotations

import dataclasses

from dsv3_jax.config import ModelConfig
from dsv3_jax.kernels import dispatch, mla_prefill

DTYPES = ("bfloat16", "float32")
ATTN_IMPLS = ("absorb", "naive")
GEMM_IMPLS = ("bf16", "fp8")


@dataclasses.dataclass(frozen=True)
class Options:
    """Implementation choices of one model.

    dtype: of activations, caches and dequantised weights. attn_impl: cache the latent ('absorb') or per-head keys and values
    ('naive'). gemm_impl: compute FP8 linears from dequantised weights ('bf16') or from quantised activations ('fp8').
    gate_dtype: of the router's logits; 'bfloat16' is for parity with the reference. reference_scale_fmt: give ue8m0 activation
    scales only to the linears to which the reference gives them (q_a, kv_a and routed experts), also for parity.
    implementation: of the kernels (None for the best that is known to work here, 'xla' or 'triton').
    """

    dtype: str = "bfloat16"
    attn_impl: str = "absorb"
    gemm_impl: str = "bf16"
    gate_dtype: str = "float32"
    reference_scale_fmt: bool = False
    implementation: str | None = None

    def __post_init__(self):
        for name, allowed in (
            ("dtype", DTYPES),
            ("attn_impl", ATTN_IMPLS),
            ("gemm_impl", GEMM_IMPLS),
            ("gate_dtype", DTYPES),
            ("implementation", (None, "xla", "triton")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be one of {', '.join(map(str, allowed))}")

    def check(self, config: ModelConfig) -> None:
        """Raise ValueError where the choices do not fit the model."""
        if self.gemm_impl == "fp8" and config.quantization_config is None:
            raise ValueError("gemm_impl = 'fp8': the checkpoint's weights are not FP8; use gemm_impl 'bf16'")
        if self.implementation != "triton":  # the others run everywhere, and asking would wake the devices up
            return
        for op in self._ops(quantized=config.quantization_config is not None):
            dispatch.resolve(op, self.implementation)
        if self.dtype != "bfloat16":
            raise ValueError(f"implementation = 'triton': attention needs dtype 'bfloat16', not {self.dtype!r}; use 'xla' or None")
        widths = (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
        if why_not := mla_prefill.unsupported(*widths, self.dtype):
            raise ValueError(f"implementation = 'triton': mla_prefill {why_not}; use 'xla' or None")

    def _ops(self, *, quantized: bool) -> list[str]:
        """The kernels of kernels/dispatch.py that a model of these options runs."""
        ops = ["mla_decode", "mla_prefill"] if self.attn_impl == "absorb" else ["mla_prefill", "attend"]
        ops += ["rms_norm", "route", "sort_by_expert", "grouped_gemm"]
        if quantized and (self.gemm_impl == "bf16" or self.attn_impl == "absorb"):  # absorb dequantises kv_b_proj at load
            ops.append("weight_dequant")
        return ops + (["act_quant", "swiglu_quant", "fp8_gemm"] if self.gemm_impl == "fp8" else [])

    def scale_fmt(self, config: ModelConfig, *, in_reference: bool) -> str | None:
        """The format of activation scales for one linear; in_reference says whether the reference gives it scale_fmt."""
        fmt = config.quantization_config.scale_fmt if config.quantization_config else None
        return None if self.reference_scale_fmt and not in_reference else fmt
