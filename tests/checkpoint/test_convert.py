"""What convert writes: the same bits as the source, on any mesh, with the files beside it."""

import json
import os

import hf_folder
import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from dsv3_jax import ModelConfig
from dsv3_jax.checkpoint import layout, names, store
from dsv3_jax.checkpoint.convert import convert

NUMPY = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F16": np.float16, "F8_E4M3": ml_dtypes.float8_e4m3fn}


def arrays(folder) -> dict[str, np.ndarray]:
    return {n: np.frombuffer(data, NUMPY[dtype]).reshape(shape) for n, (dtype, shape, data) in hf_folder.read(folder).items()}


def expected(source) -> dict[str, np.ndarray]:
    """Stack by hand what the contract says is stacked; everything else keeps its name without 'model.'."""
    flat = arrays(source)
    result = {}
    for name in list(flat):
        if ".mlp." in name and any(p in name for p in ("gate_proj", "up_proj", ".experts.")):
            continue
        result[name.removeprefix("model.")] = flat[name]
    for suffix in ("weight", "weight_scale_inv"):
        for prefix in {n.rsplit(".gate_proj.", 1)[0] for n in flat if n.endswith(f"gate_proj.{suffix}") and ".experts." not in n}:
            both = [flat[f"{prefix}.{p}.{suffix}"] for p in ("gate_proj", "up_proj")]
            result[f"{prefix.removeprefix('model.')}.gate_up_proj.{suffix}"] = np.stack(both)
        for prefix in {n.split(".experts.0.")[0] for n in flat if f".experts.0.down_proj.{suffix}" in n and n.endswith(suffix)}:
            ours, experts = prefix.removeprefix("model."), range(8)
            result[f"{ours}.experts.down_proj.{suffix}"] = np.stack([flat[f"{prefix}.experts.{e}.down_proj.{suffix}"] for e in experts])
            pairs = [[flat[f"{prefix}.experts.{e}.{p}.{suffix}"] for p in ("gate_proj", "up_proj")] for e in experts]
            result[f"{ours}.experts.gate_up_proj.{suffix}"] = np.array(pairs)
    return result


def same(got, want) -> bool:
    got, want = np.asarray(got), np.asarray(want)
    return got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()


@pytest.mark.parametrize("family", ["v3", "v2"])
def test_bit_for_bit(family, request):
    """Orbax reads whole arrays here, through its own description of them and none of ours."""
    source, converted = request.getfixturevalue(f"{family}_source"), request.getfixturevalue(f"{family}_converted")
    want, got = expected(source), store._flatten(ocp.load(str(converted / "params")))
    assert sorted(got) == sorted(want)
    assert [n for n in want if not same(got[n], want[n])] == []


def test_expected_agrees_with_orbax_reading_safetensors(v2_source):
    """Orbax's own reader of Hugging Face folders as a witness for the test's reader."""
    context = ocp.Context()
    context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
    with context:
        theirs = ocp.load(str(v2_source))
    ours = arrays(v2_source)
    assert sorted(theirs) == sorted(ours)
    assert all(same(theirs[n], ours[n]) for n in ours)


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("family", ["v3", "v2"])
def test_restored_equal_on_any_mesh(family, count, request):
    source, converted = request.getfixturevalue(f"{family}_source"), request.getfixturevalue(f"{family}_converted")
    mesh = jax.make_mesh((count,), ("model",), devices=jax.devices()[:count], axis_types=(jax.sharding.AxisType.Explicit,))
    abstract = {}
    for i, (name, leaf) in enumerate(store.stored(converted).items()):
        splits = [axis for axis, n in enumerate(leaf.shape) if n % count == 0]
        spec = [None] * len(leaf.shape)
        if splits:
            spec[splits[i % len(splits)]] = "model"  # by rows, columns and experts in turn
        abstract[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P(*spec)))
    loaded = store._flatten(store.load_params(converted, store._nest(abstract)))
    want = expected(source)
    assert sorted(loaded) == sorted(want)
    for name, array in loaded.items():
        assert array.sharding == abstract[name].sharding
        assert len(array.addressable_shards) == count
        # By shard: gathering a sharded FP8 array would turn -0 into 0.
        assert all(same(s.data, want[name][s.index]) for s in array.addressable_shards), name


def test_mixed_float_types_are_kept(tmp_path):
    folder = hf_folder.make(tmp_path / "hf", hf_folder.V2, dtype="float16", tokenizer=False)
    convert(str(folder), str(tmp_path / "out"))
    assert {str(s.dtype) for s in store.stored(tmp_path / "out").values()} == {"float16"}


def test_e8m0_and_u8_scales_become_float32(v3):
    names_ = [n for n in hf_folder.read(v3) if n.endswith("_scale_inv")]
    rng, change, want = np.random.default_rng(0), {}, {}
    for i, name in enumerate(names_):
        shape = hf_folder.read(v3)[name][1]
        raw = rng.integers(100, 140, shape).astype(np.uint8)
        change[name] = ("U8" if i % 2 else "F8_E8M0", shape, raw.tobytes())
        want[name] = 2.0 ** (raw.astype(np.float64) - 127)
    hf_folder.edit(v3, change)
    convert(str(v3), str(v3.parent / "out"))
    got = store._flatten(ocp.load(str(v3.parent / "out" / "params")))
    name = "layers.1.mlp.experts.gate_up_proj.weight_scale_inv"
    assert got[name].dtype == np.float32
    for e in range(8):
        for j, part in enumerate(("gate_proj", "up_proj")):
            np.testing.assert_array_equal(got[name][e, j], want[f"model.layers.1.mlp.experts.{e}.{part}.weight_scale_inv"])


