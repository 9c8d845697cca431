"""Choose the kernels' tile sizes for the GPU at hand, by timing them.

    dsv3-tune-kernels --what=gemm,grouped --deadline_s=300
    dsv3-tune-kernels --what=gemm --tokens=8,64,128 --shapes=v3 --shards=1,8 --out=tuned.json
    dsv3-tune-kernels --what=gemm --shapes=4096x7168,2112x7168

For each number of tokens and each weight it tries the tiles in use and their likely rivals, checks every result against a float32
product, and writes the fastest to a table by GPU, kernels/tuned/<gpu>.json unless --out names another file. Entries that this run
does not measure stay as they are. Models look the table up; shapes that are not in it use a rule of thumb. The table is written after
each better result, so that a run that is cut short loses nothing. Standard output gets a JSON line for each candidate, standard error
the progress.

Exit code 0 when all is well, 1 if nothing could be measured, 2 for a wrong flag or file.
"""

from __future__ import annotations

from absl import flags

from dsv3_jax import cli

_WHAT = flags.DEFINE_string("what", "gemm,grouped", "Kernels to tune: gemm, grouped or both.")
_TOKENS = flags.DEFINE_string("tokens", "8,16,32,64,128,512,4096", "gemm: tokens; a table's entry is for up to so many.")
_ROWS = flags.DEFINE_string("rows", "1,4,8,16,64,256", "grouped: rows of an expert.")
_SHAPES = flags.DEFINE_string("shapes", "v3", "Weights: v3, v2_lite, or NxK such as 4096x7168 (gemm alone); a list likewise.")
_SHARDS = flags.DEFINE_string("shards", "1", "Widths of tensor parallelism whose shares of v3's and v2_lite's weights to tune: 1,2,4,8,16.")
_OUT = flags.DEFINE_string("out", None, "Table to write; left out, the one that models on this GPU look up.")
_DEADLINE_S = flags.DEFINE_float("deadline_s", None, "Stop after so many seconds, with what has been found.")
_PROCESSES = flags.DEFINE_integer(
    "processes", None, "Processes that compile side by side and take turns on the GPU; 0: none but this one.", lower_bound=0
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the operands.", lower_bound=0, upper_bound=1_000_000)


def main(argv: list[str]) -> int:
    del argv
    from dsv3_jax.benchmark import pool, tune

    pool.need_gpu("dsv3-tune-kernels")
    return tune.main(
        what=_WHAT.value, tokens=_TOKENS.value, rows=_ROWS.value, shapes=_SHAPES.value, shards=_SHARDS.value, out=_OUT.value,
        deadline_s=_DEADLINE_S.value, processes=_PROCESSES.value, seed=_SEED.value,
    )  # fmt: skip


def run() -> None:
    cli.run(main)


if __name__ == "__main__":
    run()
