"""What has not changed since the checkpoint before is linked; whatever happens, each checkpoint is whole by itself."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatrain import AdamW, Engine
from megatrain.checkpoint import manifest
from megatrain.checkpoint import save as save_module
from megatrain.checkpoint.folder import Retention, open_checkpoint, prune
from megatrain.checkpoint.manifest import full_check
from megatrain.checkpoint.range_writer import OpenFile
from megatrain.train.async_save import Save
from tests.tiny import equal, tiny_model, unequal_batches

BLOCK = 1 << 10


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "BLOCK_NBYTES", BLOCK)
    monkeypatch.setattr(save_module, "SMALLEST", 1)


def made() -> Engine:
    """The lower layer and the embedding are frozen."""
    model = tiny_model()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return Engine.from_model(model, optimizer=AdamW(lr=1e-2), verify=False)


def saved(engine: Engine, folder: Path, **how: Any) -> Save:
    engine.step(unequal_batches(2))
    save = engine.save(folder, **how)
    save.wait()
    return save


def weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def inode(path: Path) -> int:
    return path.stat().st_ino


def test_hard_links_to_frozen_weights_survive_pruning(tmp_path: Path) -> None:
    with made() as engine:
        first = saved(engine, tmp_path)
        second = saved(engine, tmp_path)
        assert first.path is not None
        assert second.path is not None
        trained, frozen = weights(first.path)
        now_trained, now_frozen = weights(second.path)
        assert inode(frozen) == inode(now_frozen)
        assert inode(trained) != inode(now_trained)
        assert now_frozen.stat().st_size <= second.shared_nbytes < second.nbytes
        assert first.shared_nbytes == 0
        assert not now_frozen.stat().st_mode & 0o222, "whoever wrote into it would write into both"
        expected = engine.master_weights()
        assert prune(tmp_path, Retention(keep_last=1)) == [first.path]
        assert full_check(second.path) == []
        loss = engine.step(unequal_batches(2)).loss
    with Engine.from_checkpoint(second.path, verify=False) as again:
        assert equal(again.master_weights(), expected)
        assert again.step(unequal_batches(2)).loss == loss
        third = saved(again, tmp_path)  # a resumed run shares too, once it has read what it shares
        assert third.path is not None
        assert inode(weights(third.path)[1]) == inode(now_frozen)


def test_small_files_are_never_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_module, "SMALLEST", 1 << 20)
    with made() as engine:
        first, second = saved(engine, tmp_path), saved(engine, tmp_path)
    assert second.shared_nbytes == 0
    assert first.path is not None
    assert second.path is not None
    assert inode(first.path / "config.json") != inode(second.path / "config.json")


def test_tokenizers_are_shared_by_content(tmp_path: Path) -> None:
    texts = ["a" * 5000, "a" * 5000, "a" * 4999 + "b"]

    def write(folder: Path) -> None:
        (folder / "tokenizer.json").write_text(texts.pop(0))

    with made() as engine:
        paths = [saved(engine, tmp_path, write_more=write).wait() / "tokenizer.json" for _ in range(3)]
    assert inode(paths[0]) == inode(paths[1]) != inode(paths[2])
    assert paths[2].read_text().endswith("b")
    assert paths[1].read_text().endswith("a")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "at",
    [
        pytest.param(0, id="first block", marks=pytest.mark.slow),
        pytest.param(3 * BLOCK, id="fourth block"),
        pytest.param(-1, id="last byte"),
    ],
)
def test_any_difference_forces_a_rewrite(at: int, tmp_path: Path) -> None:
    """A frozen weight that changes all the same: the file is the new one, and the old one is as it was."""
    with made() as engine:
        first = saved(engine, tmp_path)
        assert first.path is not None
        before = weights(first.path)[1].read_bytes()
        name = {0: "model.embed_tokens.weight", -1: "model.layers.0.post_attention_layernorm.weight"}.get(
            at, "model.layers.0.mlp.up_proj.weight"
        )
        value = engine.master_weights()[name]
        value.view(-1)[-1] += 1.0
        engine.parts.store.write_master(name, value)
        second = saved(engine, tmp_path)
        assert second.path is not None
        after = engine.master_weights()
    assert weights(first.path)[1].read_bytes() == before
    assert weights(second.path)[1].read_bytes() != before
    assert full_check(first.path) == full_check(second.path) == []
    with Engine.from_checkpoint(second.path, verify=False) as again:
        assert equal(again.master_weights(), after)


def test_touched_files_are_rewritten_and_damage_does_not_spread(tmp_path: Path) -> None:
    with made() as engine:
        first = saved(engine, tmp_path)
        assert first.path is not None
        frozen = weights(first.path)[1]
        content = bytearray(frozen.read_bytes())
        content[-1] ^= 1
        frozen.write_bytes(content)
        second = saved(engine, tmp_path)
        assert second.path is not None
        assert full_check(first.path)
        assert full_check(second.path) == []
        assert inode(frozen) != inode(weights(second.path)[1])


def test_damage_with_unchanged_mtime_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without links the file is written again from memory; a bit has changed below the file system."""
    with made() as engine:
        first = saved(engine, tmp_path)
        assert first.path is not None
        frozen = weights(first.path)[1]
        times = frozen.stat()
        content = bytearray(frozen.read_bytes())
        content[2 * BLOCK] ^= 1
        frozen.write_bytes(content)
        os.utime(frozen, ns=(times.st_atime_ns, times.st_mtime_ns))

        def refuses(source: Path, target: Path) -> None:
            raise OSError(errno.EPERM, "no links here")

        monkeypatch.setattr(os, "link", refuses)
        assert full_check(first.path)
        assert full_check(saved(engine, tmp_path).wait()) == []


