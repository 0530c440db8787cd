"""No damage goes unseen: every file of a checkpoint deleted, cut, grown, and flipped byte by byte."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain import Engine
from megatrain.checkpoint import manifest
from megatrain.checkpoint.folder import open_checkpoint, open_verifying_on_load
from megatrain.checkpoint.manifest import full_check, quick_check, read_manifest
from megatrain.checkpoint.save import PlannedCheckpoint
from megatrain.commands.export import run_export
from megatrain.commands.generate import GenerationModel
from megatrain.errors import DamagedCheckpoint
from tests.data.test_tokenizer import word_tokenizer
from tests.saved import ported, save

EXHAUSTIVE_NBYTES = 4096
"""Of a file up to this size, every byte is flipped; of a larger one, those at its ends and some between."""
SAMPLED = 60


class OneThread:
    """Does the work of a pool of threads on the spot, which for a thousand tiny checks is ten times faster."""

    def __init__(self, *_: object) -> None:
        self.map = map

    def __enter__(self) -> OneThread:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with several files of each kind."""
    planned = PlannedCheckpoint(ported(num_hidden_layers=1, vocab_size=16), shard_nbytes=30_000)
    return save(
        tmp_path_factory.mktemp("sound"),
        planned=planned,
        training={"step": 1, "rng": bytes(range(64))},
        write_more=lambda folder: (folder / "tokenizer.json").write_text('{"model": {}}'),
    )


@pytest.fixture
def checkpoint(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / sound.name))


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def damaged_files(check: Callable[[Path], list[object]], checkpoint: Path) -> list[str]:
    return [str(damage).split()[0] for damage in check(checkpoint)]


def test_the_example_checkpoint_has_every_kind_of_file(checkpoint: Path) -> None:
    names = {path.relative_to(checkpoint).as_posix() for path in files_of(checkpoint)}
    assert names >= {"config.json", "training.json", "manifest.json", "tokenizer.json", "model.safetensors.index.json"}
    assert len([name for name in names if name.startswith("model-")]) > 1
    assert len([name for name in names if name.startswith("optimizer/moments-")]) > 1
    assert quick_check(checkpoint) == full_check(checkpoint) == []


