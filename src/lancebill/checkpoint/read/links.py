"""Links in a checkpoint's folder, which whoever made the checkpoint chose.

A link out of the folder would make a private file a part of what is converted, saved and published. So it is refused,
before the file is read. Two kinds of links are followed: links of a hub cache, from `snapshots/<revision>/x` to
`blobs/y`, and links between tensor files, because people share shards between checkpoints.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from lancebill.errors import MalformedFile

TENSOR_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx")
_TEMPLATES = "additional_chat_templates"  # the only folder in the folder that transformers reads
_TOKENIZERS = ("tokenizer", "config.json", "special_tokens", "added_tokens", "chat_template", "vocab", "merges")


def check_links(folder: Path) -> None:
    """Check all files that we or transformers may read or copy, but for tensor files: they are checked when read."""
    for file in (*folder.iterdir(), *_templates(folder)):
        if not file.name.startswith(".") and not file.name.endswith(TENSOR_SUFFIXES):
            check_link(file, folder)


def check_tokenizer_links(folder: Path) -> None:
    """`check_links` of what a tokenizer reads, for the folder of a file that the user named: other links are theirs."""
    for file in (*folder.iterdir(), *_templates(folder)):
        if file.name.startswith(_TOKENIZERS) or file.parent != folder:
            check_link(file, folder)


def _templates(folder: Path) -> tuple[Path, ...]:
    check_link(folder / _TEMPLATES, folder)
    return tuple((folder / _TEMPLATES).iterdir()) if (folder / _TEMPLATES).is_dir() else ()


def check_link(file: Path, folder: Path) -> None:
    """Raise if `file` is a link that leads out of the checkpoint in `folder`."""
    if not file.is_symlink():
        return
    root, target = folder.resolve(), _resolved(file)
    if target.is_relative_to(root) or _is_blob(target, root) or _is_shard(file, target):
        return
    raise MalformedFile(
        "the link points outside the checkpoint folder",
        where=str(file),
        got=str(target),
        hint="if you trust it, put a copy of the file in its place",
    )


def _is_blob(target: Path, root: Path) -> bool:
    """Whether `root` is, or is in, a snapshot of a hub cache, and `target` a blob of the same repository."""
    snapshots = [folder.parent for folder in (root, *root.parents) if folder.parent.name == "snapshots"]
    return any(target.is_relative_to(folder.parent / "blobs") for folder in snapshots)


def _is_shard(file: Path, target: Path) -> bool:
    same_kind = file.suffix in TENSOR_SUFFIXES and target.suffix == file.suffix
    return same_kind and (target.is_file() or not target.exists())


def _resolved(file: Path) -> Path:
    """Where a link leads. Up to Python 3.12 `resolve` raises if that is the link itself, later it returns it."""
    with suppress(RuntimeError):
        target = file.resolve()
        if not target.is_symlink():
            return target
    raise MalformedFile("the link points to itself", where=str(file))