def test_a_removed_previous_checkpoint_is_not_missed(tmp_path: Path) -> None:
    with made() as engine:
        shutil.rmtree(saved(engine, tmp_path).wait())
        second = saved(engine, tmp_path)
    assert second.shared_nbytes == 0
    assert full_check(second.wait()) == []


def test_without_links_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuses)
    with made() as engine:
        saves = saved(engine, tmp_path), saved(engine, tmp_path)
        first, second = (save.wait() for save in saves)
    (_, frozen), (_, now) = weights(first), weights(second)
    assert inode(frozen) != inode(now)
    assert saves[0].copied == (0, "")
    assert saves[1].copied[0] >= frozen.stat().st_size
    assert saves[1].copied[1] == "no links here"
    assert frozen.read_bytes() == now.read_bytes()
    assert full_check(second) == []


def test_saving_with_frozen_weights_writes_only_trained_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    honest = OpenFile.__init__

    def opens(file: OpenFile, path: Path, *rest: Any, **options: Any) -> None:
        opened.append(path.name)
        honest(file, path, *rest, **options)

    with made() as engine:
        saved(engine, tmp_path)
        monkeypatch.setattr(OpenFile, "__init__", opens)
        saved(engine, tmp_path)
    assert sorted(opened) == ["model-00001-of-00002.safetensors", "moments.safetensors"]


def test_a_previous_checkpoint_needs_the_same_folder_and_a_manifest(tmp_path: Path) -> None:
    with made() as engine:
        first = saved(engine, tmp_path / "a").wait()
        assert saved(engine, tmp_path / "b").shared_nbytes == 0
        engine.saver.goes_on_from(tmp_path / "absent")
        engine.restore(open_checkpoint(first))
        third = engine.save(tmp_path / "a", step=9).wait()
    assert inode(weights(first)[1]) == inode(weights(third)[1])


def test_frozen_weights_changed_in_place_are_saved(tmp_path: Path) -> None:
    with made() as engine:
        saved(engine, tmp_path)
        view = engine.weights.view("model.embed_tokens.weight")
        assert view is not None
        for value in (0.5, 0.25):
            view.fill_(value)
            second = saved(engine, tmp_path).wait()
            expected = engine.master_weights()
            with Engine.from_checkpoint(second, verify=False) as again:
                assert equal(again.master_weights(), expected)


def test_files_that_a_caller_adds_do_not_go_to_the_previous_checkpoint(tmp_path: Path) -> None:
    """Through a link, that is. A link's mode protects it from writes, but not from those of root."""
    with made() as engine:
        first = saved(engine, tmp_path).wait()
        frozen = weights(first)[1]

        def add(folder: Path) -> None:
            (folder / frozen.name).write_bytes(b"x" * frozen.stat().st_size)

        second = saved(engine, tmp_path, write_more=add).wait()
    assert full_check(first) == full_check(second) == []
