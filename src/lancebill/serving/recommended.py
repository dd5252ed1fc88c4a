"""What a checkpoint's generation_config recommends: what of it is used, and what is not."""

from __future__ import annotations

import math
from typing import Any

from lancebill.errors import SpecError
from lancebill.serving.sampling import Sampling

# Settings of transformers' `generate` that are not supported here, with their neutral values. None, false and empty
# lists are neutral for all.
NOT_USED: dict[str, Any] = {
    "typical_p": 1,
    "top_h": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1,
    "remove_invalid_values": False,
    "watermarking_config": None,
    "penalty_alpha": 0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "dola_layers": None,
    "stop_strings": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "max_length": 20,  # transformers' own default
    "max_new_tokens": None,
    "max_time": None,
}


def recommended(model: Any) -> Sampling:
    """The default sampling: the checkpoint's recommendation, else greedy."""
    given = model.generation_config
    penalty = repetition_penalty(model)
    if not given.do_sample:
        return Sampling(repetition_penalty=penalty)
    return Sampling(
        temperature=1.0 if given.temperature is None else float(given.temperature),
        top_p=1.0 if given.top_p is None else float(given.top_p),
        top_k=int(given.top_k or 0),
        min_p=min_p(model),
        repetition_penalty=penalty,
    )


def repetition_penalty(model: Any) -> float:
    given = model.generation_config.repetition_penalty
    if given is not None and not 0 < given < math.inf:
        raise SpecError("not a positive number", where="generation_config, repetition_penalty", got=given)
    return 1.0 if given is None else float(given)


def min_p(model: Any) -> float:
    given = model.generation_config.min_p
    if given is not None and not 0 <= given <= 1:
        raise SpecError("not a number from 0 to 1", where="generation_config, min_p", got=given)
    return float(given or 0)


def not_used(model: Any) -> str:
    """One line that lists ignored settings, or an empty text."""
    given = model.generation_config.to_dict()
    odd = {name: given.get(name) for name, neutral in NOT_USED.items() if given.get(name) not in (neutral, None)}
    shown = ", ".join(f"{name}={str(value)[:40]}" for name, value in odd.items() if value not in (False, [], {}))
    return f"not used of generation_config: {shown}" if shown else ""
