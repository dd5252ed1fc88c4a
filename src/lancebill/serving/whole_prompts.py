"""Models whose numbers depend on more than the tokens so far: on how long their sequences are, or on how they are read.

Some kinds of rotary positions turn by other angles if any sequence of a call is longer than the model was trained
with. Beside others such a model gives a short sequence the angles of the longest, and in pieces the beginning of a long
prompt has those of short ones. Attention that chooses keys by an index chooses others if a long prompt comes in pieces.
Some caches keep the prompt, which is what they are given first, longer than the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

LONGEST, PIECES = 1 << 16, 3  # tokens of a sequence that a cache is tried with, and pieces of its prompt
# Names of the length beyond which the angles change: in the rotary parameters, or in the config.
LENGTHS = {"longrope": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}


def varying_angles(config: Any, context: int | None = None) -> bool:
    """Whether rotary angles of sequences of up to `context` tokens (any number, if None) depend on their lengths."""
    values = config.get_text_config().to_dict()
    for parameters in _rotary_parameters(values.get("rope_parameters")):
        name = LENGTHS.get(parameters["rope_type"])
        if name is not None:
            length = parameters.get(name) or values.get(name)
            if context is None or not isinstance(length, int) or context > length:
                return True
    return False


def _rotary_parameters(found: Any) -> Iterator[Mapping[str, Any]]:
    """Those of the model, or of each kind of its layers."""
    if isinstance(found, Mapping):
        if "rope_type" in found:
            yield found
        else:
            for each in found.values():
                yield from _rotary_parameters(each)


def pieces_differ(config: Any, end: int) -> bool:
    """Whether transformers computes other logits for a prompt in pieces, in sequences of up to `end` tokens: beyond as
    many tokens as an index chooses, or where the cache keeps the first piece longer than the others."""
    return isinstance(config.get_text_config().to_dict().get("index_topk"), int) or not _keeps_pieces(config, end)


def _keeps_pieces(config: Any, end: int) -> bool:
    """Whether the last token of a sequence finds the same keys behind a prompt in pieces as behind a whole one."""
    numbers = torch.arange(min(end, LONGEST), dtype=torch.float32, device="cpu").view(1, 1, -1, 1)
    prompt, last = numbers[:, :, :-1], numbers[:, :, -1:]
    for kind in {type(layer): number for number, layer in enumerate(_cache(config))}.values():
        found = []
        for count in (1, PIECES):
            layer = _cache(config)[kind]
            for piece in prompt.chunk(count, dim=2):
                layer.update(piece, piece)
            found.append(layer.update(last, last)[0])
        if not torch.equal(*found):
            return False
    return True


def _cache(config: Any) -> list[DynamicLayer]:
    """The layers of the model's cache that keep keys and values, empty."""
    try:
        layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    except (TypeError, ValueError, AttributeError, LookupError):  # the model has a cache of its own
        return []
    return [layer for layer in layers if isinstance(layer, DynamicLayer)]


class DynamicAngles:
    """Rotary modules that keep the angles of the longest sequence so far, which may belong to another client."""

    def __init__(self, model: Any) -> None:
        self._modules = [part for part in model.modules() if "dynamic" in str(vars(part).get("rope_type"))]

    def forget(self) -> None:
        """The next call begins as the first one did."""
        for module in self._modules:
            buffers, values = dict(module.named_buffers(recurse=False)), vars(module)
            for name, buffer in buffers.items():
                kind = name.removesuffix("inv_freq")  # of layers, if the model has several kinds
                original = values.get(f"{kind}original_inv_freq", buffers.get(f"{kind}original_inv_freq"))
                if kind != name and original is not None:
                    module.register_buffer(name, original.to(buffer.device), persistent=False)
                    values[f"{kind}max_seq_len_cached"] = module.original_max_seq_len