def test_files_beside_the_weights(v3):
    extra = ("chat_template.jinja", "special_tokens_map.json", "tokenizer.model", "merges.txt", "vocab.json", "added_tokens.json")
    for name in extra:
        (v3 / name).write_text(json.dumps({"name": name}))
    (v3 / "modeling_deepseek.py").write_text("raise SystemExit")
    (v3 / "tokenization_kimi.py").write_text("raise SystemExit")
    convert(str(v3), str(v3.parent / "out"))
    kept = set(os.listdir(v3.parent / "out"))
    assert kept == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "params", "dsv3_jax.json", *extra}
    for name in kept - {"params", "dsv3_jax.json"}:
        assert (v3.parent / "out" / name).read_bytes() == (v3 / name).read_bytes()


def test_arrays_of_zeros(v3):
    """Zeros are what zarr leaves out unless told otherwise, and Orbax cannot read what is left out."""
    name = "model.layers.0.self_attn.o_proj.weight"
    dtype, shape, data = hf_folder.read(v3)[name]
    hf_folder.edit(v3, {name: (dtype, shape, bytes(len(data))), "model.norm.weight": ("BF16", [256], bytes(512))})
    convert(str(v3), str(v3.parent / "out"))
    got = store._flatten(ocp.load(str(v3.parent / "out" / "params")))
    assert same(got["layers.0.self_attn.o_proj.weight"], np.zeros((256, 128), ml_dtypes.float8_e4m3fn))
    assert same(got["norm.weight"], np.zeros(256, ml_dtypes.bfloat16))


def test_skip_mtp(v3_source, tmp_path):
    said = []
    convert(str(v3_source), str(tmp_path / "out"), skip_mtp=True, say=said.append)
    assert any("MTP skipped" in line and "bytes" in line for line in said)
    config = store.read_config(tmp_path / "out")
    assert config.num_nextn_predict_layers == 0
    assert store.stored(tmp_path / "out").keys() == names.targets(config).keys()
    assert not any(n.startswith("layers.2.") for n in store.stored(tmp_path / "out"))


def test_config_is_the_sources_own(v3_source, v3_converted):
    assert store.read_config(v3_converted) == ModelConfig.from_json(v3_source / "config.json")
    assert store.read_config(v3_converted).mtp_layers == range(2, 3)


def test_tilde_and_relative_paths(v2_source, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    convert(str(v2_source), "~/saved/here")
    monkeypatch.chdir(tmp_path)
    assert store.read_config("saved/here") == store.read_config("~/saved/here")


def test_subset_and_float_dtype_asked_for_otherwise(v3_converted):
    """MTP may be left out, and a plain float comes in the dtype that is stored, whatever is asked for."""
    whole = NamedSharding(jax.make_mesh((1,), ("model",), devices=jax.devices()[:1]), P())
    asked = {"norm": {"weight": jax.ShapeDtypeStruct((256,), np.float32, sharding=whole)}}
    loaded = store.load_params(v3_converted, asked)
    assert list(loaded) == ["norm"] and loaded["norm"]["weight"].dtype == ml_dtypes.bfloat16


def test_what_does_not_fit_is_listed_at_once(v3_converted):
    whole = NamedSharding(jax.make_mesh((1,), ("model",), devices=jax.devices()[:1]), P())
    asked = {
        "norm.weight": ((255,), np.float32), "nothing.weight": ((1,), np.float32),
        "layers.0.self_attn.o_proj.weight": ((256, 128), ml_dtypes.bfloat16),
        "layers.0.self_attn.o_proj.weight_scale_inv": ((2, 1), ml_dtypes.bfloat16),
    }  # fmt: skip
    tree = store._nest({n: jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for n, (shape, dtype) in asked.items()})
    with pytest.raises(ValueError) as e:
        store.load_params(v3_converted, tree)
    for words in ("4 arrays", "norm.weight is (256,) in the checkpoint, expected (255,)", "nothing.weight is not in the checkpoint",
                  "o_proj.weight is float8_e4m3fn in the checkpoint, expected bfloat16", "o_proj.weight_scale_inv is float32"):  # fmt: skip
        assert words in str(e.value)


def test_odd_sizes_and_tiny_blocks(tmp_path):
    """Dims that nothing divides, and blocks much smaller than an array: edges of blocks and of chunks."""
    target = names.Target((13, 37), "float", (names.Piece("x"),))
    array = layout.plan(target, "bfloat16", 37 * 2 * 5)
    assert array.shape[0] % array.block[0] != 0
    odd = hf_folder.V2 | {"vocab_size": 1009, "moe_intermediate_size": 97, "hidden_size": 130}
    folder = hf_folder.make(tmp_path / "hf", odd, tokenizer=False)
    convert(str(folder), str(tmp_path / "out"), max_host_memory_gb=0.05)
    want, got = expected(folder), store._flatten(ocp.load(str(tmp_path / "out" / "params")))
    assert [n for n in want if not same(got[n], want[n])] == []


def test_budget_is_said_first(v2_source, tmp_path):
    said = []
    convert(str(v2_source), str(tmp_path / "out"), max_host_memory_gb=0.5, say=said.append)
    assert said[0].startswith("memory budget 500.0 MB")
    record = json.loads((tmp_path / "out" / "dsv3_jax.json").read_text())
    assert record["format"] == 1 and record["complete"] and set(record["source"]) >= {"config.json"}
