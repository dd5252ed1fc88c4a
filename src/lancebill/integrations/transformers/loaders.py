"""All calls into transformers' loaders: none of them runs a checkpoint's own code, or asks whether to run it.

A checkpoint can name Python code (`auto_map` in a config). Unless told otherwise, transformers asks on the terminal
whether to run the code, and reads the answer from stdin. So every call here says no. Models and tokenizers load their
parts with calls of their own, which do not say it: with a timeout of 0, transformers refuses where it would ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    dynamic_module_utils,
)

from lancebill.checkpoint.read.links import check_links, check_tokenizer_links
from lancebill.errors import CustomCode, SpecError

dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # in the whole process: a model can be built in any thread

_REFUSAL = "trust_remote_code=True"  # the argument that transformers' refusals recommend
_NEVER = "lancebill never runs code of a checkpoint"


def load_config(folder: Path) -> PretrainedConfig:
    check_links(folder)
    with refusing(folder, "auto_map in config.json"):
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    for section in _sections(config):
        _check_kernels(section, folder)
    return config


def load_tokenizer(folder: Path, gguf_file: str | None = None) -> Any:
    check_links(folder) if gguf_file is None else check_tokenizer_links(folder)
    with refusing(folder, "auto_map in tokenizer_config.json"):
        return AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file, trust_remote_code=False)


def load_generation_config(kind: Any, folder: Path) -> Any:
    """The folder's generation_config.json as a `kind`: GenerationConfig or a subclass, which take no further words."""
    check_links(folder)
    return kind.from_pretrained(folder)


def load_model(kind: Any, config: PretrainedConfig, **options: Any) -> Any:
    """A model of class `kind`; the caller gives the tensors in `options`."""
    if options.pop("trust_remote_code", False):
        raise SpecError(_NEVER, where="trust_remote_code=", expected=False, got=True)
    return kind.from_pretrained(None, config=config, trust_remote_code=False, **options)


def model_of(folder: Path) -> nn.Module:
    """The causal language model of a folder's config, without its weights."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(load_config(folder), trust_remote_code=False)
    return model


def custom_code(where: str, named: str) -> CustomCode:
    return CustomCode(
        f"the checkpoint needs its own Python code to run; {_NEVER}, and never asks whether to",
        where=where,
        got=named,
        hint="see if a newer transformers knows the model (pip install --upgrade transformers), or look for a copy "
        "that was saved in transformers' own format",
    )


@contextmanager
def refusing(where: str | Path, named: str) -> Iterator[None]:
    """Turns transformers' refusal to run code into our error; `named` says what asks for code."""
    try:
        yield
    except ValueError as error:
        if _REFUSAL not in str(error):
            raise
        raise custom_code(str(where), named) from None


def _sections(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """A config, and those in it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from _sections(value)


def _check_kernels(section: PretrainedConfig, folder: Path) -> None:
    """Refuse kernels on the hub, which transformers would download and run."""
    for named in (section._attn_implementation, section._experts_implementation):
        if isinstance(named, str) and "/" in named:
            raise custom_code(str(folder / "config.json"), named)
