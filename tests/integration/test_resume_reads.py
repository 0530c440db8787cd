"""A resumption reads a checkpoint once: what it loads is compared with its checksums on the way, and the rest after."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from megatrain import AdamW, Engine
from megatrain.checkpoint import manifest
from megatrain.checkpoint.manifest import FileSum, read_manifest
from megatrain.errors import DamagedCheckpoint
from megatrain.memory import Store
from megatrain.model import PretrainedSource
from megatrain.train.engine import Parts
from tests.tiny import equal, tiny_model

BLOCK_NBYTES = 1 << 16
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 2048}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 400 blocks and more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "BLOCK_NBYTES", BLOCK_NBYTES)
        with Engine.from_model(tiny_model(**SIZES), "cpu", "fp32", AdamW(), verify=False) as engine:
            return engine.save(tmp_path_factory.mktemp("saved")).wait()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "BLOCK_NBYTES", BLOCK_NBYTES)


def drop(folder: Path) -> None:
    """Have the page cache forget the files, but for pages that are mapped."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_nbytes() -> int:
    """Bytes that the drive has read for this process."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def test_each_block_is_compared_once_and_read_once_by_the_drive(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose page cache loses what was read before weights, and before moments, are loaded."""
    blocks: list[tuple[str, int]] = []
    compare = manifest._difference

    def compared(folder: Path, files: Mapping[str, FileSum], run: manifest._Run) -> str:
        blocks.extend((run.name, run.first + at) for at in range(run.blocks))
        return compare(folder, files, run)

    monkeypatch.setattr(manifest, "_difference", compared)
    fill, take_up = PretrainedSource.fill, Parts.take_up
    monkeypatch.setattr(PretrainedSource, "fill", lambda *given: drop(saved) or fill(*given))
    monkeypatch.setattr(Parts, "take_up", lambda *given: drop(saved) or take_up(*given))
    drop(saved)
    before = read_nbytes()
    with Engine.from_checkpoint(saved, verify=False) as engine:
        read = read_nbytes() - before
        assert equal(engine.master_weights(), dict(tiny_model(**SIZES).named_parameters()))
    held = read_manifest(saved)
    assert sorted(blocks) == sorted(
        (name, at) for name, file in held.files.items() for at in range(len(file.blocks) // manifest.DIGITS)
    )
    if read:  # none, where the folder is in memory
        assert read <= 1.05 * held.nbytes


def test_damage_anywhere_is_found_before_it_is_loaded(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these bytes is flipped in turn; those of a file of tensors beyond its first block show as they load."""
    draw, loaded = random.Random(3), list[str]()
    write = Store.write_master

    def written(self: Store, name: str, value: Tensor) -> None:
        loaded.append(name)
        write(self, name, value)

    monkeypatch.setattr(Store, "write_master", written)
    late = 0
    for name in ("config.json", "training.json", *["model.safetensors", "optimizer/moments.safetensors"] * 3):
        path = saved / name
        content = path.read_bytes()
        at = draw.randrange(len(content))
        loaded.clear()
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        with pytest.raises(DamagedCheckpoint, match=rf"{name} is damaged between byte [\d,]+ and byte"):
            Engine.from_checkpoint(saved, verify=False)
        path.write_bytes(content)
        late += bool(loaded)
        assert not name.startswith("model") or not all(named in loaded for named in tiny_model(**SIZES).state_dict())
    assert late >= 3
    Engine.from_checkpoint(saved, verify=False).close()
