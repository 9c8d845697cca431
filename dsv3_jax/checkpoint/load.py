"""From a converted checkpoint to a model ready to run: described, restored into its shardings, prepared once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from dsv3_jax.checkpoint import store
from dsv3_jax.config import ModelConfig
from dsv3_jax.model import rope
from dsv3_jax.model.moe import MoE
from dsv3_jax.model.options import Options
from dsv3_jax.model.transformer import Transformer
from dsv3_jax.sharding import Sharding

Params = dict[str, Any]  # nested, as in the names of the release: params["layers"]["0"]["mlp"]["down_proj"]["weight"]


def abstract_model(config: ModelConfig, options: Options, sharding: Sharding, max_seq_len: int) -> tuple[nnx.GraphDef, Params]:
    """Describe a model without allocating it: its graph, and its parameters as jax.ShapeDtypeStruct with shardings."""
    graph, state = nnx.get_abstract_model(lambda: Transformer(config, options, sharding, max_seq_len), sharding.mesh)
    return graph, plain(state)


def plain(state: nnx.State) -> Params:
    """A nested dict with string keys, which jax.jit dispatches ten times faster than an nnx.State."""
    with_strings = lambda tree: {str(k): with_strings(v) for k, v in tree.items()} if isinstance(tree, Mapping) else tree  # noqa: E731
    return with_strings(nnx.to_pure_dict(state))


def load_model(path: str, config: ModelConfig, options: Options, sharding: Sharding, max_seq_len: int) -> tuple[nnx.GraphDef, Params]:
    """Restore a checkpoint made by convert.py and prepare it for inference.

    Each process reads only its own shards. Plain weights become options.dtype (norms and the router keep what the file stores),
    q_a_proj and kv_a_proj_with_mqa become qkv_a_proj, shared experts join the others where one device has all of these, and under absorb
    kv_b_proj becomes w_uk and w_uv. Raises ValueError where the
    checkpoint does not fit the config.
    """
    graph, abstract = abstract_model(config, options, sharding, max_seq_len)
    del abstract["rope"]
    cos, sin = rope.tables(config, max_seq_len)
    params = store.load_params(path, abstract)
    whole = sharding.named(None, None)
    params["rope"] = {"cos": jax.device_put(cos, whole), "sin": jax.device_put(sin, whole)}
    return prepare(graph, params, options, sharding)


def prepare(graph: nnx.GraphDef, params: Params, options: Options, sharding: Sharding) -> tuple[nnx.GraphDef, Params]:
    """Do once what would otherwise be done in every step: cast plain weights, absorb kv_b_proj, join what reads the same rows.

    FP8 linears stay FP8: under gemm_impl 'fp8' nothing is dequantised in a step, under 'bf16' every step dequantises what it reads.

    Takes `params` apart as it goes, so that no more than one weight exists twice.
    """
    with jax.set_mesh(sharding.mesh):
        _cast(params, options)
        model = nnx.merge(graph, params)
        params.clear()
        rearrange(model, options)
        graph, state = nnx.split(model)
    return graph, plain(state)


def rearrange(model: Transformer, options: Options) -> None:
    """Put side by side what reads the same rows, and under absorb kv_b_proj into the form that decoding multiplies with."""
    for block in model.layers:
        block.self_attn.join()
        if isinstance(block.mlp, MoE):
            block.mlp.join()
        if options.attn_impl == "absorb":
            block.self_attn.absorb()


def _cast(tree: Params, options: Options, owner: str = "") -> None:
    for name, value in tree.items():
        if isinstance(value, dict):
            _cast(value, options, name)
        elif name == "weight" and "norm" not in owner and owner != "gate" and np.dtype(value.dtype).itemsize > 1:
            tree[name] = value.astype(options.dtype)
