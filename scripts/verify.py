"""Compare a converted checkpoint with the Hugging Face checkpoint that it came from, bit for bit.

    dsv3-verify --hf_ckpt_path=~/DeepSeek-V3 --ckpt_path=~/deepseek-v3

Reads both whole, in blocks, and needs no GPU. Names every tensor that differs and every one that holds NaN, infinity or a
scale that is not positive, with the first place. Exit code: 0 equal and finite, 1 something was found, 2 wrong arguments.
"""

import jax
from absl import flags

from dsv3_jax import cli
from dsv3_jax.checkpoint.verify import summary, verify

_HF = flags.DEFINE_string("hf_ckpt_path", None, "Folder of the Hugging Face checkpoint.", required=True)
_CKPT = flags.DEFINE_string("ckpt_path", None, "Folder that dsv3-convert made from it.", required=True)


def main(argv: list[str]) -> int:
    jax.config.update("jax_platforms", "cpu")
    report = verify(cli.resolve(_HF.value, "hf_ckpt_path"), cli.resolve(_CKPT.value, "ckpt_path"))
    print(summary(report))
    return 1 if report.different or report.not_finite else 0


def run() -> None:
    cli.run(main)


if __name__ == "__main__":
    run()
