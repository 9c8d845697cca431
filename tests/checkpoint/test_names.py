"""The name table against the published models and against names written out by hand."""

import math
from pathlib import Path

import hf_folder
import pytest

from dsv3_jax import ModelConfig
from dsv3_jax.checkpoint import layout, names

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("file", "tensors", "main", "with_mtp"),
    [
        # 91,991 entries in the weight_map of the release, 671B and 685B parameters on its model card.
        ("deepseek_v3_671b.json", 91_991, 671_026_419_200, 684_489_845_504),
        ("deepseek_v2_236b.json", None, 235_741_434_880, 235_741_434_880),
        ("deepseek_v2_lite_16b.json", 5_291, 15_706_484_224, 15_706_484_224),
    ],
)
def test_published_sizes(file, tensors, main, with_mtp):
    config = ModelConfig.from_json(CONFIGS / file)

    def count(table):
        return sum(math.prod(t.shape) for t in table.values() if t.kind != "scale")

    table = names.targets(config)
    assert count(table) == with_mtp
    assert count(names.targets(config, mtp=False)) == main
    if tensors is not None:
        assert sum(len(t.pieces) for t in table.values()) == tensors


def test_every_source_tensor_is_taken_once_and_every_place_filled(v3_source, v2_source):
    for folder in (v3_source, v2_source):
        table = names.targets(ModelConfig.from_json(folder / "config.json"))
        sources = [p.source for t in table.values() for p in t.pieces]
        there = hf_folder.read(folder)
        assert sorted(sources) == sorted(there)
        for target in table.values():
            lead = target.shape[: len(target.pieces[0].index)]
            assert len({p.index for p in target.pieces}) == math.prod(lead) == len(target.pieces)
            assert all(list(target.piece_shape) == there[p.source][1] for p in target.pieces)


def test_stacked_names():
    table = names.targets(ModelConfig.from_json(hf_folder.V3))
    up = table["layers.1.mlp.experts.gate_up_proj.weight"]
    assert (up.shape, up.kind) == ((8, 2, 192, 256), "fp8")
    assert up.pieces[3] == names.Piece("model.layers.1.mlp.experts.1.up_proj.weight", (1, 1))
    scale = table["layers.1.mlp.experts.down_proj.weight_scale_inv"]
    assert (scale.shape, scale.kind) == ((8, 2, 2), "scale")
    assert scale.pieces[7] == names.Piece("model.layers.1.mlp.experts.7.down_proj.weight_scale_inv", (7,))
    assert table["layers.1.mlp.gate.e_score_correction_bias"].kind == "float32"
    assert table["layers.2.eh_proj.weight"].shape == (256, 512) and table["layers.2.eh_proj.weight"].kind == "float"
    assert "layers.2.eh_proj.weight" not in names.targets(ModelConfig.from_json(hf_folder.V3), mtp=False)


def test_a_device_reads_no_more_than_its_share_of_v3():
    """Chunks never straddle the cut of a mesh: on any dim that 2, 4 or 8 devices split, each reads exactly its share."""
    config = ModelConfig.from_json(CONFIGS / "deepseek_v3_671b.json")
    dtypes = {"fp8": "float8_e4m3fn", "float": "bfloat16", "float32": "float32", "scale": "float32"}
    for path, target in names.targets(config).items():
        array = layout.plan(target, dtypes[target.kind], 128 * 2**20)
        assert array.block_bytes <= 132 * 2**20, path
        assert all(b % c == 0 for b, c in zip(array.block, array.chunk, strict=True)), path
        if target.kind == "scale" or len(target.shape) == 1:
            continue  # kilobytes
        for axis, ways in ((a, w) for a in range(len(target.shape)) for w in (2, 4, 8) if target.shape[a] % w == 0):
            assert target.shape[axis] // ways % array.chunk[axis] == 0, (path, axis, ways)
