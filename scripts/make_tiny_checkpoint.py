"""Make a Hugging Face checkpoint folder with random weights, to try the other commands on.

    dsv3-make-tiny-checkpoint --save_path=demo_output/hf
    dsv3-make-tiny-checkpoint --config=configs/tiny.json --save_path=DIR --seed=7 --num_shards=2

The folder has what a release has: config.json, safetensors shards with an index (FP8 with block scales if the config says so),
the MTP layer, a tokenizer with a chat template and generation_config.json. The answers of such a model mean nothing.
"""

from __future__ import annotations

import json
import os

from absl import flags

from dsv3_jax import cli
from dsv3_jax.checkpoint import tiny

_CONFIG = flags.DEFINE_string("config", None, "config.json to take the sizes from; without it, the project's configs/tiny.json.")
_SAVE_PATH = flags.DEFINE_string("save_path", None, "Folder to write; it must be new or empty.", required=True)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the random weights; the same seed gives the same bits on every machine.")
_NUM_SHARDS = flags.DEFINE_integer("num_shards", 4, "Number of safetensors files.", lower_bound=1)


def main(argv: list[str]) -> int:
    default = os.path.join(os.path.dirname(os.path.dirname(tiny.__file__)), "configs", "tiny.json")
    with open(cli.resolve(_CONFIG.value or default, "config"), encoding="utf-8") as f:
        try:
            config = json.load(f)
        except ValueError as e:
            raise ValueError(f"--config={_CONFIG.value}: not valid JSON ({e})") from e
    path = cli.resolve(_SAVE_PATH.value, "save_path")
    if os.path.isdir(path) and os.listdir(path):
        raise ValueError(f"--save_path={_SAVE_PATH.value}: the folder is not empty; remove it or name a new one")
    size = tiny.make(path, config, _SEED.value, n_shards=_NUM_SHARDS.value)
    print(f"{path}: {size / 1e6:.1f} MB of random weights; this model knows nothing and answers noise")
    return 0


def run() -> None:
    cli.run(main)


if __name__ == "__main__":
    run()
