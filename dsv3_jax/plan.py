"""What a model takes on a mesh, bytes per device, and what that allows: which meshes fit a GPU, how fast decoding can be at best.

Arithmetic only. Weights and cache come from the engine's own code, traced on a mesh without devices, so that both always agree;
`working_memory.py` estimates the rest.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh

from dsv3_jax import sharding as sharding_lib
from dsv3_jax.checkpoint import load
from dsv3_jax.config import ModelConfig
from dsv3_jax.generation import requests
from dsv3_jax.generation.settings import DEFAULT_SEQ_LEN
from dsv3_jax.generation.steps import SMALLEST_CACHE
from dsv3_jax.kernels import dispatch
from dsv3_jax.model.cache import init_cache
from dsv3_jax.model.options import Options
from dsv3_jax.model.transformer import Transformer
from dsv3_jax.sharding import AXES, Sharding
from dsv3_jax.working_memory import working_bytes

USABLE = 0.92  # of a GPU's memory, for JAX: the rest holds CUDA's context, NCCL's buffers, loaded programs and what fragments
MOST_GPUS = 64  # searched through unless told otherwise


@dataclasses.dataclass(frozen=True)
class GPU:
    """A kind of GPU: memory in GB of 10^9 bytes, memory bandwidth in TB/s (None: unknown), whether the kernels, Hopper's, run on it."""

    name: str
    gb: float
    tbps: float | None = None
    hopper: bool = False

    @property
    def usable(self) -> float:
        """Bytes that JAX may use."""
        return self.gb * 1e9 * USABLE


# From NVIDIA's data sheets of the SXM cards; a B200 is sold with 180 GB (DGX, HGX) and with 192. Drivers report some 6 % more, an H200
# 139 GiB, which nothing here counts on.
GPUS = {g.name: g for g in (GPU("h100", 80, 3.35, True), GPU("h200", 141, 4.8, True), GPU("b200", 180, 8.0))}

HOPPER = ("h100", "h200", "h800", "h20", "gh200")  # how names of cards begin on which the kernels run


