"""The takeover of the model that vLLM is building now, made when the first layer asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger

from lancebill.checkpoint.read.config import config_of_model
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.read.strict_json import read_json
from lancebill.checkpoint.resolve.naming import find_family
from lancebill.errors import CheckpointError, LancebillError, UnsupportedFormat
from lancebill.integrations.vllm.dense_config import DequantizedConfig, leave_to_vllm, offering_config
from lancebill.integrations.vllm.gguf import NAME as GGUF
from lancebill.integrations.vllm.gguf import gguf_file
from lancebill.integrations.vllm.linear import LinearMethod
from lancebill.integrations.vllm.other_weights import OtherWeights
from lancebill.integrations.vllm.settings import OFF, OFFER, REQUIRE, Settings, parse_settings
from lancebill.integrations.vllm.takeover import Source, Takeover
from lancebill.layer.model_experts import ModelExperts
from lancebill.numbers.torch_defaults import torch_defaults

logger = init_logger("vllm.lancebill")

DUMMY = "dummy"
# Loaders whose tensors keep their memory after the next one was read.
KEEPS_TENSORS = ("auto", "hf", "safetensors", "pt", "npcache", "mistral", GGUF, DUMMY)
# They bring vLLM's own parameters, which are copied in place: no tensor passes the model's `load_weights`.
OWN_PARAMETERS = ("sharded_state", "runai_streamer_sharded", "tensorizer", "ipc_cache")


class ModelUnderConstruction:
    """Collects the takeover of one model. Models inside it (of a vision model, say) share it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.takeover: Takeover | None = None
        self.asked = False

    def ask(self) -> Takeover | None:
        """The model's takeover; None where lancebill cannot read the model and leaves it to vLLM."""
        if not self.asked:
            self.asked = True
            self.takeover = _make_takeover(get_current_vllm_config())
        return self.takeover

    @property
    def keeps_narrow(self) -> bool:
        """Whether dense matrices keep 16 bits: by default if we compute at least one layer of experts."""
        decisions = () if self.takeover is None else self.takeover.decisions.values()
        wanted = self.settings.linear == OFFER or any(decision.taken for decision in decisions)
        return self.settings.takes_any and self.settings.linear != OFF and wanted

    def report(self) -> None:
        """Who computes the experts, and what becomes of other quantised layers, in the log."""
        others = None if self.takeover is None else self.takeover.others
        if others is not None and not others.keep and others.modules:
            logger.warning(
                "dense layers: %d quantised modules become plain ones of vLLM's; 'linear': 'offer' keeps those packed"
                " that lancebill has kernels for",
                len(others.modules),
            )
        if self.takeover is not None and (self.takeover.decisions or self.takeover.unnumbered):
            logger.info("routed experts: %s", self.takeover.summary())
        elif not self.asked and self.settings.mode == REQUIRE:
            logger.warning("routed experts: this model has none, so there is nothing to require")


_under_construction: list[ModelUnderConstruction] = []


@contextmanager
def building() -> Iterator[ModelUnderConstruction]:
    """While the outermost model is built."""
    vllm_config = get_current_vllm_config()
    made = ModelUnderConstruction(_settings(vllm_config))
    _under_construction.append(made)
    before = vllm_config.quant_config
    try:
        if isinstance(before, DequantizedConfig) and made.ask() is None:
            leave_to_vllm(vllm_config)
            before = vllm_config.quant_config  # for good: reloads and drafts of this model are vLLM's too
        elif before is not None and made.settings.linear == OFFER:
            _offer_dense_layers(vllm_config, made.ask())
        yield made
        made.report()
    finally:
        vllm_config.quant_config = before
        _under_construction.pop()


def is_building() -> bool:
    return bool(_under_construction)


def current_takeover() -> Takeover | None:
    """The takeover of the model under construction; None outside of one: its tensors could not be diverted."""
    return _under_construction[-1].ask() if _under_construction else None


def _offer_dense_layers(vllm_config: Any, takeover: Takeover | None) -> None:
    """A config under which `LinearMethod` collects every dense layer, if the checkpoint has quantised ones."""
    if takeover is None or takeover.others is None or not takeover.others.modules:
        return
    settings, section = takeover.settings, dict(takeover.source.config.quant)
    vllm_config.quant_config = offering_config(
        vllm_config.quant_config, section, lambda prefix: LinearMethod(settings, prefix)
    )
    logger.info("dense layers: %d quantised modules are offered to lancebill", len(takeover.others.modules))


def _settings(vllm_config: Any) -> Settings:
    return parse_settings(vllm_config.additional_config, batch_invariant=bool(envs.VLLM_BATCH_INVARIANT))


def _make_takeover(vllm_config: Any) -> Takeover | None:
    settings = _settings(vllm_config)
    if not settings.takes_any:
        return None
    try:
        with torch_defaults():
            return _takeover(vllm_config, settings)
    except LancebillError as error:
        if settings.must_take(vllm_config.device_config.device_type) is not None:
            raise
        logger.warning("lancebill leaves this model to vLLM: %s", error)
        return None


def _takeover(vllm_config: Any, settings: Settings) -> Takeover:
    load_format = str(vllm_config.load_config.load_format)
    if load_format in OWN_PARAMETERS:
        what = "this loader copies vLLM's own parameters, so there are no expert tensors to take"
        raise UnsupportedFormat(what, where="--load-format", got=load_format)
    folder = _folder(vllm_config, load_format)
    checkpoint = _opened(folder, load_format)
    if checkpoint is None:
        source = Source(str(folder), config_of_model(read_json(folder / "config.json")), None)
    else:
        source = Source(str(folder), checkpoint.config, checkpoint.headers)
    _check_mixtures(source)
    takeover = Takeover(settings, source, random=load_format == DUMMY, copies=load_format not in KEEPS_TENSORS)
    offered = settings.linear == OFFER and load_format != DUMMY and vllm_config.quant_config is not None
    if checkpoint is not None and (offered or isinstance(vllm_config.quant_config, DequantizedConfig)):
        manifest = ModelExperts(source.config, tensors=source.headers).manifest()
        options = {"keep": offered, "copies": takeover.copies}
        takeover.others = OtherWeights(manifest, checkpoint, vllm_config.model_config.dtype, **options)
    return takeover


def _check_mixtures(source: Source) -> None:
    """Raise if a layer has several mixtures: vLLM asks for a layer by its number alone."""
    try:
        several = find_family(source.config.model).beside
    except UnsupportedFormat:
        return  # reported when its experts are asked for
    if several:
        raise UnsupportedFormat("layers with several mixtures of experts are left to vLLM", where=source.path)


def _folder(vllm_config: Any, load_format: str) -> Path:
    """The folder of the checkpoint. A model of the hub is downloaded first, by vLLM's own loader."""
    model = vllm_config.model_config
    if Path(model.model).exists():
        return Path(model.model)
    from huggingface_hub import snapshot_download
    from vllm.model_executor.model_loader import get_model_loader

    if load_format != DUMMY:
        get_model_loader(vllm_config.load_config).download_model(model)
    try:
        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except (OSError, ValueError) as error:
        raise CheckpointError("the model's files were not found", where=model.model, got=error) from None


def _opened(folder: Path, load_format: str) -> Checkpoint | None:
    """The checkpoint; None where it has no tensors and need not have any."""
    if load_format == DUMMY and folder.is_dir() and not any(folder.glob("*.safetensors")):
        return None
    return Checkpoint.open(gguf_file(folder) if load_format == GGUF else folder)
