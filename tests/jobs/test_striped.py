"""A striped store has the bytes and the tokens of a plain one, each directory its share, and whatever is wrong with a
stripe is said with its name."""

import errno
import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs.config.settings import GenerateConfig
from jobs.config.typed import build
from jobs.config.words import rewrite_words
from jobs.packing import shard as shard_module
from jobs.packing import striping
from jobs.packing.config import Format, PackConfig, SourceConfig
from jobs.packing.packing import Packing, pack
from jobs.packing.striping import write_stripes
from jobs.planning.own_inputs import read_own_shape
from jobs.run.tasks.generate import generate
from runtime import Runtime
from runtime.checkpoint_source.location import find_checkpoint
from runtime.config.settings import DType, ExpertPaging, ModelConfig, Tier, Verify
from runtime.errors import CheckpointError, ConfigError, Interrupted, OutputError, RunMismatchError, StorageError
from runtime.model.loading import load_model
from runtime.plan.shape.extents import Extent
from runtime.plan.shape.shapes import Stripes
from runtime.store import file_digests
from runtime.store import reader as reader_module
from runtime.store.checkpoint import INDEX, Checkpoint, open_checkpoint
from runtime.store.mirrors import find_copies
from runtime.store.reader import Reader
from runtime.store.stripes import open_whole
from tests.generations import read_generations
from tests.jobs.test_identity import NUM_ROWS, Place, begun
from tests.jobs.test_pack import Killed, _kill_at, files_in, model
from tests.jobs.test_pack import packed as packed_plain
from tests.runtime.test_fidelity import config_for, tokens_of
from tests.runtime.test_mirrors import Watched
from tests.support import Reference

