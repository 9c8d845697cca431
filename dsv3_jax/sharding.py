"""The mesh, and the one table that says over which of its axes each logical axis of the model lies."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsv3_jax.config import BLOCK, ModelConfig

AXES = ("data", "model")


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A mesh with the rules for it; layers name logical axes and only this class knows mesh axes."""

    mesh: Mesh
    expert_axes: tuple[str, ...] = ("model",)

    def axes(self, logical: str | None) -> tuple[str, ...]:
        """Mesh axes of one logical axis; None is an axis that every device holds whole."""
        table = {
            None: (),
            "batch": ("data",),
            "heads": ("model",),
            "ffn": ("model",),
            "vocab": ("model",),
            "experts": self.expert_axes,
        }
        return table[logical]

    def spec(self, *logical: str | None) -> P:
        """The partition spec of an array whose dims have these logical axes."""
        names = [self.axes(name) for name in logical]
        return P(*(None if not n else n[0] if len(n) == 1 else n for n in names))

    def named(self, *logical: str | None) -> NamedSharding:
        """The sharding, on this mesh, of an array whose dims have these logical axes."""
        return NamedSharding(self.mesh, self.spec(*logical))

    def size(self, logical: str) -> int:
        """Into how many parts a logical axis is cut."""
        return math.prod(self.mesh.shape[a] for a in self.axes(logical))


def parse_mesh(text: str) -> dict[str, int]:
    """Read 'data=2,model=4' (an axis left out is 1); raises ValueError for anything else."""
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    seen = set()
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, size = part.partition("=")
        if name not in AXES or name in seen or not size.isascii() or not size.isdigit() or int(size) < 1:
            raise ValueError(f"mesh = {text!r}: must look like 'data=2,model=4', each axis once with a positive size")
        sizes[name] = int(size)
        seen.add(name)
    return sizes


def parse_expert_axes(text: str) -> tuple[str, ...]:
    """Read 'model' or 'data,model': the mesh axes over which whole experts are spread."""
    axes = tuple(text.replace(" ", "").split(","))
    if axes not in (("model",), ("data", "model")):
        raise ValueError(f"expert_axes = {text!r}: must be 'model' or 'data,model'")
    return axes


def make_sharding(mesh: str, expert_axes: str = "model", devices: Sequence | None = None) -> Sharding:
    """Build the mesh on the first devices that it needs.

    Raises ValueError when the text is malformed, when there are fewer devices than it asks for, or when it leaves out devices of a
    job with several processes, each of which must take part.
    """
    sizes, axes = parse_mesh(mesh), parse_expert_axes(expert_axes)
    devices = jax.devices() if devices is None else devices
    need = math.prod(sizes.values())
    if need > len(devices):
        raise ValueError(f"mesh = {mesh!r}: needs {need} devices, and {len(devices)} are here; use a smaller mesh")
    if jax.process_count() > 1 and need != len(devices):
        raise ValueError(f"mesh = {mesh!r}: must use all {len(devices)} devices of the {jax.process_count()} processes")
    made = jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Explicit,) * len(AXES), devices=devices[:need])
    return Sharding(made, axes)


def check(config: ModelConfig, mesh: str, expert_axes: str = "model") -> None:
    """Refuse a mesh that the model does not divide over, before anything is loaded.

    Raises ValueError naming every tensor that does not divide and the sizes of the axis that would.
    """
    sizes, axes = parse_mesh(mesh), parse_expert_axes(expert_axes)
    parts = _divided_over_model(config)
    faults = [f"{name}: {_reason(count, unit, sizes['model'])}" for name, count, unit in parts if not _divides(count, unit, sizes["model"])]
    spread = math.prod(sizes[a] for a in axes)
    experts = config.n_routed_experts
    if experts % spread:
        faults.append(f"mlp.experts: {experts} experts over {' x '.join(axes)} = {spread} devices")
    if not faults:
        return
    fixed = spread // sizes["model"]
    good = [
        n for n in range(1, config.num_attention_heads + 1) if experts % (n * fixed) == 0 and all(_divides(c, u, n) for _, c, u in parts)
    ]
    remedy = f"model can be {', '.join(map(str, good))}" if good else "no size of model works with these expert_axes and this data size"
    raise ValueError(f"mesh = {mesh!r} does not divide this model; {remedy}:\n  " + "\n  ".join(faults))


def _divided_over_model(config: ModelConfig) -> list[tuple[str, int, int]]:
    """(tensor, elements along the divided dim, elements that must stay together) for all that lies over `model`."""
    unit = BLOCK if config.quantization_config else 1
    heads, layer = config.num_attention_heads, "layers.*."
    q_proj = "q_proj" if config.q_lora_rank is None else "q_b_proj"
    parts = [
        ("num_attention_heads", heads, 1),
        ("embed_tokens.weight and lm_head.weight (vocab_size)", config.vocab_size, 1),
        (f"{layer}self_attn.{q_proj}.weight rows", heads * config.qk_head_dim, unit),
        (f"{layer}self_attn.kv_b_proj.weight rows", heads * (config.qk_nope_head_dim + config.v_head_dim), unit),
        (f"{layer}self_attn.o_proj.weight columns", heads * config.v_head_dim, unit),
    ]
    kinds = {config.is_moe_layer(i) for i in range(config.num_hidden_layers)}
    if False in kinds:
        parts.append((f"{layer}mlp gate, up and down (intermediate_size)", config.intermediate_size, unit))
    if True in kinds and config.n_shared_experts:
        width = config.moe_intermediate_size * config.n_shared_experts
        parts.append((f"{layer}mlp.shared_experts (moe_intermediate_size x n_shared_experts)", width, unit))
    return parts


def _divides(count: int, unit: int, n: int) -> bool:
    return n == 1 or (count % n == 0 and count // n % unit == 0)


def _reason(count: int, unit: int, n: int) -> str:
    blocks = f" = {count / unit:g} blocks of {unit} that share a scale" if unit > 1 else ""
    return f"{count}{blocks}, over {n} devices"
