"""`generate`: decode steps are captured in CUDA graphs; on a CPU the native decoder computes them and short prompts.

transformers' `generate` stays what it is: it prepares inputs, samples, stops. It asks its model for a cache, and for a
compiled forward where the cache allows that. Here the model answers with a `DecodeCache` and with `DecodeGraphs` or
`NativeSteps`. `generate(disable_compile=True)` is transformers' own way, without either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import Lock, local
from typing import Any, Protocol

import torch
from torch import nn
from transformers.generation import GenerationMixin, GenerationMode

from lancebill.backends.base import Reason
from lancebill.integrations.transformers.decode_cache import DecodeCache, keeps_keys_and_values, span_of
from lancebill.integrations.transformers.decode_graphs import CACHE, CudaRecorder, DecodeGraphs, Recorder
from lancebill.integrations.transformers.native_steps import NativeSteps, SharedDecoder
from lancebill.layer.module_hooks import has_hooks

_LOG = logging.getLogger(__name__)
_MODES = {GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE}
_MASKED_ATTENTION = {"sdpa", "eager"}  # they follow the mask; other implementations follow lengths
_EXPECTED = {"asked", "device"}  # reasons that are not logged
_MOST_KEPT = 4  # batch sizes: each has a cache and graphs
_MOST_AT_FIRST = 4096  # columns of a new cache; it grows when there are more tokens

MakeRecorder = Callable[[torch.device], Recorder]


class Steps(Protocol):
    """A faster way to compute decode steps."""

    cache: DecodeCache
    refused: Reason | None
    busy: bool

    def run(self, model: Any, given: dict[str, Any]) -> Any: ...


class _OfThread(local):
    """What a thread is generating with."""

    steps: Steps | None = None


class Decoding:
    """The captured steps of one model, by batch size, its native steps, and why the last `generate` used neither."""

    def __init__(self, recorder: MakeRecorder = CudaRecorder) -> None:
        self.recorder = recorder
        self.reason: Reason | None = None
        self.native: SharedDecoder | None = None  # of a model on a CPU
        self._kept: dict[int, DecodeGraphs] = {}
        self._lock, self._local = Lock(), _OfThread()

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a model has weights of its own, and no graphs yet."""
        return {"recorder": self.recorder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["recorder"])  # type: ignore[misc]

    def __str__(self) -> str:
        if self.reason is not None:
            return f"without {'CUDA graphs' if self.native is None else 'native steps'}: {self.reason}"
        if self.native is not None:
            return "native steps"
        return f"{sum(graphs.count for graphs in self._kept.values())} CUDA graphs"

    def turn_to(self, device: torch.device) -> None:
        """Steps on a CPU are native, others are captured."""
        native = device.type == "cpu" and self.recorder is CudaRecorder
        with self._lock:
            if native != (self.native is not None):
                self.native = SharedDecoder() if native else None

    def begin(self, model: Any, batch: int, tokens: int) -> DecodeCache | Reason:
        """A cache for new sequences of up to this many tokens, or why their steps are transformers' own."""
        if self.native is not None:
            return self._begin_native(self.native, model, tokens)
        with self._lock:
            graphs = self._kept.pop(batch, None)
            if graphs is None:
                graphs = DecodeGraphs(_new_cache(model, tokens), self.recorder(model.device))
            idle = [size for size, held in self._kept.items() if not held.busy]
            for size in idle[: max(0, len(self._kept) + 1 - _MOST_KEPT)]:
                del self._kept[size]
            self._kept[batch] = graphs  # the newest is last
            if graphs.busy:
                return Reason("busy", "another thread generates with this batch size")
            if graphs.refused is not None:
                return graphs.refused
            graphs.busy = True
        graphs.restart(_stamp(model))
        self._local.steps = graphs
        return graphs.cache

    def _begin_native(self, shared: SharedDecoder, model: Any, tokens: int) -> DecodeCache | Reason:
        why = shared.refresh(model, _stamp(model))
        if why is not None:
            return why
        steps = self._local.steps = NativeSteps(_new_cache(model, tokens), shared)
        return steps.cache

    @contextmanager
    def call(self) -> Iterator[None]:
        """One call of `generate`. It may be made inside another one in this thread, by a streamer for example."""
        outer, self._local.steps = self._local.steps, None
        try:
            yield
        finally:
            steps, self._local.steps = self._local.steps, outer
            if steps is not None:
                self._end(steps)

    def _end(self, steps: Steps) -> None:
        steps.busy, self.reason = False, None
        if steps.refused is not None:
            self.refuse(steps.refused)

    def refuse(self, reason: Reason) -> None:
        """A call decodes in transformers' own way."""
        if self.native is None and reason != self.reason and reason.code not in _EXPECTED:
            _LOG.warning("generate decodes without CUDA graphs: %s", reason)
        self.reason = reason

    @property
    def steps(self) -> Steps:
        """Those that this thread generates with."""
        assert self._local.steps is not None
        return self._local.steps

    @property
    def native_steps(self) -> NativeSteps | None:
        """Those that this thread generates with, if they are native."""
        return self._local.steps if isinstance(self._local.steps, NativeSteps) else None

    def clear(self) -> None:
        """Free the caches, graphs and native steps that no call uses."""
        with self._lock:
            self.native = None
            self._kept = {batch: graphs for batch, graphs in self._kept.items() if graphs.busy}