def changes(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Contents of another size."""
    for size in {0, len(content) // 2, len(content) - 1}:
        yield f"cut to {size}", content[:size]
    for extra in (b"\0", b"\n", b" "):
        yield f"grown by {extra!r}", content + extra


def test_missing_and_resized_files_fail_both_checks(checkpoint: Path) -> None:
    for path in files_of(checkpoint):
        name, content = path.relative_to(checkpoint).as_posix(), path.read_bytes()
        path.unlink()
        for check in (quick_check, full_check):
            assert damaged_files(check, checkpoint) == [name], f"{name} deleted"
        path.mkdir()
        for check in (quick_check, full_check):
            assert damaged_files(check, checkpoint) == [name], f"{name} made a folder"
        path.rmdir()
        for what, changed in changes(content):
            path.write_bytes(changed)
            for check in (quick_check, full_check):
                assert damaged_files(check, checkpoint) == [name], f"{name} {what}"
        path.write_bytes(content)
        assert full_check(checkpoint) == []


def places_in(nbytes: int, draw: random.Random) -> list[int]:
    """Which bytes of a file are flipped, in any order."""
    if nbytes <= EXHAUSTIVE_NBYTES:
        return list(range(nbytes))
    return [0, 7, 8, nbytes - 1, *draw.sample(range(nbytes), SAMPLED)]


def flip(path: Path, place: int, bits: int) -> None:
    """Change bits of one byte, or change them back."""
    with path.open("r+b", buffering=0) as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ bits]))


def test_any_flipped_manifest_byte_is_detected(checkpoint: Path) -> None:
    draw = random.Random(0)
    manifest = checkpoint / "manifest.json"
    for place in range(manifest.stat().st_size):
        bits = draw.randrange(1, 256)
        flip(manifest, place, bits)
        assert damaged_files(quick_check, checkpoint) == ["manifest.json"], f"byte {place}"
        flip(manifest, place, bits)
    assert full_check(checkpoint) == []


def test_any_flipped_file_byte_is_detected(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte in each file at a time, and each file must be named."""
    monkeypatch.setattr(manifest, "ThreadPoolExecutor", OneThread)
    draw = random.Random(0)
    paths = [path for path in files_of(checkpoint) if path.name != "manifest.json"]
    places = {path: places_in(path.stat().st_size, draw) for path in paths}
    while places:
        flips = [(path, left.pop(), draw.randrange(1, 256)) for path, left in places.items()]
        for each in flips:
            flip(*each)
        names = [path.relative_to(checkpoint).as_posix() for path in places]
        assert sorted(damaged_files(full_check, checkpoint)) == names, [(str(path), place) for path, place, _ in flips]
        for each in flips:
            flip(*each)
        places = {path: left for path, left in places.items() if left}
    assert full_check(checkpoint) == []


def test_swapped_bytes_are_detected(checkpoint: Path) -> None:
    for path in files_of(checkpoint):
        content = path.read_bytes()
        middle = len(content) // 2
        for changed in (content[middle:] + content[:middle], content[::-1], bytes(len(content))):
            path.write_bytes(changed)
            assert damaged_files(full_check, checkpoint) == [path.relative_to(checkpoint).as_posix()]
        path.write_bytes(content)


def test_a_file_from_another_checkpoint_is_detected(checkpoint: Path, tmp_path: Path) -> None:
    planned = PlannedCheckpoint(ported(num_hidden_layers=1, vocab_size=16), shard_nbytes=30_000)
    other = save(tmp_path / "other", 2, planned=planned)
    for path in files_of(other):
        if "safetensors" in path.name and not path.name.endswith(".json"):
            content = (checkpoint / path.relative_to(other)).read_bytes()
            shutil.copyfile(path, checkpoint / path.relative_to(other))
            assert quick_check(checkpoint) == []
            assert damaged_files(full_check, checkpoint) == [path.relative_to(other).as_posix()]
            (checkpoint / path.relative_to(other)).write_bytes(content)


def test_every_damaged_file_is_named(checkpoint: Path) -> None:
    nbytes = (checkpoint / "config.json").stat().st_size
    (checkpoint / "training.json").unlink()
    (checkpoint / "config.json").write_text("{}")
    first = checkpoint / "model-00001-of-00002.safetensors"
    first.write_bytes(first.read_bytes().replace(b"weight", b"weighs", 1))
    assert [str(damage) for damage in full_check(checkpoint)] == [
        f"config.json has 2 bytes, but was written with {nbytes:,}",
        "training.json is missing",
        f"model-00001-of-00002.safetensors is damaged between byte 0 and byte {first.stat().st_size:,}",
    ]
    with pytest.raises(
        DamagedCheckpoint, match=r"config.json has 2 bytes.*\(and 2 more\); go on from an older one"
    ) as caught:
        open_checkpoint(checkpoint)
    assert str(checkpoint) in str(caught.value)


def test_foreign_weights_are_detected_and_other_extra_files_ignored(checkpoint: Path) -> None:
    (checkpoint / "results.json").write_text("{}")
    (checkpoint / ".DS_Store").write_text("")
    (checkpoint / "notes").mkdir()
    assert full_check(checkpoint) == []
    shutil.copyfile(checkpoint / "model-00001-of-00002.safetensors", checkpoint / "model.safetensors")
    for check in (quick_check, full_check):
        assert [str(damage) for damage in check(checkpoint)] == [
            "model.safetensors was not there when the checkpoint was written"
        ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is damaged"),
        ("[]", "is damaged"),
        ("[" * 100_000 + "]" * 100_000, "is damaged"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "is damaged"),
        ("{}", "is damaged"),
        ('{"format": 1}', "is damaged"),
        ('{"format": 1, "files": [], "step": 0, "score": null, "version": ""}', "is damaged"),
        ('{"format": 2}', "has format 2, but this MegaTrain reads up to 1"),
    ],
)
def test_invalid_and_newer_manifests_have_clear_errors(text: str, said: str, checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text(text)
    assert [str(damage) for damage in quick_check(checkpoint)] == [f"manifest.json {said}"]


def test_a_manifest_with_paths_outside_its_folder_is_refused(checkpoint: Path) -> None:
    shutil.copyfile(checkpoint / "config.json", checkpoint.parent / "config.json")
    manifest = read_manifest(checkpoint)
    files = {**manifest.files, "../config.json": manifest.files["config.json"]}
    (checkpoint / "manifest.json").write_text(replace(manifest, files=files).text())
    for check in (quick_check, full_check):
        assert [str(damage) for damage in check(checkpoint)] == ["../config.json lies outside the folder"]


def test_a_reformatted_manifest_counts_as_damaged(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert [str(damage) for damage in quick_check(checkpoint)] == ["manifest.json is damaged"]


def test_damaged_headers_are_found_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any length: that of an adapter of many experts is longer than a block."""
    monkeypatch.setattr(manifest, "BLOCK_NBYTES", 512)
    checkpoint, draw = save(tmp_path), random.Random(2)
    for path in files_of(checkpoint):
        if path.suffix == ".safetensors":
            end = 8 + int.from_bytes(path.read_bytes()[:8], "little")
            assert end > 2 * 512
            for place in (*draw.sample(range(end), 20), end - 1):
                flip(path, place, 1)
                with pytest.raises(DamagedCheckpoint, match=path.name):
                    open_verifying_on_load(checkpoint)
                flip(path, place, 1)
    open_verifying_on_load(checkpoint)


def test_a_linked_file_is_compared_when_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As files in the hub's cache are, wherever the link leads."""
    monkeypatch.setattr(manifest, "BLOCK_NBYTES", 512)
    checkpoint = save(tmp_path / "run")
    file = checkpoint / "model.safetensors"
    for target in (tmp_path / "blob", checkpoint / "blob"):
        file.rename(target)
        file.symlink_to(target)
        last = target.stat().st_size - 1
        flip(target, last, 1)
        opened = open_verifying_on_load(checkpoint)
        opened.verify(str(target), 0, 512)
        with pytest.raises(DamagedCheckpoint, match=r"model\.safetensors is damaged"):
            opened.verify(str(target), last, last + 1)
        flip(target, last, 1)
        target.replace(file)


@pytest.mark.parametrize(
    "read",
    [
        lambda folder: Engine.from_pretrained(folder).close(),
        lambda folder: run_export(str(folder), folder.parent / "exported"),
        lambda folder: GenerationModel(str(folder)).load().close(),
    ],
    ids=["from_pretrained", "export", "generate"],
)
def test_the_model_of_a_checkpoint_is_compared_where_its_state_is_not_read(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    checkpoint = save(tmp_path / "run", write_more=lambda folder: word_tokenizer().save_pretrained(folder))
    read(checkpoint)
    shutil.rmtree(checkpoint.parent / "exported", ignore_errors=True)
    (checkpoint / "optimizer" / "moments.safetensors").unlink()
    flip(file := checkpoint / "model.safetensors", file.stat().st_size - 1, 1)
    with pytest.raises(DamagedCheckpoint, match=r"model\.safetensors is damaged"):
        read(checkpoint)
    (checkpoint / "manifest.json").write_text("{}")  # another program's: the folder is a model like any
    (checkpoint / "training.json").unlink()
    read(checkpoint)
