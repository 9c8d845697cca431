"""Convert a Hugging Face checkpoint of the DeepSeek-V2/V3 family into an Orbax checkpoint that any mesh can load.

    dsv3-convert --hf_ckpt_path=~/DeepSeek-V3 --save_path=~/deepseek-v3

Needs no GPU and little memory: --max_host_memory_gb (default 4) holds for checkpoints of any size. FP8 codes and scales are
kept as they are. Everything is checked before a byte is written. Interrupted or killed: run the same command again and it
goes on. Afterwards, dsv3-verify compares every tensor with its source, bit for bit.
"""

import jax
from absl import flags

from dsv3_jax import cli
from dsv3_jax.checkpoint.convert import convert

_HF = flags.DEFINE_string("hf_ckpt_path", None, "Folder with config.json, *.safetensors and their index.", required=True)
_SAVE = flags.DEFINE_string("save_path", None, "Folder to make; the work goes on in SAVE_PATH.converting.", required=True)
_MEMORY = flags.DEFINE_float("max_host_memory_gb", 4.0, "Memory to use, in GB, beyond what the idle process takes (0.3 GB).")
_SKIP_MTP = flags.DEFINE_bool("skip_mtp", False, "Leave out the multi-token-prediction layers (num_hidden_layers and up).")


def main(argv: list[str]) -> None:
    jax.config.update("jax_platforms", "cpu")  # nothing here needs a GPU, and Orbax would otherwise take its memory
    convert(cli.resolve(_HF.value, "hf_ckpt_path"), cli.resolve(_SAVE.value, "save_path"), _MEMORY.value, _SKIP_MTP.value)


def run() -> None:
    cli.run(main)


if __name__ == "__main__":
    run()
