"""Models on the Hugging Face hub by their names: downloaded when first used, then found in the hub's cache."""

from __future__ import annotations

import re
from pathlib import Path

from lancebill.errors import CheckpointError, SpecError

PATTERNS = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")


def is_hub_name(path: str | Path) -> bool:
    """Whether a path that does not exist here can be the name of a model on the hub: `owner/model`."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) is not None


def local_path(path: str | Path, revision: str | None = None) -> Path:
    """A path that exists as it is; otherwise the folder of the hub's model of this name, at `revision`."""
    if Path(path).exists():
        if revision is not None:
            raise SpecError("a revision of a local path", where=str(path), hint="revisions are of models on the hub")
        return Path(path)
    if not is_hub_name(path):
        raise CheckpointError("no such file or folder", where=str(path))
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        hint = "pip install huggingface_hub, if this is a model on the hub"
        raise CheckpointError("no such file or folder", where=str(path), hint=hint) from None
    try:
        return Path(snapshot_download(str(path), revision=revision, allow_patterns=list(PATTERNS)))
    except (OSError, ValueError) as error:  # the base classes of all errors of huggingface_hub
        reason = (str(error).strip().splitlines() or [""])[0]
        raise CheckpointError(
            "no such folder, and the hub gives no such model",
            where=str(path),
            got=f"{type(error).__name__}: {reason}",
            hint=f"without a network: download it elsewhere (`hf download {path}`) and pass the folder",
        ) from None