def parse_gpu(text: str) -> GPU:
    """Read 'h200', or 'NAME:GB' or 'NAME:GB:TBPS' for any other card; raises ValueError for anything else."""
    if known := GPUS.get(text.lower()):
        return known
    number = r"(\d{1,6}(?:\.\d{1,6})?)"
    found = re.fullmatch(rf"([\w. -]+):{number}(?::{number})?", text, re.ASCII)
    sizes = [float(n) for n in found.groups()[1:] if n] if found else []
    if not found or not all(sizes):
        raise ValueError(f"gpu = {text!r}: must be {', '.join(GPUS)}, or NAME:GB or NAME:GB:TBPS with sizes above 0, such as a100:80:2.0")
    return GPU(found[1], sizes[0], sizes[1] if len(sizes) > 1 else None, found[1].lower().startswith(HOPPER))


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to run, and on which kind of GPU: nothing is left to choose but the mesh."""

    config: ModelConfig
    gpu: GPU
    options: Options
    max_seq_len: int
    max_batch_size: int

    @property
    def slots(self) -> int:
        """Of each row's cache when it is full, as the engine rounds them up."""
        return -(-self.max_seq_len // SMALLEST_CACHE) * SMALLEST_CACHE

    def rows(self, data: int) -> int:
        """Of the cache on each of `data` parts of the batch."""
        return -(-self.max_batch_size // data)


def settle(
    config: ModelConfig, gpu: GPU, max_seq_len: int | None = None, max_batch_size: int = 8, gemm_impl: str | None = None, **options: Any
) -> Job:
    """As generation.settings.settle, for a GPU that need not be here; raises ValueError for what does not fit the model."""
    most = config.max_position_embeddings
    max_seq_len = requests.whole("max_seq_len", min(DEFAULT_SEQ_LEN, most) if max_seq_len is None else max_seq_len, 2, most)
    max_batch_size = requests.whole("max_batch_size", max_batch_size, 1)
    chosen = Options(gemm_impl=gemm_impl or "bf16", **options)
    if gemm_impl is None and config.quantization_config and chosen.dtype == "bfloat16" and gpu.hopper:
        chosen = dataclasses.replace(chosen, gemm_impl="fp8")
    chosen.check(config)
    return Job(config, gpu, chosen, max_seq_len, max_batch_size)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter as the engine holds it: its path, its shape with sharding, and in how many layers there is one like it."""

    path: tuple[str, ...]
    array: jax.ShapeDtypeStruct
    layers: int

    @property
    def bytes(self) -> int:
        """Of all these layers, on one device."""
        return self.layers * bytes_here(self.array)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A job on one mesh: bytes on each of its devices."""

    job: Job
    mesh: str
    expert_axes: str
    devices: int
    leaves: tuple[Leaf, ...]
    cache: int
    working: int

    @property
    def weights(self) -> int:
        return sum(leaf.bytes for leaf in self.leaves)

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.working

    @property
    def fits(self) -> bool:
        return self.total <= self.job.gpu.usable

    @property
    def parameters(self) -> int:
        """Of the whole model: tables of RoPE and scales of FP8 are none."""
        counted = (leaf for leaf in self.leaves if leaf.path[0] != "rope" and leaf.path[-1] != "weight_scale_inv")
        return sum(leaf.layers * math.prod(leaf.array.shape) for leaf in counted)

    def step_bytes(self, batch: int) -> tuple[float, float]:
        """Bytes that one device must read to decode a token for each of `batch` rows: of weights, and of their caches, full.

        Of experts those that are hit if routing is even: E (1 - (1 - K/E)^rows) of all, over as many devices as they are spread over;
        at least ceil(K / devices), as a step waits for the device that has most.
        """
        c, sizes = self.job.config, sharding_lib.parse_mesh(self.mesh)
        rows = -(-batch // sizes["data"])
        spread, sharing = (self.devices, batch) if "data" in self.expert_axes else (sizes["model"], rows)
        experts, k = c.n_routed_experts, c.num_experts_per_tok
        hit = max(experts * (1 - (1 - k / experts) ** sharing) / spread, -(-k // spread))
        read = 0.0
        for leaf in self.leaves:
            if leaf.path[0] in ("embed_tokens", "rope"):
                continue  # a row a token
            read += leaf.bytes * (hit / (experts / spread) if "experts" in leaf.path else 1)
        return read, self.cache * rows / self.job.rows(sizes["data"])


def make(job: Job, mesh: str, expert_axes: str = "model") -> Plan:
    """Work out one mesh; raises ValueError where the model does not divide over it."""
    sharding_lib.check(job.config, mesh, expert_axes)
    sizes, axes = sharding_lib.parse_mesh(mesh), sharding_lib.parse_expert_axes(expert_axes)
    nowhere = AbstractMesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Explicit,) * len(AXES))
    sharding = Sharding(cast(Mesh, nowhere), axes)
    rows, slots = job.rows(sizes["data"]), job.slots
    with jax.sharding.use_abstract_mesh(nowhere), dispatch.compile_only(dispatch.OLDEST):  # asked what runs, no device answers
        leaves = tuple(_leaves(job, sharding))
        cache = jax.eval_shape(lambda: init_cache(job.config, job.options, sharding, rows * sizes["data"], slots))
    working = working_bytes(job.config, job.options, job.gpu.hopper, sharding, rows, job.max_seq_len, slots)
    if job.options.gemm_impl == "bf16":  # every step dequantises one layer's weights after the other's; experts' within the kernel
        codes = [leaf for leaf in leaves if leaf.array.dtype.itemsize == 1 and "experts" not in leaf.path]
        by_layer = (sum(bytes_here(leaf.array) for leaf in codes if leaf.path[1] == i) for i in ("0", "1"))
        working += jnp.dtype(job.options.dtype).itemsize * max(by_layer)
    held = sum(bytes_here(a) for layer in cache.layers for a in layer)
    return Plan(job, mesh, expert_axes, math.prod(sizes.values()), leaves, held, working)


def _leaves(job: Job, sharding: Sharding) -> Iterator[Leaf]:
    """The parameters after load.prepare, traced on one layer of each kind."""
    c, options = job.config, dataclasses.replace(job.options, implementation="xla")
    kinds = [c.is_moe_layer(i) for i in range(c.num_hidden_layers)]
    dense, some = kinds.count(False), [kind for kind in (False, True) if kind in kinds]
    short = dataclasses.replace(c, num_hidden_layers=len(some), first_k_dense_replace=int(dense > 0), moe_layer_freq=1)

    def prepared():
        model = Transformer(short, options, sharding, job.max_seq_len)
        load.rearrange(model, options)
        return load.plain(nnx.split(model)[1])

    for keys, array in jax.tree_util.tree_leaves_with_path(jax.eval_shape(prepared)):
        path = tuple(str(key.key) for key in keys)
        yield Leaf(path, array, kinds.count(some[int(path[1])]) if path[0] == "layers" else 1)


def bytes_here(array: jax.ShapeDtypeStruct | jax.Array) -> int:
    """Bytes of an array on one device."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def sizes_of_model(config: ModelConfig) -> tuple[list[int], str]:
    """Which sizes the axis `model` can have, experts over `model` alone, and why not twice the largest: the tensors that do not divide."""
    good = [n for n in range(1, config.num_attention_heads + 1) if not _fault(config, f"model={n}", "model")]
    return good, _fault(config, f"model={2 * good[-1]}", "model")


def search(job: Job, gpus: int = MOST_GPUS, expert_axes: str | None = None) -> list[Plan]:
    """For 1, 2, 4, 8 ... GPUs up to `gpus` the mesh that fits, or that takes least; the list ends with the first that fits, if any does.

    With each number model=N comes first, then meshes with `data` and experts over data,model: attention is cut less, but each device
    caches fewer rows. expert_axes: only meshes with these.
    """
    tried, n = [], 1
    while n <= gpus:
        plans, data = [], 1
        while data <= n:
            axes = "model" if data == 1 and expert_axes != "data,model" else "data,model"
            mesh = f"model={n}" if data == 1 else f"data={data},model={n // data}"
            if expert_axes in (None, axes) and not _fault(job.config, mesh, axes):
                plans.append(make(job, mesh, axes))
                if plans[-1].fits:
                    return [*tried, plans[-1]]
            data *= 2
        tried += [min(plans, key=lambda p: p.total)] if plans else []
        n *= 2
    return tried


def _fault(config: ModelConfig, mesh: str, expert_axes: str) -> str:
    try:
        sharding_lib.check(config, mesh, expert_axes)
    except ValueError as e:
        return str(e)
    return ""
