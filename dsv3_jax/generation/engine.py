"""The engine: a loaded model on a mesh, its compiled steps, and the loop that turns prompts into tokens.

B rows of a batch, T tokens per row in one call, V vocab_size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv3_jax import distributed
from dsv3_jax.checkpoint import load, store
from dsv3_jax.config import ModelConfig
from dsv3_jax.generation import requests, steps
from dsv3_jax.generation import sampling as sampling_lib
from dsv3_jax.generation.answer import Answer, OnToken
from dsv3_jax.generation.chunks import Chunk, bucket, chunks
from dsv3_jax.generation.requests import Request
from dsv3_jax.generation.sampling import Sampling
from dsv3_jax.generation.settings import Settings, settle
from dsv3_jax.generation.stops import stop_token_ids as read_stop_token_ids
from dsv3_jax.model.cache import KVCache, init_cache

PREFILL_TOKENS = 8192  # of one data row's prompts in one prefill call: bounds activations
LOGIT_TOKENS = 1024  # of all rows in one call that returns every token's logits, half a GB for a vocabulary of 129,280


@dataclasses.dataclass(frozen=True)
class Completion:
    """What was generated for one prompt.

    tokens: without the stopping token. finish_reason: 'stop' (a stop token, or on_token said so) or 'length' (max_new_tokens or
    max_seq_len reached). prompt_tokens: the prompt's length. time_to_first_token: seconds from the start of its batch.
    """

    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    time_to_first_token: float


class Engine:
    """A model ready to generate; build it with `Engine.from_checkpoint`."""

    def __init__(
        self,
        config: ModelConfig,
        settings: Settings,
        graph: nnx.GraphDef,
        params: load.Params,
        *,
        eos_token_ids: Sequence[int] = (),
    ):
        self.config, self.options, self.sharding = config, settings.options, settings.sharding
        self.graph, self.params = graph, params
        self.max_seq_len, self.max_batch_size = settings.max_seq_len, settings.max_batch_size
        self.eos_token_ids = tuple(eos_token_ids)
        jit = functools.partial(jax.jit, donate_argnames="cache")
        self._prefill = jax.jit(functools.partial(steps.prefill, graph), static_argnames="context", donate_argnames=("cache", "logits"))
        self._append_all = jit(functools.partial(steps.every_token, graph), static_argnames="context")
        self._decode = jit(functools.partial(steps.decode, graph), static_argnames="mode")
        self._choose = jax.jit(steps.choose, static_argnames="mode")
        self._end = jax.jit(steps.end)
        self._init_cache = jax.jit(functools.partial(init_cache, config, self.options, self.sharding), static_argnums=(0, 1))

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike,
        mesh: str = "data=1,model=1",
        dtype: str = "bfloat16",
        attn_impl: str = "absorb",
        gemm_impl: str | None = None,
        max_seq_len: int | None = None,
        max_batch_size: int = 8,
        *,
        expert_axes: str = "model",
        config: str | os.PathLike | None = None,
        gate_dtype: str = "float32",
        reference_scale_fmt: bool = False,
        implementation: str | None = None,
    ) -> Engine:
        """Load a checkpoint made by convert.py onto a mesh.

        mesh: 'data=2,model=4'. dtype: 'bfloat16' or 'float32'. attn_impl: 'absorb' or 'naive'. gemm_impl: 'bf16', 'fp8', or None for
        fp8 where the checkpoint is FP8, dtype is 'bfloat16' and the GPU has the kernels. max_seq_len: prompt and answer together, per
        row; None for 4096, or max_position_embeddings if that is less. max_batch_size: rows that run at once. config: a config.json
        that replaces the checkpoint's. The rest is documented in Options.
        Raises ValueError, before any weight is read, for arguments that do not fit each other, the model or the devices.
        """
        path = os.path.abspath(os.path.expanduser(os.fspath(path)))
        cfg = store.read_config(path)
        cfg = cfg if config is None else ModelConfig.from_json(config)
        eos = read_stop_token_ids(path, cfg)
        chosen = {"dtype": dtype, "attn_impl": attn_impl, "gate_dtype": gate_dtype, "reference_scale_fmt": reference_scale_fmt}
        chosen |= {"gemm_impl": gemm_impl, "implementation": implementation}
        s = settle(cfg, mesh, expert_axes, max_seq_len, max_batch_size, **chosen)
        graph, params = load.load_model(path, cfg, s.options, s.sharding, s.max_seq_len)
        return cls(cfg, s, graph, params, eos_token_ids=eos)

    def check_prompt(self, tokens: Sequence[int]) -> None:
        """Raise ValueError for a prompt that `generate` cannot run: empty, too long for max_seq_len, or not token ids of the vocabulary."""
        requests.check_prompt(tokens, self.config.vocab_size, self.max_seq_len - 1)

    def logits(self, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Logits after every token of every prompt: a list of float32 arrays (tokens, vocab_size).

        Raises ValueError, before anything runs, for a prompt that is empty, longer than max_seq_len or not token ids.
        """
        return [logits for logits, _ in self._every_token(prompts)]

    def routing(self, prompts: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Where every token of every prompt is routed: topk_ids int32 and topk_weights float32, each (MoE layers, tokens, experts)."""
        return [routing for _, routing in self._every_token(prompts)]

    def _every_token(self, prompts):
        vocab, most = self.config.vocab_size, self.max_seq_len
        prompts = [requests.check_prompt(p, vocab, most, f"prompt {i}") for i, p in enumerate(requests.as_list(prompts))]
        results = []
        for start in range(0, len(prompts), self.max_batch_size):
            batch = prompts[start : start + self.max_batch_size]
            parts: list[list[tuple]] = [[] for _ in range(self._row_count(len(batch)))]
            with self._running():
                cache = self._start(batch, max(map(len, batch)))
                for chunk, arrays in self._chunks(batch, LOGIT_TOKENS // self.sharding.size("batch"), cache):
                    cache, *rest = self._append_all(self.params, cache, *arrays, context=chunk.context)
                    logits, ids, weights = (np.asarray(a) for a in rest)
                    for g, (row, n) in enumerate(zip(chunk.prompts, chunk.new, strict=True)):
                        parts[row].append((logits[g, :n], ids[:, g, :n], weights[:, g, :n]))
            for part in parts[: len(batch)]:
                logits, ids, weights = (np.concatenate(arrays, axis=-2) for arrays in zip(*part, strict=True))
                results.append((logits, (ids, weights)))
        return results

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008 (frozen)
        max_new_tokens: int = 200,
        *,
        stop_token_ids: Sequence[int] | None = None,
        on_token: OnToken | None = None,
    ) -> list[Completion]:
        """Complete any number of prompts, max_batch_size at a time, and return their completions in order.

        sampling: one for all prompts, or one each. stop_token_ids: None for the checkpoint's end-of-sequence ids, () for none.
        on_token(i, token) is called on the host, in order, for each token of prompt i as it arrives; True ends that prompt. Of several
        processes (dsv3_jax.distributed) each makes the same call, and what process 0's on_token says counts for all.
        Raises ValueError before anything runs for a prompt that does not pass `check_prompt` and for settings out of range, and
        RuntimeError if the model's logits are not finite.
        """
        todo = requests.make_requests(prompts, sampling, max_new_tokens, self.config.vocab_size, self.max_seq_len)
        stops = list(self.eos_token_ids) if stop_token_ids is None else requests.check_stops(stop_token_ids)
        done: list[Completion] = []
        for start in range(0, len(todo), self.max_batch_size):
            with self._running():
                done += self._generate_batch(todo[start : start + self.max_batch_size], stops, on_token, start)
        return done

    def _generate_batch(self, batch: list[Request], stops: list[int], on_token: OnToken | None, first: int) -> list[Completion]:
        began = time.perf_counter()
        prompts = [r.tokens for r in batch]
        cache = self._start(prompts, max(len(r.tokens) + r.limit for r in batch))
        rows, mode = self._rows(batch, stops, cache.lengths.shape[0]), sampling_lib.mode([r.sampling for r in batch])
        cache, logits = self._read(prompts, cache)
        rows = self._choose(logits, cache.lengths, rows, mode=mode)

        answers = [Answer(r, set(stops)) for r in batch]
        unread, chosen, longest, first_token = [rows.token[None]], 1, max(r.limit for r in batch), 0.0
        while True:
            # The host reads one call behind the device; only the first token waits for nothing else.
            while first_token and len(unread) < 2 and chosen < longest:
                cache, rows, tokens = self._decode(self.params, cache, rows, mode=mode)
                unread.append(tokens)
                chosen += steps.DECODED
            tokens = np.asarray(unread.pop(0))  # (DECODED, B)
            first_token = first_token or time.perf_counter() - began
            ended = np.zeros(len(rows.left), bool)
            for token in tokens:
                for i, answer in enumerate(answers):
                    ended[i] |= answer.add(int(token[i]), first + i, on_token)
            if distributed.count() > 1:  # on_token is process 0's, and the others must not wait for calls that it will not make
                ended = distributed.broadcast(ended).astype(bool)
                for answer, over in zip(answers, ended, strict=False):
                    answer.reason = answer.reason or ("stop" if over else "")
            if all(a.reason for a in answers):
                return [Completion(a.tokens, a.reason, len(a.request.tokens), first_token) for a in answers]
            if ended.any():
                rows = self._end(rows, ended)

    @contextlib.contextmanager
    def _running(self):
        precision = "highest" if self.options.dtype == "float32" else None  # no TF32 where float32 was asked for
        with jax.set_mesh(self.sharding.mesh), jax.default_matmul_precision(precision):
            yield

    def _start(self, prompts, slots: int) -> KVCache:
        """An empty cache for these prompts: rows and slots are rounded up, so that few shapes are compiled, but not past the limits."""
        most = -(-self.max_seq_len // steps.SMALLEST_CACHE) * steps.SMALLEST_CACHE
        return self._init_cache(self._row_count(len(prompts)), min(bucket(slots, steps.SMALLEST_CACHE), most))

    def _row_count(self, prompts: int) -> int:
        data = self.sharding.size("batch")
        return data * min(bucket(-(-prompts // data)), -(-self.max_batch_size // data))

    def _rows(self, batch: list[Request], stops: list[int], count: int) -> steps.Rows:
        padding = count - len(batch)
        put = functools.partial(jax.device_put, device=self.sharding.named(None))
        return steps.Rows(
            token=put(np.zeros(count, np.int32)),
            active=put(np.array([True] * len(batch) + [False] * padding)),
            left=put(np.array([r.limit for r in batch] + [0] * padding, np.int32)),
            settings=put(sampling_lib.stack([r.sampling for r in batch] + [Sampling()] * padding)),
            stops=put(np.array(stops, np.int32)),
        )

    def _read(self, prompts, cache: KVCache) -> tuple[KVCache, jax.Array]:
        """The prompts in the empty cache, and the logits (B, V) after the last token of each."""
        shape, layout = (len(cache.lengths), self.config.vocab_size), self.sharding.named("batch", "vocab")
        logits = jnp.zeros(shape, jnp.float32, out_sharding=layout)
        for chunk, arrays in self._chunks(prompts, PREFILL_TOKENS, cache):
            cache, logits = self._prefill(self.params, cache, *arrays, logits, context=chunk.context)
        return cache, logits

    def _chunks(self, prompts, budget: int, cache: KVCache) -> Iterator[tuple[Chunk, tuple[jax.Array, ...]]]:
        """The chunks of the prompts for the empty `cache`, and of each its rows, tokens and their number on the devices."""
        data, slots = self.sharding.size("batch"), cache.layers[0][0].shape[1]
        for c in chunks(prompts, len(cache.lengths), data, budget, slots):
            yield c, tuple(jax.device_put(a, self.sharding.named("batch", *(None,) * (a.ndim - 1))) for a in (c.rows, c.tokens, c.new))
