"""From the hub, or from a URL, nothing is fetched but settings, a tokenizer and the weights that are read."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from huggingface_hub.utils import filter_repo_objects

from runtime.checkpoint_source import location
from runtime.checkpoint_source.location import find_checkpoint
from runtime.config.settings import ModelConfig
from runtime.errors import CheckpointError
from runtime.remote.object_store import ObjectStore
from runtime.store.checkpoint import INDEX, SINGLE, WEIGHTS_KEY

MODEL, COMMIT = "somebody/model", "0123456789abcdef0123456789abcdef01234567"
SETTINGS = {"config.json": "{}", "tokenizer.json": "{}", "tokenizer_config.json": "{}", "README.md": "a model"}
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
SHARDED = {INDEX: json.dumps({"weight_map": {f"w{name}": name for name in SHARDS}}), **dict.fromkeys(SHARDS, "w")}
Files = Mapping[str, str]
LAYOUTS: Mapping[str, tuple[Files, Sequence[str]]] = {
    "gpt-oss": (
        SHARDED | {f"original/{SINGLE}": "w", "original/config.json": "{}", "metal/model.bin": "w"},
        SHARDS,
    ),
    "Mistral": (SHARDED | {"consolidated.safetensors": "w", "params.json": "{}", "tokenizer.model.v3": "t"}, SHARDS),
    "a training run": (
        {SINGLE: "w", f"checkpoint-500/{SINGLE}": "w", "checkpoint-500/config.json": "{}", "optimizer.pt": "w"},
        [SINGLE],
    ),
    "variants": (
        dict.fromkeys((SINGLE, "model.fp16.safetensors", "lora/adapter_model.safetensors", "pytorch_model.bin"), "w"),
        [SINGLE],
    ),
    "a single file beside shards": (SHARDED | {SINGLE: "w"}, [SINGLE]),
    "a named file": (
        SHARDED
        | {SINGLE: "w", "mine[1].safetensors": "w", "config.json": json.dumps({WEIGHTS_KEY: "mine[1].safetensors"})},
        ["mine[1].safetensors"],
    ),
    "a named index": (
        {SINGLE: "w", "config.json": json.dumps({WEIGHTS_KEY: "mine.safetensors.index.json"})}
        | dict.fromkeys(SHARDS, "w")
        | {"mine.safetensors.index.json": SHARDED[INDEX]},
        SHARDS,
    ),
}  # fmt: skip


def settings_in(files: Files) -> set[str]:
    return {name for name in files if "/" not in name and ("json" in name or name.startswith("tokenizer"))}


class Hub:
    """A repository of the hub, behind its client's own filter, and a cache."""

    def __init__(self, files: Files, cache: Path):
        self.files, self.place, self.revisions = files, cache / "snapshots" / COMMIT, list[str | None]()

    def snapshot_download(
        self,
        model: str,
        *,
        revision: str | None = None,
        allow_patterns: list[str] | None = None,
        ignore_patterns: list[str] | None = None,
    ) -> str:
        self.revisions.append(revision)
        patterns: dict[str, Any] = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        names = list(filter_repo_objects(self.files, **patterns))
        assert names, "of which the client warns"
        for name in names:
            (self.place / name).parent.mkdir(parents=True, exist_ok=True)
            (self.place / name).write_text(self.files[name])
        return str(self.place)

    def list_repo_files(self, model: str, *, revision: str) -> list[str]:
        return list(self.files)

    @property
    def fetched(self) -> set[str]:
        return {path.relative_to(self.place).as_posix() for path in self.place.rglob("*") if path.is_file()}


