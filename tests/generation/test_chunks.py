"""How prompts are cut into calls: every token once and in order, whole prompts where they fit, few shapes."""

from __future__ import annotations

import numpy as np
import pytest

from dsv3_jax.generation.chunks import chunks


def prompts_of(lengths) -> list[list[int]]:
    return [list(range(1000 * i, 1000 * i + n)) for i, n in enumerate(lengths, start=1)]


@pytest.mark.parametrize(("rows", "data"), [(4, 1), (8, 1), (8, 2), (8, 8), (12, 4)])
@pytest.mark.parametrize("budget", [16, 100, 8192])
def test_every_token_is_read_once_and_in_its_place(rows, data, budget):
    rng = np.random.default_rng(rows * data)
    prompts = prompts_of(rng.integers(1, 300, size=rows - 1))  # one row is padding
    read: list[list[int]] = [[] for _ in range(rows)]
    for c in chunks(prompts, rows, data, budget, slots=512):
        assert len(set(c.prompts.tolist())) == len(c.prompts) == len(c.tokens) == len(c.new) and c.new.max() > 0
        np.testing.assert_array_equal(c.rows, c.prompts % (rows // data))
        np.testing.assert_array_equal(c.prompts // (rows // data), np.repeat(np.arange(data), len(c.prompts) // data))
        assert c.tokens.size <= data * budget or c.tokens.shape == (data, 16)
        for row, tokens, n in zip(c.prompts, c.tokens, c.new, strict=True):
            read[row] += tokens[:n].tolist()
            assert n == 0 or len(read[row]) <= c.context <= 512
            assert not tokens[n:].any()
    assert read == [*prompts, []]


def shapes(lengths, rows, data=1, budget=8192, slots=4096):
    return [(*c.tokens.shape, c.context) for c in chunks(prompts_of(lengths), rows, data, budget, slots)]


def test_whole_prompts_go_together_as_far_as_the_budget_reaches():
    assert shapes([1024] * 32, 32) == [(8, 1024, 1024)] * 4
    assert shapes([4096] * 3, 4, slots=8192) == [(2, 4096, 4096)] * 2
    assert shapes([20], 1) == [(1, 32, 32)]
    assert shapes([1024] * 32, 32, data=4) == [(4 * 8, 1024, 1024)]


def test_like_lengths_go_together():
    assert shapes([900, 20, 800, 30], 4, budget=2048) == [(2, 1024, 1024), (2, 32, 32)]


def test_a_prompt_longer_than_the_budget_is_read_piece_by_piece():
    assert shapes([5000, 10], 2, budget=2048) == [(1, 2048, 2048), (1, 2048, 4096), (1, 1024, 4096), (1, 16, 16)]


def test_calls_of_padding_alone_are_left_out():
    assert shapes([4096], 4) == [(2, 4096, 4096)]


def test_few_shapes_for_many_lengths():
    rng = np.random.default_rng(0)
    seen = {shape for _ in range(50) for shape in shapes(rng.integers(1, 4000, size=rng.integers(1, 9)), 8)}
    assert len(seen) <= 2 * 9 + 6  # widths of 16 to 4096, alone or several at once
