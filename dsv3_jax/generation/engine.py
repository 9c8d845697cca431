"""The engine: a loaded model on a mesh, its compiled steps, and the loop that turns prompts into tokens.

B rows of a batch, T tokens per row in one call, V vocab_size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv3_jax import sharding as sharding_lib
from dsv3_jax.checkpoint import load, store
from dsv3_jax.config import ModelConfig
from dsv3_jax.generation import sampling as sampling_lib
from dsv3_jax.generation import steps
from dsv3_jax.generation.sampling import Sampling
from dsv3_jax.model.cache import KVCache, init_cache
from dsv3_jax.model.options import Options
from dsv3_jax.sharding import Sharding

DEFAULT_SEQ_LEN = 4096
PREFILL_CHUNK = 2048  # tokens per row in one prefill call: bounds activation memory

OnToken = Callable[[int, int], bool | None]


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
        options: Options,
        sharding: Sharding,
        graph: nnx.GraphDef,
        params: load.Params,
        *,
        max_seq_len: int,
        max_batch_size: int,
        eos_token_ids: Sequence[int] = (),
    ):
        self.config, self.options, self.sharding, self.params = config, options, sharding, params
        self.max_seq_len, self.max_batch_size, self.eos_token_ids = max_seq_len, max_batch_size, tuple(eos_token_ids)
        self._prefill = jax.jit(functools.partial(steps.prefill, graph), donate_argnames=("cache", "logits"))
        self._append_all = jax.jit(functools.partial(steps.every_token, graph), donate_argnames="cache")
        self._decode = jax.jit(functools.partial(steps.decode, graph), static_argnames="mode", donate_argnames="cache")
        self._sample = jax.jit(steps.choose, static_argnames="mode")
        self._init_cache = jax.jit(functools.partial(init_cache, config, options, sharding), static_argnums=(0, 1))

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
        fp8 where both the checkpoint and the GPU have it. max_seq_len: prompt and answer together, per row; None for
        4096 or what the model was trained for, if less. max_batch_size: rows that
        run at once. config: a config.json that replaces the checkpoint's. The rest is documented in Options.
        Raises ValueError, before any weight is read, for arguments that do not fit each other, the model or the devices.
        """
        path = os.path.abspath(os.path.expanduser(os.fspath(path)))
        cfg = store.read_config(path)
        cfg = cfg if config is None else ModelConfig.from_json(config)
        max_seq_len = min(DEFAULT_SEQ_LEN, cfg.max_position_embeddings) if max_seq_len is None else max_seq_len
        for name, value in (("max_seq_len", max_seq_len), ("max_batch_size", max_batch_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} = {value!r}: must be a positive integer")
        if max_seq_len > cfg.max_position_embeddings:
            raise ValueError(f"max_seq_len = {max_seq_len}: the model's max_position_embeddings is {cfg.max_position_embeddings}")
        options = Options(dtype, attn_impl, gemm_impl or "bf16", gate_dtype, reference_scale_fmt, implementation)
        options.check(cfg)
        sharding_lib.check(cfg, mesh, expert_axes)
        eos = _eos_token_ids(path, cfg)
        use_compilation_cache()
        sharding = sharding_lib.make_sharding(mesh, expert_axes)
        if gemm_impl is None and cfg.quantization_config and _has_fp8(sharding):
            options = dataclasses.replace(options, gemm_impl="fp8")
        graph, params = load.load_model(path, cfg, options, sharding, max_seq_len)
        return cls(cfg, options, sharding, graph, params, max_seq_len=max_seq_len, max_batch_size=max_batch_size, eos_token_ids=eos)

    def check_prompt(self, tokens: Sequence[int]) -> None:
        """Raise ValueError for a prompt that cannot run: empty, too long for max_seq_len, or with ids outside the vocabulary."""
        if not len(tokens):
            raise ValueError("prompt: holds no tokens")
        if len(tokens) >= self.max_seq_len:
            raise ValueError(f"prompt: {len(tokens)} tokens leave no room for an answer within max_seq_len {self.max_seq_len}")
        bad = [t for t in tokens if not 0 <= t < self.config.vocab_size]
        if bad:
            raise ValueError(f"prompt: token id {bad[0]} lies outside the vocabulary (vocab_size {self.config.vocab_size})")

    def logits(self, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Logits after every token of every prompt: a list of float32 arrays (tokens, vocab_size). Raises as `check_prompt`."""
        return [logits for logits, _ in self._every_token(prompts)]

    def routing(self, prompts: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Where every token of every prompt is routed: topk_ids int32 and topk_weights float32, each (MoE layers, tokens, experts)."""
        return [routing for _, routing in self._every_token(prompts)]

    def _every_token(self, prompts):
        self._check_all(prompts)
        results = []
        for start in range(0, len(prompts), self.max_batch_size):
            batch, chunks = prompts[start : start + self.max_batch_size], []
            with self._running():
                cache = self._start(batch, max(map(len, batch)))
                for tokens, new in self._chunks(batch):
                    cache, *rest = self._append_all(self.params, cache, self._put(tokens), self._put(new))
                    chunks.append([np.asarray(a) for a in rest])
            logits, ids, weights = (np.concatenate(parts, axis=-2) for parts in zip(*chunks, strict=True))
            for i, p in enumerate(batch):
                results.append((logits[i, : len(p)], (ids[:, i, : len(p)], weights[:, i, : len(p)])))
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
        on_token(i, token) is called on the host, in order, for each token of prompt i as it arrives; True ends that prompt.
        Raises ValueError before anything runs if a prompt does not pass `check_prompt`.
        """
        self._check_all(prompts)
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {max_new_tokens!r}: must be at least 1")
        rows = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(rows) != len(prompts):
            raise ValueError(f"sampling: {len(rows)} given for {len(prompts)} prompts; give one, or one each")
        stops = frozenset(self.eos_token_ids if stop_token_ids is None else stop_token_ids)
        done: list[Completion] = []
        for start in range(0, len(prompts), self.max_batch_size):
            end = start + self.max_batch_size
            with self._running():
                done += self._generate_batch(prompts[start:end], rows[start:end], max_new_tokens, stops, on_token, start)
        return done

    def _generate_batch(self, prompts, rows, max_new_tokens, stops, on_token, first) -> list[Completion]:
        began = time.perf_counter()
        limits = [min(max_new_tokens, self.max_seq_len - len(p)) for p in prompts]
        cache = self._start(prompts, max(len(p) + n for p, n in zip(prompts, limits, strict=True)))
        batch = cache.lengths.shape[0]
        settings = sampling_lib.stack([*rows, *[Sampling()] * (batch - len(rows))])
        mode = sampling_lib.mode(rows)
        logits = jnp.zeros((batch, self.config.vocab_size), jnp.float32, out_sharding=self.sharding.named("batch", "vocab"))
        for tokens, new in self._chunks(prompts):
            cache, logits = self._prefill(self.params, cache, self._put(tokens), self._put(new), logits)
        token = self._sample(logits, cache.lengths, settings, mode=mode)

        texts: list[list[int]] = [[] for _ in prompts]
        reasons: dict[int, str] = {}
        first_token = 0.0
        for step in range(max(limits)):
            # The next step is under way before this step's tokens are read: the host runs one step behind the device.
            if step + 1 < max(limits):
                cache, following = self._decode(self.params, cache, token, settings, mode=mode)
            host = np.asarray(token)
            first_token = first_token or time.perf_counter() - began
            for i in range(len(prompts)):
                if i in reasons:
                    continue
                chosen = int(host[i])
                if chosen in stops:
                    reasons[i] = "stop"
                    continue
                texts[i].append(chosen)
                if on_token is not None and on_token(first + i, chosen):
                    reasons[i] = "stop"
                elif len(texts[i]) == limits[i]:
                    reasons[i] = "length"
            if len(reasons) == len(prompts):
                break
            token = following
        return [Completion(t, reasons[i], len(prompts[i]), first_token) for i, t in enumerate(texts)]

    def _check_all(self, prompts: Sequence[Sequence[int]]) -> None:
        for i, p in enumerate(prompts):
            try:
                self.check_prompt(p)
            except ValueError as e:
                raise ValueError(f"prompt {i}: {str(e).removeprefix('prompt: ')}") from None

    @contextlib.contextmanager
    def _running(self):
        precision = "highest" if self.options.dtype == "float32" else None  # no TF32 where float32 was asked for
        with jax.set_mesh(self.sharding.mesh), jax.default_matmul_precision(precision):
            yield

    def _start(self, prompts, slots: int) -> KVCache:
        """An empty cache for these prompts, its rows and slots rounded up so that few shapes are compiled."""
        rows = self.sharding.size("batch")
        rows *= steps.bucket(-(-len(prompts) // rows))
        return self._init_cache(rows, steps.bucket(slots, steps.SMALLEST_CACHE))

    def _chunks(self, prompts):
        """The prompts as padded arrays: tokens (B, T) and how many of them are real (B,), a chunk of each prompt at a time."""
        data = self.sharding.size("batch")
        batch = data * steps.bucket(-(-len(prompts) // data))
        longest = max(map(len, prompts))
        for start in range(0, longest, PREFILL_CHUNK):
            width = min(steps.bucket(longest - start, steps.SMALLEST_WIDTH), PREFILL_CHUNK)
            tokens, new = np.zeros((batch, width), np.int32), np.zeros((batch,), np.int32)
            for i, p in enumerate(prompts):
                part = p[start : start + width]
                tokens[i, : len(part)], new[i] = part, len(part)
            yield tokens, new

    def _put(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, self.sharding.named("batch", *(None,) * (array.ndim - 1)))


def _has_fp8(sharding: Sharding) -> bool:
    device = sharding.mesh.devices.flat[0]
    return device.platform == "gpu" and float(getattr(device, "compute_capability", 0)) >= 8.9


def _eos_token_ids(path: str, config: ModelConfig) -> tuple[int, ...]:
    """End-of-sequence ids: those of generation_config.json, else those of config.json."""
    file = os.path.join(path, "generation_config.json")
    ids = None
    if os.path.exists(file):
        with open(file, encoding="utf-8") as f:
            ids = json.load(f).get("eos_token_id")
    ids = config.eos_token_id if ids is None else ids
    return (ids,) if isinstance(ids, int) else tuple(ids)


def use_compilation_cache() -> None:
    """Keep compiled programs between runs, in JAX_COMPILATION_CACHE_DIR or the user's cache folder."""
    if jax.config.jax_compilation_cache_dir is None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        jax.config.update("jax_compilation_cache_dir", os.path.join(base, "dsv3_jax", "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