References = Callable[[str], Reference]
PIECE = 4096
__all__ = ["begun", "model"]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models then have many pieces."""
    monkeypatch.setattr(striping, "STRIPE_BYTES", PIECE)


def packed(source: Path, *out: Path, **settings: Any) -> Packing:
    config = PackConfig(model=SourceConfig(path=str(source)), out=tuple(map(str, out)), **settings)
    return pack(config, lambda done, total: None)


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    return [tmp_path / name for name in ("a", "b", "c")]


@pytest.fixture
def store(model: Path, places: list[Path]) -> list[Path]:
    packed(model, *places)
    return places


def opened(store: list[Path], verify: Verify = Verify.sampled) -> Checkpoint:
    config = ModelConfig(name="test", path=str(store[0]), mirrors=tuple(map(str, store[1:])), verify=verify)
    return load_model(config, torch.device("cpu"), str(store[0].parent / "cache")).checkpoint


def stripes_in(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.stripe-*.safetensors"))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def data_offset(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_joined_stripes_are_the_plain_store(model: Path, store: list[Path], tmp_path: Path) -> None:
    packed_plain(model, tmp_path / "plain")
    checkpoint, plain = open_checkpoint(store[0]), open_checkpoint(tmp_path / "plain")
    assert len(checkpoint.files) == 3
    for file, other in zip(checkpoint.files, plain.files, strict=True):
        with open_whole(file, checkpoint.stripes[file]) as whole:
            assert whole.read() == Path(other).read_bytes()
    num_bytes = sum(path.stat().st_size - data_offset(path) for each in store for path in stripes_in(each))
    assert num_bytes == sum(Path(file).stat().st_size for file in plain.files)
    assert checkpoint.fingerprint() == plain.fingerprint()
    assert len(checkpoint.stored_files) == 9


def test_a_stripe_is_a_safetensors_file(store: list[Path]) -> None:
    for path in (path for directory in store for path in stripes_in(directory)):
        (data,) = load_file(path).values()
        assert bytes(data.tolist()) == path.read_bytes()[data_offset(path) :]


def test_shards_shorter_than_a_piece_are_on_the_first_disk_alone(
    reference: References, places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = reference("llama")
    monkeypatch.setattr(striping, "STRIPE_BYTES", 16 << 20)
    packed(ref.directory, *places)
    assert {path.stat().st_size - data_offset(path) for path in stripes_in(places[1])} == {0}
    opened(places, Verify.full)
    elsewhere = Reference(directory=places[0], prompts=[], expected=[], sampled=[])
    assert tokens_of(Runtime(config_for(elsewhere)), ref.prompts) == ref.expected


def test_each_directory_has_the_same_share_of_every_tensor(store: list[Path]) -> None:
    tensors = open_checkpoint(store[0]).tensors.values()
    assert max(tensor.num_bytes for tensor in tensors) > 10 * PIECE
    for tensor in tensors:
        shares, stripes = [0, 0, 0], tensor.stripes
        assert stripes is not None
        for each in stripes.ranges(tensor.offset, tensor.num_bytes):
            shares[each.stripe] += each.num_bytes
        assert sum(shares) == tensor.num_bytes
        assert max(shares) - min(shares) <= PIECE


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("family", ["llama, tied", "mixtral"])
def test_tokens_are_those_of_the_original_in_every_tier(
    family: str, reference: References, places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = reference(family)
    packed(ref.directory, *places)
    runtime = Runtime(config_for(Reference(directory=places[0], prompts=[], expected=[], sampled=[])))
    watched = Watched(monkeypatch)
    for tier in Tier:
        for paging in (ExpertPaging.off, ExpertPaging.auto)[: 1 + runtime.model.shape.has_experts]:
            offload = replace(runtime.config.offload, tier=tier, resident_layers=1, expert_paging=paging)
            runtime.config = replace(runtime.config, offload=offload)
            watched.num_bytes.clear()
            assert tokens_of(runtime, ref.prompts) == ref.expected, (tier, paging)
            shares = [watched.num_bytes[name] for name in ("a", "b", "c")]
            assert min(shares) > 0.8 * max(shares), (tier, shares)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_any_part_of_a_divided_file_is_read(count: int, direct: bool, tmp_path: Path) -> None:
    draw = random.Random(count)
    content = draw.randbytes(41 * PIECE + 1234)
    directories = [tmp_path / str(number) for number in range(count)]
    for directory in directories:
        directory.mkdir()
    with write_stripes(directories, "x.safetensors", len(content), "") as writer:
        for first in range(0, len(content), 5000):
            writer.write(content[first : first + 5000])
    stripes = replace(writer.stripes, files=tuple(str(stripes_in(directory)[0]) for directory in directories))
    buffer = torch.zeros(PIECE * 64, dtype=torch.uint8)
    start = -buffer.data_ptr() % PIECE
    target = memoryview(buffer.numpy())[start:]  # pyright: ignore[reportArgumentType]
    with Reader(num_threads=2, chunk_bytes=3 * PIECE, direct=direct, stripes={"x": stripes}) as reader:
        for _ in range(20):
            begin = draw.randrange(41) * PIECE
            num_bytes = min(draw.randrange(1, 12) * PIECE, 42 * PIECE - begin)
            used = min(num_bytes, len(content) - begin)
            extents = [Extent(file="x", offset=begin, num_bytes=num_bytes, used_bytes=used, slot_offset=2 * PIECE)]
            for read in (reader.submit, reader.gather):
                target[: 16 * PIECE] = bytes(16 * PIECE)
                read(extents, target).wait()
                assert bytes(target[2 * PIECE : 2 * PIECE + used]) == content[begin : begin + used]
    with open_whole("x", stripes) as whole:
        for _ in range(20):
            begin, num_bytes = draw.randrange(len(content)), draw.randrange(9 * PIECE)
            whole.seek(begin)
            assert whole.read(num_bytes) == content[begin : begin + num_bytes]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_stripes_have_all_bytes_once(count: int) -> None:
    stripes = Stripes(files=("x",) * count, data_offset=7, piece_bytes=10, num_bytes=0)
    for num_bytes in range(95):
        places = [
            (each.stripe, each.offset + i) for each in stripes.ranges(0, num_bytes) for i in range(each.num_bytes)
        ]
        sizes = [stripes.stripe_bytes(stripe, num_bytes) for stripe in range(count)]
        assert sorted(places) == [(s, 7 + i) for s, size in enumerate(sizes) for i in range(size)]
        assert list(stripes.ranges(33, num_bytes))[:1] == [] or next(stripes.ranges(33, num_bytes)).stripe == 3 % count


def test_a_read_that_fails_ends_the_run_with_the_name_of_the_stripe(
    reference: References, places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other disk has its bytes: it is tried as often as a file without mirrors."""
    ref = reference("llama")
    packed(ref.directory, *places)
    runtime = Runtime(config_for(Reference(directory=places[0], prompts=[], expected=[], sampled=[])))
    watched = Watched(monkeypatch)
    watched.broken.add("b")
    monkeypatch.setattr(reader_module, "PAUSES_SECONDS", (0.0, 0.0))
    with pytest.raises(StorageError, match=r"/b/.*stripe-2-of-3.*tried 3 times.* start the same command again") as told:
        runtime.generate(ref.prompts)
    assert told.value.exit_code == 75
    watched.broken.clear()
    assert tokens_of(runtime, ref.prompts) == ref.expected


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("is_replaced", [False, True], ids=["kept", "replaced"])
def test_a_packing_that_is_killed_at_any_step_goes_on(
    is_replaced: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = [tmp_path / "right" / name for name in ("a", "b")]
    packed(model, *right)
    index = json.loads((right[0] / INDEX).read_text())
    for step in range(200):
        source, out = tmp_path / f"source-{step}", [tmp_path / f"out-{step}" / name for name in ("a", "b")]
        shutil.copytree(model, source)
        with monkeypatch.context() as patch:
            _kill_at(patch, step)
            try:
                packed(source, *out, replace=is_replaced)
                was_killed = False
            except Killed:
                was_killed = True
        packing = packed(source, *out, replace=is_replaced)
        for directory, other in zip(out, right, strict=True):
            found, expected = files_in(directory), files_in(other)
            found.pop(INDEX, None), expected.pop(INDEX, None)
            assert found == expected
            assert not list(directory.glob("*.tmp"))
        stripes = {"stripes": [str(directory) for directory in out]}
        assert json.loads((out[0] / INDEX).read_text()) == {**index, "metadata": index["metadata"] | stripes}
        assert len(list(source.glob("*.safetensors"))) == (0 if is_replaced else 3)
        shutil.rmtree(source), shutil.rmtree(out[0].parent)
        if not was_killed:
            assert step > 20
            assert packing.num_kept == 3
            return
    pytest.fail("it takes more steps than that")


def test_a_full_disk_is_named_and_packing_goes_on_with_space(
    model: Path, places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second shard does not fit on the second disk."""

    class Full:
        def __init__(self, file: BinaryIO):
            self._file = file

        def __getattr__(self, name: str) -> object:
            return getattr(self._file, name)

        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real = striping.atomic_write

    @contextmanager
    def write(path: Path, num_bytes: int) -> Iterator[object]:
        with real(path, num_bytes) as file:
            yield Full(file) if path.parent.name == "b" and "shard-1" in path.name else file

    with monkeypatch.context() as patch:
        patch.setattr(striping, "atomic_write", write)
        with pytest.raises(OutputError, match=r"/b/shard-1.stripe-2-of-3.safetensors cannot.*No space left.*free"):
            packed(model, *places)
    assert [len(stripes_in(place)) for place in places] == [1, 1, 1]
    assert not [path for place in places for path in place.glob("*.tmp")]
    assert packed(model, *places).num_kept == 1
    opened(places)


def test_a_buffered_write_that_fails_late_is_named(
    model: Path, places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer is written when it is full, or as the file is closed."""

    class Full(io.FileIO):
        def write(self, data: object, /) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real = Path.open

    def open_path(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> object:
        if mode == "xb" and path.parent.name == "b":
            return io.BufferedWriter(Full(path, "xb"))
        return real(path, mode, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_path)
        with pytest.raises(OutputError, match=r"/b/shard-0.stripe-2-of-3.safetensors cannot"):
            packed(model, *places)
    assert not [path for place in places for path in place.iterdir() if path.name != ".pack.lock"]


def test_directories_that_cannot_be_packed_into_are_refused(model: Path, places: list[Path], tmp_path: Path) -> None:
    a, b, c = places
    with pytest.raises(ConfigError, match=rf"out names {a} twice"):
        packed(model, a, b, a.parent / "b" / ".." / "a")
    with pytest.raises(ConfigError, match=r"is the same directory as model\.path"):
        packed(model, a, model)
    b.mkdir()
    (b / "mine.txt").write_text("no stripe")
    packed(model, a, b)
    assert (b / "mine.txt").read_text() == "no stripe"
    for others in ([a, b, c], [b, a], [a]):
        with pytest.raises(
            CheckpointError, match=r"stripe-\d-of-2.*packed into other directories, or in another order"
        ):
            packed(model, *others)
    packed_plain(model, tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"plain/shard-0.safetensors: packed into other directories"):
        packed(model, tmp_path / "plain", c)


def test_stripes_of_another_model_are_neither_gone_on_with_nor_written_over(model: Path, places: list[Path]) -> None:
    a, b, _ = places
    packed(model, a, b)
    other = shutil.copytree(model, model.parent / "other")
    for path in other.glob("*.safetensors"):
        save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    before = files_in(b)
    for directories in ([a, b], [a.parent / "new", b]):  # the second has no stripe in its first directory
        with pytest.raises(CheckpointError, match=r"stripe-\d-of-2.safetensors: packed from another file than"):
            packed(other, *directories)
    assert files_in(b) == before
    with pytest.raises(CheckpointError, match="packed from another file than"):
        pack(PackConfig(model=SourceConfig(path=str(model)), out=(str(a), str(b)), format=Format.int8), lambda *_: None)


def test_a_lost_stripe_is_packed_again_from_the_original(model: Path, store: list[Path]) -> None:
    before = files_in(store[1])
    stripes_in(store[1])[0].unlink()
    assert packed(model, *store).num_kept == 2
    assert files_in(store[1]) == before
    stripes_in(store[1])[0].unlink()
    (model / "shard-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"/b/shard-0.stripe-2-of-3.safetensors: missing: no other disk"):
        packed(model, *store)


def test_a_moved_store_is_read_by_naming_all_directories(store: list[Path], tmp_path: Path) -> None:
    moved = [path.rename(tmp_path / f"moved-{path.name}") for path in store]
    with pytest.raises(
        CheckpointError, match=rf"{store[1]}: missing: directory 2 of 3 .*model=\[.*moved-a,DIR2,DIR3\]"
    ):
        opened(moved[:1])
    assert opened(moved).stored_files[1].startswith(str(moved[1]))
    with pytest.raises(CheckpointError, match=r"missing: directory 2 of 3"):
        read_own_shape(ModelConfig(path=str(moved[0])), DType.auto, None, is_plain=False, has_device=False)


def test_directories_in_another_order_or_number_are_refused(store: list[Path], tmp_path: Path) -> None:
    a, b, c = store
    with pytest.raises(CheckpointError, match=rf"{c}: has stripe 3 of 3 of shard-0.safetensors, expected 2 of 3: name"):
        opened([a, c, b])
    with pytest.raises(
        CheckpointError, match=rf"{b}: has stripe 2 of 3 of a striped store: set model.path to its first"
    ):
        opened([b, a, c])
    with pytest.raises(CheckpointError, match=rf"{b}: named twice: directory 3 of 3"):
        opened([a, b, b])
    with pytest.raises(CheckpointError, match=r"over 3 directories, but 4 are named: .* has no mirrors"):
        opened([a, b, c, tmp_path / "mirror"])
    (a / INDEX).unlink()
    with pytest.raises(CheckpointError, match=rf"{a}: has stripe 1 of 3 .*not finished: start the same `weightstream"):
        opened(store)


@pytest.mark.parametrize("told", ["/b", [], ["/a"], ["/a", 5], {"a": "b"}, 5])
def test_an_index_that_names_no_directories_is_refused(told: object, store: list[Path]) -> None:
    index = json.loads((store[0] / INDEX).read_text())
    (store[0] / INDEX).write_text(json.dumps({**index, "metadata": {"stripes": told}}))
    with pytest.raises(CheckpointError, match=r"index.json: metadata.stripes must list directories"):
        opened(store[:1])


@pytest.mark.parametrize("change", [-1, -PIECE, -(10**9), 1])
def test_a_stripe_of_another_length_is_named(change: int, store: list[Path]) -> None:
    path = stripes_in(store[2])[1]
    data = path.read_bytes()
    path.write_bytes(data[: max(data_offset(path), len(data) + change)] + b"x" * change)
    problem = "cut short" if change < 0 else "trailing bytes"
    with pytest.raises(CheckpointError, match=rf"/c/shard-1.stripe-3-of-3.safetensors: .*bytes.*{problem}: no other"):
        opened(store)


def test_a_stripe_that_vanishes_or_is_none_is_named(store: list[Path]) -> None:
    path = stripes_in(store[1])[0]
    data = path.read_bytes()
    for content in (
        b"",
        b"\x10\0\0\0\0\0\0\0not JSON at all.",
        data.replace(b'piece_bytes\\":4096', b'piece_bytes\\":4095'),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"/b/shard-0.stripe-2-of-3.safetensors: not a "):
            opened(store)
    path.write_bytes(stripes_in(store[2])[0].read_bytes())
    with pytest.raises(CheckpointError, match=r"/b/shard-0.stripe-2-of-3.*has stripe 3 of 3 of .*renamed"):
        opened(store)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"/b/shard-0.stripe-2-of-3.safetensors: missing: no other disk"):
        opened(store)


def test_a_stripe_of_another_pack_is_named(model: Path, store: list[Path], tmp_path: Path) -> None:
    for path in model.glob("*.safetensors"):
        save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    others = [tmp_path / "others" / name for name in ("a", "b", "c")]
    packed(model, *others)
    before = files_in(store[1])
    assert before.keys() == files_in(others[1]).keys()
    shutil.copy(stripes_in(others[1])[2], store[1])
    with pytest.raises(
        CheckpointError, match=r"/b/shard-2.stripe-2-of-3.*: a stripe of another pack than .*/a/shard-2"
    ):
        opened(store)


@pytest.mark.parametrize("verify", Verify)
@pytest.mark.parametrize("number", range(3))
def test_a_bit_of_a_small_stripe_is_found_and_named(number: int, verify: Verify, store: list[Path]) -> None:
    """The sampled pieces are all there are."""
    path = stripes_in(store[number])[1]
    flip(path, path.stat().st_size - 5)
    name = rf"{store[number]}/shard-1.stripe-{number + 1}-of-3.safetensors"
    with pytest.raises(CheckpointError, match=rf"{name}: damaged: CRC-32 .*pack the original again"):
        opened(store, verify)


def test_a_bit_of_the_header_that_stripes_hold_is_found(store: list[Path]) -> None:
    """It may be longer than a piece."""
    for directory in store[:2]:
        path = stripes_in(directory)[0]
        flip(path, data_offset(path) + 20)
        with pytest.raises(CheckpointError, match=rf"{path}: damaged: CRC-32"):
            open_checkpoint(store[0])
        flip(path, data_offset(path) + 20)


def test_a_bit_between_the_samples_is_found_with_full_verification(
    model: Path, places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (file_digests, shard_module, striping):
        monkeypatch.setattr(module, "PIECE_BYTES", 1024)
    packed(model, *places)
    path = stripes_in(places[1])[1]
    for place in range(data_offset(path) + 2 * PIECE + 10, path.stat().st_size, 1024):
        flip(path, place)
        with suppress(CheckpointError):  # of one of the sampled pieces
            opened(places)
            break
        flip(path, place)
    else:
        pytest.fail("every piece is sampled")
    with pytest.raises(CheckpointError, match=rf"{path}: damaged: CRC-32 of the 4 MiB at byte {place - 10:,} is"):
        opened(places, Verify.full)
    flip(path, place)
    digests = load_model(
        ModelConfig(name="test", path=str(places[0]), verify=Verify.full), torch.device("cpu"), str(model)
    ).digests
    assert len(digests) == 9


def test_a_striped_store_is_no_mirror(model: Path, store: list[Path], tmp_path: Path) -> None:
    packed_plain(model, tmp_path / "plain")
    with pytest.raises(
        CheckpointError, match=rf"model.mirrors: {store[0]} is a striped store, which cannot be a mirror"
    ):
        find_copies(open_checkpoint(tmp_path / "plain"), [str(store[0])])


def test_a_plan_has_the_numbers_of_the_plain_store(model: Path, store: list[Path], tmp_path: Path) -> None:
    packed_plain(model, tmp_path / "plain")
    (shape, storage), (plain, expected) = (
        read_own_shape(ModelConfig(path=str(path)), DType.auto, None, is_plain=False, has_device=False)
        for path in (store[0], tmp_path / "plain")
    )
    assert [stage.num_bytes for stage in shape.stages] == [stage.num_bytes for stage in plain.stages]
    assert storage == expected


def test_the_command_line_names_one_directory_or_several() -> None:
    for word, expected in (
        ("out=/disk1/m", "/disk1/m"),
        ("out=[/disk1/m,/disk2/m]", ("/disk1/m", "/disk2/m")),
        ("out=/disk1/m,/disk2/m", ("/disk1/m", "/disk2/m")),
    ):
        from hydra.core.override_parser.overrides_parser import OverridesParser

        (rewritten,) = rewrite_words([word], PackConfig)
        value = OverridesParser.create().parse_override(rewritten).value()
        value = value if isinstance(value, list) else str(value).strip("\"'")
        config = build(PackConfig, {"model": {"path": "/model"}, "out": value})
        assert config.out == expected
        assert hash(config)


def test_a_striped_store_at_a_url_is_refused(store: list[Path], tmp_path: Path) -> None:
    shutil.rmtree(store[1])  # as on another machine
    with pytest.raises(CheckpointError, match=r"a striped store is only read from local directories"):
        find_checkpoint(ModelConfig(name="hf", path=f"file://{store[0]}"), str(tmp_path / "cache"))


def test_a_run_of_the_plain_store_goes_on_with_the_striped_one(
    begun: Place, places: list[Path], tmp_path: Path
) -> None:
    """Their bytes are equal. With the digests of all files they are told apart."""
    whole, place = (shutil.copytree(begun.root, tmp_path / name) for name in ("whole", "place"))
    for root in (whole, place):
        shutil.rmtree(root / "generate")
    packed_plain(begun.model, tmp_path / "plain")
    packed(begun.model, *places)

    def config(root: Path, path: Path, verify: Verify = Verify.sampled) -> GenerateConfig:
        own = Place(root=root).config
        return replace(own, model=replace(own.model, path=str(path), verify=verify))

    def should_stop() -> bool:
        return any((place / "generate" / "case" / "generations").glob("*.parquet"))

    generate(config(whole, tmp_path / "plain", Verify.full), lambda: False)
    with pytest.raises(Interrupted):
        generate(config(place, tmp_path / "plain"), should_stop)
    with pytest.raises(RunMismatchError, match=r"stripe-1-of-3.safetensors sha256"):
        generate(config(whole, places[0], Verify.full), lambda: False)
    generate(config(place, places[0]), lambda: False)
    found, expected = (
        read_generations(Place(root=root).run).select(["id", "status", "completion"]).to_pylist()
        for root in (place, whole)
    )
    assert found == expected
    assert len(found) == NUM_ROWS
