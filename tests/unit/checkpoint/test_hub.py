"""Which files of a repository on the hub are downloaded. The hub is a folder here: nothing needs a network."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError

from lancebill.checkpoint.read.hub import INDEX, HubName, is_hub_name, local_path, parse_hub_name
from lancebill.errors import CheckpointError

SMALL = ["config.json", "tokenizer.json", "chat_template.jinja"]


class Hub:
    """A repository, and the cache of what was downloaded of it."""

    def __init__(self, cache: Path, index: dict[str, str]) -> None:
        self.cache, self.index, self.online = cache, index, True
        self.files: list[str] = []

    def model_info(self, name: str, *, revision: str | None) -> SimpleNamespace:
        if not self.online or name != "some/model":
            raise OSError("the network is unreachable")
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in self.files])

    def snapshot_download(
        self, name: str, *, revision: str | None, allow_patterns: Sequence[str] = (), local_files_only: bool = False
    ) -> str:
        if name != "some/model" or (local_files_only and not any(self.cache.iterdir())):
            raise OSError("not in the cache")
        for file in self.files:
            if not local_files_only and any(fnmatch.fnmatch(file, pattern) for pattern in allow_patterns):
                (self.cache / file).parent.mkdir(parents=True, exist_ok=True)
                (self.cache / file).write_text(json.dumps({"weight_map": self.index}) if file == INDEX else "")
        return str(self.cache)

    def fetched(self) -> set[str]:
        found = {file.relative_to(self.cache).as_posix() for file in self.cache.rglob("*") if file.is_file()}
        return found - set(SMALL) - {INDEX}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    cache = tmp_path / "cache"
    cache.mkdir()
    made = Hub(cache, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    monkeypatch.setattr(huggingface_hub, "model_info", made.model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    monkeypatch.chdir(tmp_path)
    return made


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ([INDEX, *SHARDS, "original/model.safetensors", "metal/model.bin"], SHARDS),  # openai/gpt-oss-20b
        ([INDEX, *SHARDS, "consolidated.safetensors", "model-fp8.safetensors"], SHARDS),  # Mistral's
        (["model.safetensors", "consolidated.safetensors", "onnx/model.safetensors"], ["model.safetensors"]),
        (["gptq_model-4bit-128g.safetensors"], ["gptq_model-4bit-128g.safetensors"]),
        (["consolidated.safetensors"], ["consolidated.safetensors"]),  # refused when it is opened, with a reason
        (["model[1].safetensors", "model-Q4_K_M.gguf", "README.md"], ["model[1].safetensors"]),
    ],
)
def test_only_what_is_read_is_downloaded(hub: Hub, files: list[str], wanted: list[str]) -> None:
    hub.files = [*SMALL, *files, "onnx/config.json"]
    assert local_path("some/model") == hub.cache
    assert hub.fetched() == set(wanted) and all((hub.cache / file).exists() for file in SMALL)
    hub.online = False
    assert local_path("some/model") == hub.cache


GGUF = ["M-Q4_K.gguf", "M-Q4_K_M.gguf", "M-F16.gguf", "M-BF16.gguf", "mmproj-F16.gguf", "M.imatrix.gguf"]
SPLIT = ["Q8_0/M-Q8_0-00001-of-00002.gguf", "Q8_0/M-Q8_0-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("some/model:Q4_K_M", GGUF[1:2]),
        ("some/model:q4_k", GGUF[:1]),
        ("some/model:F16", GGUF[2:3]),
        ("some/model:Q8_0", SPLIT),
        ("some/model/M-BF16.gguf", GGUF[3:4]),
        ("some/model/mmproj-F16.gguf", GGUF[4:5]),  # named outright
        (f"some/model/{SPLIT[1]}", SPLIT),
    ],
)
def test_a_gguf_model_is_named(hub: Hub, path: str, wanted: list[str]) -> None:
    hub.files = ["config.json", "model.safetensors", *GGUF, *SPLIT]
    assert local_path(path) == hub.cache / wanted[0]
    assert hub.fetched() == set(wanted)
    hub.online = False
    assert local_path(Path(path)) == hub.cache / wanted[0]
    with pytest.raises(CheckpointError, match="no such file or folder, and the hub gives no such model"):
        local_path("some/model:Q2_K")  # was never downloaded


@pytest.mark.parametrize("files", [GGUF[1:2], [GGUF[1], *GGUF[4:]], SPLIT])
def test_the_only_gguf_model_needs_no_name(hub: Hub, files: list[str]) -> None:
    hub.files = [*SMALL, *files]
    assert local_path("some/model") == hub.cache / files[0]


def test_several_gguf_models_are_named_in_the_error(hub: Hub) -> None:
    hub.files = [*SMALL, *GGUF, *SPLIT]
    with pytest.raises(CheckpointError, match="several GGUF models") as several:
        local_path("some/model")
    assert "M-F16.gguf" in str(several.value) and SPLIT[0] in str(several.value) and "mmproj" not in str(several.value)
    assert "some/model:Q4_K_M" in str(several.value) and "some/model/FILE.gguf" in str(several.value)
    for wrong in ("some/model:Q9", "some/model/none.gguf"):
        with pytest.raises(CheckpointError, match="no such GGUF model"):
            local_path(wrong)
    assert not hub.fetched()


def test_errors_of_the_network_are_reported(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"the network is unreachable.*pass the folder"):
        local_path("other/model")
    client_error = HfHubHTTPError.__bases__[0]  # of httpx it is no OSError

    def refuse(*_: object, **__: object) -> None:
        raise client_error("no route")

    monkeypatch.setattr(huggingface_hub, "model_info", refuse)
    with pytest.raises(CheckpointError, match="no route"):
        local_path("some/model")


def test_names_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_hub_name("a/b-1.5") == HubName("a/b-1.5")
    assert parse_hub_name("a/b:UD-Q4_K_XL") == HubName("a/b", "UD-Q4_K_XL")
    assert parse_hub_name("a/b/c/d.gguf") == HubName("a/b", file="c/d.gguf")
    for path in ("./a", "../a", "a", "/a/b", "a/b/c", "a/b:", "a/b/../c.gguf", "http://a/b", "http://a:1/b"):
        assert not is_hub_name(path), path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    assert is_hub_name("a/b") and not is_hub_name("a/b/c.gguf")  # the folder is here, its file is not
