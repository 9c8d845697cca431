"""What the engine promises whatever the model: rows keep to themselves, chunks and buckets change nothing, limits are errors."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from dsv3_jax import Engine, Sampling
from dsv3_jax.generation import engine as engine_module
from dsv3_jax.kernels import dispatch
from tests import tolerances

PROMPTS = [[5, 9, 13], [7] * 11, list(range(3, 19)), [40]]
WARM = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=7)


@pytest.fixture(scope="module")
def v3(engine) -> Engine:
    return engine("v3")


def test_ragged_batch_equals_singles(v3):
    for alone, together in zip([v3.logits([p])[0] for p in PROMPTS], v3.logits(PROMPTS), strict=True):
        tolerances.FLOAT32_SELF.check(together, alone)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3), WARM], ids=["greedy", "random", "filtered"])
def test_a_row_does_not_depend_on_its_neighbours(v3, sampling):
    alone = [v3.generate([p], sampling, 12, stop_token_ids=())[0].tokens for p in PROMPTS]
    together = [c.tokens for c in v3.generate(PROMPTS, sampling, 12, stop_token_ids=())]
    assert together == alone


def test_greedy_decoding_equals_teacher_forcing(v3):
    for prompt, done in zip(PROMPTS, v3.generate(PROMPTS, max_new_tokens=16, stop_token_ids=()), strict=True):
        forced = v3.logits([prompt + done.tokens[:-1]])[0]
        assert forced[len(prompt) - 1 :].argmax(-1).tolist() == done.tokens


def test_absorb_equals_naive(engine, v3):
    for a, b in zip(v3.logits(PROMPTS), engine("v3", attn_impl="naive").logits(PROMPTS), strict=True):
        tolerances.FLOAT32_SELF.check(a, b)


def test_seeds_repeat_and_differ(v3):
    draws = {s: v3.generate(PROMPTS[:1], Sampling(temperature=1.5, seed=s), 16, stop_token_ids=())[0].tokens for s in (1, 2, 3)}
    assert draws[1] != draws[2] != draws[3]
    assert v3.generate(PROMPTS[:1], Sampling(temperature=1.5, seed=2), 16, stop_token_ids=())[0].tokens == draws[2]


def test_more_prompts_than_the_batch_and_a_sampling_for_each(engine):
    small = engine("v3", max_batch_size=2)
    settings = [Sampling(), WARM, Sampling(temperature=1.0), WARM]
    seen: dict[int, list[int]] = {}
    done = small.generate(PROMPTS, settings, 6, stop_token_ids=(), on_token=lambda i, t: seen.setdefault(i, []).append(t))
    for i, (prompt, each) in enumerate(zip(PROMPTS, settings, strict=True)):
        assert done[i].tokens == small.generate([prompt], each, 6, stop_token_ids=())[0].tokens == seen[i]
        assert (done[i].prompt_tokens, done[i].finish_reason) == (len(prompt), "length")
        assert done[i].time_to_first_token > 0


def test_stopping(v3):
    free = v3.generate(PROMPTS[:2], max_new_tokens=10, stop_token_ids=())
    stop = free[0].tokens[4]
    cut = v3.generate(PROMPTS[:2], max_new_tokens=10, stop_token_ids=(stop,))
    for before, after in zip(free, cut, strict=True):
        kept = list(itertools.takewhile(lambda t: t != stop, before.tokens))
        assert after.tokens == kept
        assert after.finish_reason == ("stop" if stop in before.tokens else "length")
    assert v3.eos_token_ids == v3.config.eos_token_id  # of generation_config.json
    ended = v3.generate(PROMPTS[:1], max_new_tokens=10, stop_token_ids=(), on_token=lambda i, t: t == free[0].tokens[2])[0]
    assert (ended.tokens, ended.finish_reason) == (free[0].tokens[: free[0].tokens.index(free[0].tokens[2]) + 1], "stop")


def test_generation_ends_at_max_seq_len(v3):
    prompt = [3 + i % 90 for i in range(v3.max_seq_len - 5)]
    done = v3.generate([prompt, [4, 5]], max_new_tokens=20, stop_token_ids=())
    assert [len(c.tokens) for c in done] == [5, 20]
    full = v3.logits([prompt + done[0].tokens[:-1]])[0]
    assert full[-5:].argmax(-1).tolist() == done[0].tokens


def test_an_interrupt_leaves_the_engine_usable(v3):
    def interrupt(i: int, token: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        v3.generate(PROMPTS, max_new_tokens=8, on_token=interrupt)
    assert len(v3.generate(PROMPTS, max_new_tokens=3, stop_token_ids=())[0].tokens) == 3


def test_prompts_of_many_lengths_compile_no_more_than_the_buckets(engine):
    small = engine("v2lite", max_batch_size=1)
    for n in range(1, 41):
        small.generate([[9] * n], max_new_tokens=2, stop_token_ids=())
    assert small._prefill._cache_size() == 3  # 16, 32 and 64 tokens
    assert small._decode._cache_size() == 1


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "prompt 1: holds no tokens"),
        ([[1] * 257], "prompt 0: 257 tokens, and at most 25[56] fit"),
        ([[320]], r"prompt 0\[0\] = 320: must be an integer from 0 to 319"),
        ([[5, -1]], r"prompt 0\[1\] = -1: must be an integer from 0 to 319"),
        ([[1.7]], r"prompt 0\[0\] = 1.7: must be an integer"),
        ([[True]], r"prompt 0\[0\] = True: must be an integer"),
        ([1, 2, 3], r"for one prompt write \[\[...\]\]"),
        ("abc", "must be a list of prompts"),
        (["abc"], "a text has to be tokenized first"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused_before_any_does(v3, prompts, message):
    with pytest.raises(ValueError, match=message):
        v3.generate(prompts, on_token=lambda i, t: pytest.fail("ran"))
    with pytest.raises(ValueError, match=message):
        v3.logits(prompts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens = 0: must be an integer of at least 1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens = 2.5: must be an integer"),
        ({"sampling": None}, "sampling = None: must be one Sampling"),
        ({"sampling": [Sampling()]}, "a list with one for each of the 2 prompts"),
        ({"stop_token_ids": ["3"]}, "stop_token_ids = '3': must be an integer"),
        ({"stop_token_ids": 3}, "stop_token_ids = 3: must be a list of token ids"),
    ],
)
def test_settings_of_a_call_are_checked(v3, arguments, message):
    with pytest.raises(ValueError, match=message):
        v3.generate([[5], [6]], **arguments)


def test_a_prompt_may_fill_max_seq_len_where_no_answer_is_wanted(v3):
    assert v3.logits([[7] * 256])[0].shape == (256, 320)


def test_rows_that_have_ended_are_neither_cached_nor_routed(v3, monkeypatch):
    """Five prompts make eight rows; one ends at its first token, one after three, and three are padding."""
    prompts = [[5, 9, 13], [7] * 11, [40], [41], [42]]
    free = [c.tokens for c in v3.generate(prompts, max_new_tokens=8, stop_token_ids=())]
    lengths, decode = [], v3._decode

    def spy(*arguments, **settings):
        cache, *rest = decode(*arguments, **settings)
        lengths.append(np.asarray(cache.lengths).tolist())
        return cache, *rest

    monkeypatch.setattr(v3, "_decode", spy)
    stop = free[0][0]
    done = v3.generate(prompts, max_new_tokens=8, stop_token_ids=(stop,))
    for prompt, completion, length in zip(prompts, done, lengths[-1], strict=False):
        # The token that ends an answer, or fills it up, is never appended.
        assert length == len(prompt) + len(completion.tokens) - (completion.finish_reason == "length")
    assert done[0].tokens == [] and lengths[-1][0] == 3 and lengths[-1][5:] == [0, 0, 0]


def test_the_cache_stays_within_the_limits(engine):
    small = engine("v3", max_batch_size=5, max_seq_len=150)
    with small._running():
        cache = small._start([[1]] * 5, 150)
    assert cache.layers[0][0].shape[:2] == (5, 256)
    assert engine("v3", max_batch_size=3)._row_count(3) == 3
    with engine("v3", mesh="data=2,model=4")._running():
        assert engine("v3", mesh="data=2,model=4")._row_count(3) == 4


def test_neighbours_content_changes_nothing_in_bf16(engine):
    """Bit for bit, in batches of one shape: what others say, and where they are routed, does not reach a row."""
    half = engine("v3_dec", dtype="bfloat16")
    crowds = [[[5, 9, 13], [n] * 16, [n + 1, 7], [n + 2] * 9] for n in (3, 60, 200)]
    rows = [half.logits(crowd)[0] for crowd in crowds]
    assert (rows[0] == rows[1]).all() and (rows[0] == rows[2]).all()
    answers = [half.generate(crowd, Sampling(temperature=1.0), 12, stop_token_ids=())[0].tokens for crowd in crowds]
    assert answers[0] == answers[1] == answers[2]


def test_bf16_decoding_follows_teacher_forcing(engine):
    """Token by token or all at once differ by bf16 rounding: every greedy token is within that of the best one."""
    half = engine("v3_dec", dtype="bfloat16")
    for prompt, done in zip(PROMPTS, half.generate(PROMPTS, max_new_tokens=16, stop_token_ids=()), strict=True):
        forced = half.logits([prompt + done.tokens[:-1]])[0][len(prompt) - 1 :]
        behind = forced.max(-1) - np.take_along_axis(forced, np.array(done.tokens)[:, None], -1)[:, 0]
        assert behind.max() <= 3 * tolerances.BF16_DECISIVE.rms


def test_logits_that_are_not_finite_are_reported(engine):
    broken = engine("v2lite", max_batch_size=2, max_seq_len=64)
    norm = broken.params["norm"]["weight"]
    broken.params["norm"]["weight"] = norm * np.nan
    with pytest.raises(RuntimeError, match=r"logits are not finite; run verify.py"):
        broken.generate([[5]], max_new_tokens=2)
    broken.params["norm"]["weight"] = norm


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh": "model=3"}, "does not divide this model; model can be 1, 2, 4"),
        ({"mesh": "data=16"}, "needs 16 devices, and 8 are here"),
        ({"mesh": "tensor=2"}, "must look like 'data=2,model=4'"),
        ({"expert_axes": "data"}, "expert_axes = 'data': must be 'model' or 'data,model'"),
        ({"dtype": "float16"}, "dtype = 'float16': must be one of bfloat16, float32"),
        ({"attn_impl": "flash"}, "attn_impl = 'flash': must be one of absorb, naive"),
        ({"gemm_impl": "fp8"}, "gemm_impl = 'fp8': the checkpoint's weights are not FP8"),
        ({"max_seq_len": 0}, "max_seq_len = 0: must be an integer from 2 to 163840"),
        ({"max_seq_len": 200000}, "max_seq_len = 200000: must be an integer from 2 to 163840"),
        ({"max_batch_size": 2.5}, "max_batch_size = 2.5: must be an integer of at least 1"),
        ({"implementation": "triton"}, "implementation = 'triton'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_loading(converted, monkeypatch, arguments, message):
    monkeypatch.setattr(engine_module.load, "load_model", lambda *a: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=message):
        Engine.from_checkpoint(converted("v3"), **arguments)


@pytest.mark.parametrize(
    ("dtype", "capability", "expected"),
    [("bfloat16", 90, "fp8"), ("float32", 90, "bf16"), ("bfloat16", 89, "bf16"), ("bfloat16", 80, "bf16")],
)
def test_fp8_products_where_nothing_else_is_asked_for(converted, monkeypatch, dtype, capability, expected):
    """On the GPU that has the kernel; who asks for float32 wants no rounding to 4 bits on the way."""
    monkeypatch.setattr(engine_module.load, "load_model", lambda *a: (None, {}))
    with dispatch.compile_only(capability):
        assert Engine.from_checkpoint(converted("tiny"), dtype=dtype).options.gemm_impl == expected
        assert Engine.from_checkpoint(converted("tiny"), dtype=dtype, gemm_impl="bf16").options.gemm_impl == "bf16"


def test_a_config_that_contradicts_the_checkpoint_names_the_tensors(converted, tmp_path):
    with open(f"{converted('v3')}/config.json") as f:
        config = json.load(f)
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    with pytest.raises(ValueError, match=r"layers.0.mlp.gate_up_proj.weight is \(2, 96, 64\) in the checkpoint, expected \(2, 128, 64\)"):
        Engine.from_checkpoint(converted("v3"), config=tmp_path / "config.json", max_seq_len=64)


def test_parameters_lie_where_the_table_says(engine):
    """Each device holds its share and no more; a layout said to only one of array and Param would load everything everywhere."""
    params = engine("v3", mesh="data=2,model=4").params
    layer = params["layers"]["1"]
    share = {
        "vocab": (params["embed_tokens"]["weight"], 4),
        "heads": (layer["self_attn"]["q_b_proj"]["weight"], 4),
        "absorbed": (layer["self_attn"]["w_uk"], 4),
        "row parallel": (layer["self_attn"]["o_proj"]["weight"], 4),
        "ffn": (params["layers"]["0"]["mlp"]["gate_up_proj"]["weight"], 4),
        "experts": (layer["mlp"]["experts"]["gate_up_proj"]["weight"], 4),
        "whole": (layer["self_attn"]["qkv_a_proj"]["weight"], 1),
    }
    for name, (array, parts) in share.items():
        assert {s.data.size for s in array.addressable_shards} == {array.size // parts}, name
    over_both = engine("v3", mesh="data=2,model=4", expert_axes="data,model").params["layers"]["1"]["mlp"]["experts"]["down_proj"]["weight"]
    assert {s.data.size for s in over_both.addressable_shards} == {over_both.size // 8}
