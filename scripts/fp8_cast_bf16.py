"""Cast an FP8 Hugging Face checkpoint to bf16, into a new Hugging Face folder.

    dsv3-fp8-cast-bf16 --input_fp8_hf_path=~/DeepSeek-V3 --output_bf16_hf_path=~/DeepSeek-V3-bf16

Runs on any CPU, in little memory, shard by shard; needs about twice the input's bytes on disk. A weight's scales may lie in any
shard; a weight without scales is an error before anything is written. Tensors that are not FP8 are copied as they are, known
or not (V3.2's indexer too). Interrupted or killed: run the same command again and it goes on.
"""

from absl import flags

from dsv3_jax import cli
from dsv3_jax.checkpoint.cast import cast

_IN = flags.DEFINE_string("input_fp8_hf_path", None, "Folder with config.json, *.safetensors and their index.", required=True)
_OUT = flags.DEFINE_string("output_bf16_hf_path", None, "Folder to make; the work goes on in OUTPUT.casting.", required=True)


def main(argv: list[str]) -> None:
    for line in cast(cli.resolve(_IN.value, "input_fp8_hf_path"), cli.resolve(_OUT.value, "output_bf16_hf_path")):
        print(line)


def run() -> None:
    cli.run(main)


if __name__ == "__main__":
    run()