def hub_with(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(SETTINGS | files, tmp_path)
    monkeypatch.setattr(location, "snapshot_download", hub.snapshot_download)
    monkeypatch.setattr(location, "HfApi", lambda: hub)
    return hub


def find(path: str = MODEL, revision: str | None = None, cache_dir: Path | None = None) -> Path:
    config = ModelConfig(name="hf", path=path, revision=revision)
    return find_checkpoint(config, None if cache_dir is None else str(cache_dir))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_a_repository_the_weights_are_fetched_that_are_read(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, weights = LAYOUTS[layout]
    hub = hub_with(files, tmp_path, monkeypatch)
    assert find() == hub.place
    assert hub.fetched == settings_in(hub.files) | set(weights)


def test_all_is_of_the_commit_that_the_first_fetch_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = hub_with(SHARDED, tmp_path, monkeypatch)
    find(revision="v1")
    assert hub.revisions == ["v1", *[COMMIT] * 3]


def test_chat_templates_in_their_folder_are_fetched_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    templates = {"chat_template.jinja": "{{ messages }}", "additional_chat_templates/tool_use.jinja": "{{ tools }}"}
    hub = hub_with({SINGLE: "w", **templates}, tmp_path, monkeypatch)
    find()
    assert templates.keys() <= hub.fetched


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["consolidated.safetensors"], "consolidated.safetensors, in the format of Mistral's"),
        (["original/consolidated.00.pth"], "original/consolidated.00.pth, in the format of"),
        (SHARDS, "3 shards .* and no index .*: download them, set model.path=DIR"),
        (["pytorch_model.bin"], "only pickled weights .*pytorch_model.bin"),
        (["small.gguf"], "a directory of GGUF files; download one and set model.path=DIR/small.gguf"),
        ([f"checkpoint-5/{SINGLE}"], "its folder checkpoint-5 does: download it, and set model.path to that folder"),
    ],
)
def test_a_repository_without_weights_that_can_be_read_says_what_it_holds(
    files: Sequence[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = hub_with(dict.fromkeys(files, "w"), tmp_path, monkeypatch)
    with pytest.raises(CheckpointError, match=rf"{MODEL}: .*{said}"):
        find()
    assert hub.fetched.isdisjoint(files)


def test_what_lies_in_the_cache_is_found_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the client itself: as it lies there when transformers has fetched it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    place = tmp_path / "models--somebody--model" / "snapshots" / COMMIT
    place.mkdir(parents=True)
    (tmp_path / "models--somebody--model" / "refs").mkdir()
    (tmp_path / "models--somebody--model" / "refs" / "main").write_text(COMMIT)
    for name, text in (SETTINGS | SHARDED).items():
        (place / name).write_text(text)
    assert find() == find(revision=COMMIT) == place
    with pytest.raises(CheckpointError, match=r"no weights at model\.path=somebody/model: not found on the hub"):
        find(revision="v1")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_a_url_the_weights_are_copied_that_are_read(layout: str, tmp_path: Path) -> None:
    files, weights = LAYOUTS[layout]
    url = f"memory://{tmp_path.name}-{layout.replace(' ', '-')}/model"
    store = ObjectStore(url, "model.path")
    for name, text in (SETTINGS | files).items():
        store.write(name, text.encode())
    copy = find(url, cache_dir=tmp_path)
    settings = {
        name for name in SETTINGS | files if "/" not in name and ("json" in name or name.startswith("tokenizer"))
    }
    assert {path.name for path in copy.iterdir()} == settings | set(weights)


def test_a_url_without_weights_that_can_be_read_says_what_is_there(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/model"
    for name in ("config.json", "consolidated.safetensors"):
        ObjectStore(url, "model.path").write(name, b"{}")
    with pytest.raises(CheckpointError, match=rf"{url}: .*consolidated.safetensors, in the format of"):
        find(url, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (f"m/{SINGLE}", "set model.path=m"),
        (f"m/{SHARDS[0]}", "set model.path=m"),
        ("m/config.json", "set model.path=m"),
        (SINGLE, "set model.path=."),
        ("prompts.csv", "set it to one of these"),
    ],
)
def test_a_file_that_is_no_model_is_said_to_be_one(
    file: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no hub is asked for it."""
    (tmp_path / "m").mkdir()
    (tmp_path / file).write_text("x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as error:
        find(file)
    assert str(error.value) == f"model.path={file} is a file, neither a directory nor GGUF: {said}"