class GraphedGeneration:
    """Mixin for a transformers model class. `lancebill_decoding` says how the last `generate` decoded."""

    lancebill_decoding: Decoding

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers."""
        with self.lancebill_decoding.call():
            return super().generate(*args, **kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        decoding = self.lancebill_decoding
        decoding.turn_to(self.device)  # type: ignore[attr-defined]
        if isinstance(self, GenerationMixin):
            return self._cache_of_steps(decoding, generation_config, *args, **kwargs)
        decoding.refuse(Reason("loop", "the model generates in a way of its own"))  # DiffusionGemma
        return super()._prepare_cache_for_generation(generation_config, *args, **kwargs)  # type: ignore[misc]

    def _cache_of_steps(
        self, decoding: Decoding, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any,
        batch_size: int, max_cache_length: int,
    ) -> Any:  # fmt: skip
        why = _chosen(generation_config, model_kwargs, generation_mode) or _unsuitable(self, decoding)
        if why is None:
            batch = batch_size * (generation_config.num_return_sequences or 1)
            cache = decoding.begin(self, batch, max_cache_length)
            if isinstance(cache, DecodeCache):
                model_kwargs[CACHE] = cache
                return None
            why = cache
        decoding.refuse(why)
        prepare = super()._prepare_cache_for_generation  # type: ignore[misc]
        return prepare(generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)

    def _prefill(
        self, input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any], is_first_iteration: bool = True
    ) -> Any:
        steps, in_one = self.lancebill_decoding.native_steps, generation_config.prefill_chunk_size is None
        if steps is None or not in_one or model_kwargs.get("inputs_embeds") is not None:
            prefill = super()._prefill  # type: ignore[misc]
            return prefill(input_ids, generation_config, model_kwargs, is_first_iteration)
        prepare = self.prepare_inputs_for_generation  # type: ignore[attr-defined]
        how = {"next_sequence_length": input_ids.shape[1], "is_first_iteration": is_first_iteration}
        return steps.run(self, {**prepare(input_ids, **how, **model_kwargs), "return_dict": True})

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        if isinstance(model_kwargs.get(CACHE), DecodeCache):
            return True
        valid: bool = super()._valid_auto_compile_criteria(model_kwargs, generation_config)  # type: ignore[misc]
        return valid

    def get_compiled_call(self, compile_config: Any) -> Callable[..., Any]:
        def call(**given: Any) -> Any:
            cache = given.get(CACHE)
            if isinstance(cache, DecodeCache):
                return self.lancebill_decoding.steps.run(self, given)
            return compiled(compile_config)(**given)

        compiled = super().get_compiled_call  # type: ignore[misc]
        return call


def use_graphs(model: Any, recorder: MakeRecorder = CudaRecorder) -> None:
    """Let a transformers model generate with graphs. Its class keeps the name, which transformers writes to configs."""
    if not isinstance(model, GraphedGeneration):
        base = type(model)
        model.__class__ = type(base.__name__, (GraphedGeneration, base), {"__module__": base.__module__})
    model.lancebill_decoding = Decoding(recorder)


def _chosen(how: Any, given: dict[str, Any], mode: Any) -> Reason | None:
    """The first option of this `generate` call that CUDA graphs do not support."""
    wishes = {
        "disable_compile=True": how.disable_compile,
        "use_cache=False": how.use_cache is False,
        f"cache_implementation={how.cache_implementation}": how.cache_implementation is not None,
        "past_key_values=": given.get(CACHE) is not None,
        "return_dict_in_generate=True, which returns the cache": how.return_dict_in_generate,
        str(mode.value): mode not in _MODES,
    }
    asked = next((text for text, is_asked in wishes.items() if is_asked), None)
    return None if asked is None else Reason("asked", asked)


def _unsuitable(model: Any, decoding: Decoding) -> Reason | None:
    """Why no step of this model can be captured."""
    config = model.config.get_text_config(decoder=True)
    if model.device.type not in ("cuda", "cpu") and decoding.recorder is CudaRecorder:
        return Reason("device", f"the model is on {model.device}")
    if model.config.is_encoder_decoder or not model._supports_default_dynamic_cache():
        return Reason("cache", "the model has a cache of its own")
    if not keeps_keys_and_values(config):
        return Reason("cache", "the model keeps more than keys and values")
    if config._attn_implementation not in _MASKED_ATTENTION:
        hint = 'from_pretrained(..., attn_implementation="sdpa")'
        return Reason("attention", f"{config._attn_implementation} attention does not take the mask of a step", hint)
    if model.training:
        return Reason("training", "the model is in training mode", "model.eval()")
    if any(map(has_hooks, model.modules())):
        return Reason("hooks", "a module has hooks, which a graph does not call")
    return None


def _new_cache(model: Any, tokens: int) -> DecodeCache:
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return DecodeCache(layers, span_of(min(tokens, _MOST_AT_FIRST)), model.device)


def _stamp(model: nn.Module) -> Hashable:
    """Changes when a tensor of the model is replaced or moves."""
    return tuple(tensor.data_ptr() for tensors in (model.parameters(), model.buffers()) for tensor in tensors)
