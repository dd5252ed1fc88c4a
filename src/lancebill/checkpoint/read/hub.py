"""Models on the Hugging Face hub by their names: downloaded when first used, then found in the hub's cache.

`owner/model` is a repository. If it contains GGUF files, `owner/model:Q4_K_M` selects one by quantisation, as in
llama.cpp, and `owner/model/folder/file.gguf` by path. Only files that are read here are downloaded: many repositories
contain the same weights twice, under other names or in another folder.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lancebill.errors import CheckpointError, SpecError

INDEX = "model.safetensors.index.json"
_SMALL = (".json", ".model", ".jinja", ".txt")  # the config, the tokenizer, chat templates
_TEMPLATES = "additional_chat_templates/"  # the only folder that transformers reads too
_TENSORS, _GGUF = ".safetensors", ".gguf"
_NOT_MODELS = ("mmproj", "imatrix")  # GGUF files beside a model: its vision part, statistics for quantising
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
_WORD = r"\w[\w.-]*"
_NAME = re.compile(rf"({_WORD}/{_WORD})(?::({_WORD})|/((?:{_WORD}/)*{_WORD}\.gguf))?")

Download = Callable[[Sequence[str]], Path]  # the folder, with these files in it


@dataclass(frozen=True)
class HubName:
    """A parsed hub name: a repository, optionally with one of its GGUF models by quantisation or by file."""

    repository: str
    quantisation: str | None = None
    file: str | None = None


def parse_hub_name(path: str | Path) -> HubName | None:
    """A path that does not exist here as a name on the hub; None if it cannot be one."""
    match = _NAME.fullmatch(str(path))
    # The path of a file that is missing in a folder that is there: a slip, which no server needs to hear of.
    if match is None or (match[3] and Path(path).parts and Path(Path(path).parts[0]).exists()):
        return None
    return HubName(match[1], match[2], match[3])


def is_hub_name(path: str | Path) -> bool:
    """Whether a path that does not exist here can be the name of a model on the hub."""
    return parse_hub_name(path) is not None


def local_path(path: str | Path, revision: str | None = None) -> Path:
    """A path that exists as it is; otherwise the folder or GGUF file of the hub's model of this name, at `revision`."""
    if Path(path).exists():
        if revision is not None:
            raise SpecError("a revision of a local path", where=str(path), hint="revisions are of models on the hub")
        return Path(path)
    name = parse_hub_name(path)
    if name is None:
        raise CheckpointError("no such file or folder", where=str(path))
    try:
        from huggingface_hub import model_info, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ModuleNotFoundError:
        hint = "pip install huggingface_hub, if this is a model on the hub"
        raise CheckpointError("no such file or folder", where=str(path), hint=hint) from None

    def download(files: Sequence[str]) -> Path:
        patterns = [glob.escape(file) for file in files]
        return Path(snapshot_download(name.repository, revision=revision, allow_patterns=patterns))

    # Its client, whose errors come through, is requests, httpx or httpx2: the first base of the hub's own errors.
    bases = tuple(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception))
    failures: tuple[type[Exception], ...] = (OSError, ValueError, *bases)
    try:
        siblings = model_info(name.repository, revision=revision).siblings or []
    except failures as error:
        refusal = _unavailable(path, name, error)
        try:  # without a network: what was downloaded before
            folder = Path(snapshot_download(name.repository, revision=revision, local_files_only=True))
        except failures:
            raise refusal from None
        kept = [file.relative_to(folder).as_posix() for file in folder.rglob("*")]
        if _wants_gguf(name, kept) and not _matching(name, kept):
            raise refusal from None
        return _fetch(name, kept, lambda _: folder)
    try:
        return _fetch(name, [sibling.rfilename for sibling in siblings], download)
    except failures as error:
        raise _unavailable(path, name, error) from None


def _unavailable(path: str | Path, name: HubName, error: Exception) -> CheckpointError:
    reason = (str(error).strip().splitlines() or [""])[0]
    return CheckpointError(
        "no such file or folder, and the hub gives no such model",
        where=str(path),
        got=f"{type(error).__name__}: {reason}",
        hint=f"without a network: download it elsewhere (`hf download {name.repository}`) and pass the folder",
    )


def _fetch(name: HubName, files: Sequence[str], download: Download) -> Path:
    """Download what the name means, of the files that its repository has."""
    small = [file for file in files if file.endswith(_SMALL) and "/" not in file.removeprefix(_TEMPLATES)]
    if _wants_gguf(name, files):
        model = _chosen(name, files)
        return download([*small, *model]) / model[0]
    tensors = _tensors(files)
    if INDEX not in files or not tensors:
        return download([*small, *_plain(tensors)])
    return download(_indexed(download(small), tensors))


def _tensors(files: Sequence[str]) -> list[str]:
    """Those in folders are copies: `original/` in the repositories of gpt-oss and Llama."""
    return [file for file in files if file.endswith(_TENSORS) and "/" not in file]


def _wants_gguf(name: HubName, files: Sequence[str]) -> bool:
    named = name.quantisation is not None or name.file is not None
    return named or (not _tensors(files) and bool(_matching(name, files)))


def _plain(tensors: Sequence[str]) -> Sequence[str]:
    """The tensors of a repository without an index, in transformers' layout: Mistral's own is called consolidated."""
    named = [file for file in tensors if file.startswith("model")]
    return named or [file for file in tensors if not file.startswith("consolidated")] or tensors


def _indexed(folder: Path, tensors: Sequence[str]) -> Sequence[str]:
    """The files that the index names. One that is damaged is reported when the checkpoint is opened."""
    from lancebill.checkpoint.read.strict_json import read_json  # needs torch, and names are checked first of all

    weight_map = read_json(folder / INDEX).get("weight_map")
    named = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
    return [file for file in tensors if file in named] or _plain(tensors)


def _matching(name: HubName, files: Sequence[str]) -> list[list[str]]:
    """The GGUF models that a name can mean, each with all its files."""
    models: dict[str, list[str]] = {}
    for file in sorted(file for file in files if file.endswith(_GGUF)):
        models.setdefault(_SPLIT.sub("", file.removesuffix(_GGUF)), []).append(file)
    if name.file is not None:
        return [files for files in models.values() if name.file in files]
    # A whole word of the name, or of the folder: Q4_K is not Q4_K_M, F16 is not BF16.
    word = re.compile(rf"(?<!\w){re.escape(name.quantisation or '')}(?!\w)", re.IGNORECASE)
    return [
        files
        for stem, files in models.items()
        if not any(other in stem.rpartition("/")[2].lower() for other in _NOT_MODELS)
        and (name.quantisation is None or word.search(stem))
    ]


def _chosen(name: HubName, files: Sequence[str]) -> list[str]:
    """The files of the GGUF model with this name; raises unless exactly one model matches."""
    found = _matching(name, files)
    if len(found) == 1:
        return found[0]
    there = found or _matching(HubName(name.repository), files)
    several = "the repository holds several GGUF models: name one of them"
    raise CheckpointError(
        several if found else "the repository holds no such GGUF model",
        where=name.repository,
        expected=None if found else name.file or name.quantisation,
        got=", ".join(model[0] for model in there) or "no .gguf files",
        hint=f"by quantisation as {name.repository}:Q4_K_M, or by file as {name.repository}/FILE.gguf",
    )
