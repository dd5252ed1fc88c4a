"""Checkpoints that want code of theirs to run, or files of ours to be published: neither happens, at any door.

Each case is a sound checkpoint that names a Python file, which writes a marker when it is imported.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent))

import tiny  # noqa: E402

import lancebill  # noqa: E402
from lancebill.checkpoint.read.files import Checkpoint  # noqa: E402
from lancebill.cli.main import app  # noqa: E402
from lancebill.errors import CustomCode, MalformedFile, SpecError  # noqa: E402
from lancebill.integrations.transformers.loaders import load_tokenizer  # noqa: E402
from lancebill.testing.gguf import write_gguf  # noqa: E402

MODULE = "untrusted"  # of the checkpoint
ASKED = "[y/N]"
SENTENCE = "lancebill never runs code of a checkpoint"
Change = Callable[[Path], None]


def edited(name: str, **changes: Any) -> Change:
    """Changes a JSON file of the folder."""

    def change(folder: Path) -> None:
        file = folder / name
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | changes))

    return change


def all_of(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


def auto_map(*kinds: str) -> dict[str, str]:
    return dict.fromkeys(kinds, f"{MODULE}.Untrusted")


def custom_decoding(folder: Path) -> None:
    (folder / "custom_generate").mkdir()
    shutil.copyfile(folder / f"{MODULE}.py", folder / "custom_generate" / "generate.py")
    edited("generation_config.json", auto_map=auto_map("GenerationConfig"), custom_generate=str(folder))(folder)


TOKENIZER = {"tokenizer_class": "Untrusted", "auto_map": {"AutoTokenizer": [f"{MODULE}.Untrusted"] * 2}}


def parts_of_a_tokenizer(folder: Path) -> None:
    parts = {"question_encoder": {"model_type": "deepseek_v3"}, "generator": {"model_type": "deepseek_v3"}}
    (folder / "question_encoder_tokenizer").mkdir()
    edited("config.json", **parts)(folder)
    edited("tokenizer_config.json", tokenizer_class="RagTokenizer")(folder)
    edited("question_encoder_tokenizer/tokenizer_config.json", **TOKENIZER)(folder)


MODEL = auto_map("AutoConfig", "AutoModel", "AutoModelForCausalLM")
REFUSED: dict[str, tuple[str, Change]] = {
    "a model that transformers does not know": ("mixtral", edited("config.json", model_type="new", auto_map=MODEL)),
    "a config without a model type": ("mixtral", edited("config.json", model_type=None, auto_map=MODEL)),
    "a tokenizer": ("deepseek_v3", edited("tokenizer_config.json", **TOKENIZER)),
    "a tokenizer of the hub": (
        "deepseek_v3",
        edited("tokenizer_config.json", **TOKENIZER | {"auto_map": {"AutoTokenizer": ["a/b--c.D", None]}}),
    ),
    "a tokenizer in a tokenizer": ("deepseek_v3", parts_of_a_tokenizer),
    "attention of the hub": ("mixtral", edited("config.json", attn_implementation="a/b")),
    "experts of the hub": ("mixtral", edited("config.json", experts_implementation="a/b")),
}
HARMLESS: dict[str, tuple[str, Change]] = {
    "a model that transformers knows": ("mixtral", edited("config.json", auto_map=MODEL)),
    "a tokenizer that transformers knows": ("mixtral", edited("tokenizer_config.json", **TOKENIZER)),
    "a processor": (
        "mixtral",
        all_of(
            edited("processor_config.json", auto_map=auto_map("AutoProcessor")),
            edited("preprocessor_config.json", auto_map=auto_map("AutoImageProcessor", "AutoFeatureExtractor")),
        ),
    ),
    "a way of decoding": ("mixtral", custom_decoding),
}


SECRET = "the user's own words"


def linked(name: str, target: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target.replace("PRIVATE", str(folder.parent / "private")))

    return change


LINKS: dict[str, Change] = {
    "a file that is only copied": linked("special_tokens_map.json", "../private/docker.json"),
    "a file without a suffix": linked("LICENSE", "PRIVATE/key"),
    "a target that is missing": linked("vocab.txt", "PRIVATE/missing"),
    **{
        f"{name}, an absolute link": linked(name, "PRIVATE/docker.json")
        for name in (
            *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
            *("chat_template.jinja", "model.safetensors.index.json", "quantize_config.json"),
        )
    },
    "a chain": all_of(linked("merges.txt", "other"), linked("other", "../private/key")),
    "through a folder": all_of(linked("inner/way", "../../private"), linked("merges.txt", "inner/way/key")),
    "a folder": linked("additional_chat_templates", "../private"),
    "in a folder": linked("additional_chat_templates/tools.jinja", "../../private/key"),
    "a loop": all_of(linked("merges.txt", "other"), linked("other", "merges.txt")),
    "tensors to another kind of file": linked("model.safetensors", "../private/key"),
}
INSIDE: dict[str, Change] = {
    "another file": linked("merges.txt", "tokenizer.json"),
    "out and in again": linked("merges.txt", "../model/tokenizer.json"),
    "in a folder of its own": all_of(linked("additional_chat_templates/a.jinja", "../chat_template.jinja")),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def model(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            assert tiny.save_model(transformers, family, made[family])
            tiny.save_tokenizer(transformers, made[family])
        return made[family]

    return model


def untrusted(source: Path, change: Change, folder: Path) -> Path:
    """A copy of a model that names code; the marker that its code writes."""
    shutil.copytree(source, folder)
    marker = folder.parent / "marker"
    (folder / f"{MODULE}.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Untrusted: ...\n")
    change(folder)
    return marker


def doors(folder: Path, text: Path) -> list[list[str]]:
    text.write_text("w1 w2 " * 9)
    return [
        ["generate", str(folder), "w1", "--max-tokens", "2"],
        ["generate", str(folder), "--max-tokens", "2", "--json"],
        ["chat", str(folder), "--max-tokens", "2"],
        ["serve", str(folder), "--port", "20997", "--engine", "transformers"],
        ["eval", str(folder), "--text", str(text), "--limit", "1"],
    ]


def answer_yes(words: list[str]) -> Any:
    """A command whose stdin would allow everything that is asked."""
    done = CliRunner().invoke(app, words, input="y\n" * 9)
    assert ASKED not in done.output and "Traceback" not in done.output
    return done


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_needs_code_is_refused(case: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    family, change = REFUSED[case]
    folder = tmp_path / "model"
    marker = untrusted(models(family), change, folder)
    for words in doors(folder, tmp_path / "text"):
        done = answer_yes(words)
        assert done.exit_code == 1 and SENTENCE in done.output, (words, done.output, done.exception)
    load = load_tokenizer if "tokenizer" in case else lancebill.from_pretrained
    with pytest.raises(CustomCode, match=SENTENCE) as caught:
        load(folder)
    assert caught.value.hint and str(folder) in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize("case", HARMLESS)
def test_code_that_is_not_needed_does_not_run(case: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    family, change = HARMLESS[case]
    folder = tmp_path / "model"
    marker = untrusted(models(family), change, folder)
    for words in (["generate", str(folder), "w1", "--max-tokens", "2"], ["inspect", str(folder)]):
        done = answer_yes(words)
        assert done.exit_code == 0, (done.output, done.exception)
    lancebill.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    assert not marker.exists()


def test_nothing_is_asked(models: Callable[[str], Path], tmp_path: Path) -> None:
    """In a process whose stdin stays open: a question would wait."""
    marker = untrusted(models("mixtral"), REFUSED["a model that transformers does not know"][1], tmp_path / "model")
    command = [sys.executable, "-m", "lancebill", "generate", str(tmp_path / "model")]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write("y\nhello")
    process.stdin.flush()
    assert process.wait(300) == 1
    said = process.stderr.read()
    assert SENTENCE in said and ASKED not in said + process.stdout.read()
    assert not marker.exists()
    process.stdin.close()


def test_decoding_with_code_is_refused(models: Callable[[str], Path], tmp_path: Path) -> None:
    marker = untrusted(models("mixtral"), custom_decoding, tmp_path / "model")
    model = lancebill.from_pretrained(tmp_path / "model", trust_remote_code=False)
    tokens = load_tokenizer(tmp_path / "model")("w1 w2", return_tensors="pt")
    for trusted in (None, True):
        with pytest.raises(CustomCode, match=SENTENCE):
            model.generate(**tokens, custom_generate=str(tmp_path / "model"), trust_remote_code=trusted)
    edited("generation_config.json", penalty_alpha=0.6, top_k=4)(tmp_path / "model")  # contrastive: code on the hub
    with pytest.raises(CustomCode, match=SENTENCE):
        lancebill.from_pretrained(tmp_path / "model").generate(**tokens, max_new_tokens=2)
    with pytest.raises(SpecError, match=SENTENCE):
        lancebill.from_pretrained(tmp_path / "model", trust_remote_code=True)
    assert not marker.exists()


def test_a_part_of_a_model_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks again for each part, by the `auto_map` in its section, if it has no class for it."""
    text = tiny.COMMON | {"intermediate_size": 32, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}
    vision = {"model_type": "idefics3_vision", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.AriaConfig(text_config=text, vision_config=vision, image_token_index=5)
    transformers.AriaForConditionalGeneration(config).save_pretrained(tmp_path / "plain")
    folder = tmp_path / "model"
    part = {"model_type": "align_vision_model", "auto_map": auto_map("AutoModel"), "_name_or_path": str(folder)}
    marker = untrusted(tmp_path / "plain", edited("config.json", vision_config=part), folder)
    typed = io.StringIO("y\n")
    monkeypatch.setattr(sys, "stdin", typed)
    with pytest.raises(CustomCode, match=SENTENCE):
        lancebill.from_pretrained(folder)
    assert typed.tell() == 0 and not marker.exists()


def private(folder: Path) -> None:
    """What links out of a checkpoint lead to."""
    folder.mkdir()
    for name, text in (("docker.json", json.dumps({"weight_map": SECRET, "chat": SECRET})), ("key", SECRET)):
        (folder / name).write_text(text)


@pytest.mark.parametrize("case", LINKS)
def test_links_out_of_a_checkpoint_are_refused(case: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    """Before and after a model is loaded: nothing of a private file is read, copied or published."""
    private(tmp_path / "private")
    folder, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(models("mixtral"), folder)
    model = lancebill.from_pretrained(folder, weights={"experts": "int8"})
    copied = lancebill.from_pretrained(folder)
    LINKS[case](folder)
    done = CliRunner().invoke(app, ["convert", str(folder), str(out), "--to", "int8"])
    assert done.exit_code == 1 and "the link points" in done.output, done.output
    assert SECRET not in done.output
    if "tensors" not in case:  # those of a loaded model are open
        for loaded in (model, copied):
            with pytest.raises(MalformedFile, match="the link points"):
                loaded.save_pretrained(out)
        with pytest.raises(MalformedFile, match="the link points"):
            load_tokenizer(folder)  # also of what lies beside a GGUF file
    if case.startswith("config.json"):
        with pytest.raises(MalformedFile, match="the link points"):
            Checkpoint.open(folder / "model.safetensors")
    with pytest.raises(MalformedFile, match="the link points"):
        lancebill.from_pretrained(folder)
    assert not out.exists()


def test_links_beside_a_gguf_file_are_the_users_own(tmp_path: Path) -> None:
    """But for those that the tokenizer would read."""
    pytest.importorskip("gguf")
    private(tmp_path / "private")
    (folder := tmp_path / "model").mkdir()
    tokens, merges = {"tokens": ["<unk>", "a", "b", "ab"], "token_type": [2, 1, 1, 1]}, ["a b"]
    metadata = {f"tokenizer.ggml.{key}": value for key, value in {**tokens, "merges": merges, "model": "gpt2"}.items()}
    write_gguf(folder / "model.gguf", {"general.architecture": "llama", **metadata}, {})
    linked("notes.txt", "../private/key")(folder)
    linked("elsewhere", "../private")(folder)
    assert load_tokenizer(folder, "model.gguf")("ab").input_ids == [3]
    linked("tokenizer_config.json", "../private/docker.json")(folder)
    with pytest.raises(MalformedFile, match="the link points"):
        load_tokenizer(folder, "model.gguf")


@pytest.mark.parametrize("case", INSIDE)
def test_links_inside_a_checkpoint_are_followed(case: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(models("mixtral"), folder)
    INSIDE[case](folder)
    (tmp_path / "linked").symlink_to(folder)
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "linked"), str(out), "--to", "int8"])
    assert done.exit_code == 0, done.output
    assert not any(file.is_symlink() for file in out.iterdir())
    if (folder / "merges.txt").exists():
        assert (out / "merges.txt").read_bytes() == (folder / "tokenizer.json").read_bytes()
