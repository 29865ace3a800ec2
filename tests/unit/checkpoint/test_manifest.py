"""Any damage to any file of a checkpoint is seen, and the file is named."""

import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fragments import whole

from hvd_transformer.checkpoint import manifest, tensor_file
from hvd_transformer.checkpoint.manifest import DamagedCheckpoint
from hvd_transformer.checkpoint.store import MODEL, OPTIMIZER, CheckpointStore, Snapshot, read_state
from hvd_transformer.errors import UserError

FILES = [MODEL, OPTIMIZER, "state.json", manifest.NAME]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A whole one, of a few hundred bytes a file."""
    tensors = {MODEL: whole({"w": torch.arange(6.0).view(2, 3)}), OPTIMIZER: whole({"exp_avg.w": torch.ones(2, 3)})}
    return CheckpointStore(tmp_path, 3).save(Snapshot(7, tensors, {"position": {"step": 7}}))


def damage(checkpoint: Path) -> str:
    with pytest.raises(DamagedCheckpoint) as caught:
        manifest.verify(checkpoint)
    assert isinstance(caught.value, UserError) and "\n" not in str(caught.value)
    return str(caught.value)


def test_a_whole_one_passes_and_lists_each_file(checkpoint: Path) -> None:
    manifest.verify(checkpoint)
    listed = json.loads((checkpoint / manifest.NAME).read_text())["files"]
    assert sorted([*listed, manifest.NAME]) == sorted(FILES) == sorted(path.name for path in checkpoint.iterdir())


def test_verifying_tells_of_its_progress(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_READ_BYTES", 10)
    calls: list[object] = []
    manifest.verify(checkpoint, advance=lambda: calls.append(None))
    num_bytes = sum(file.stat().st_size for file in checkpoint.iterdir() if file.name != manifest.NAME)
    assert len(calls) >= num_bytes // 10


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [0, 1, -1])
def test_a_truncated_file_is_named(name: str, keep: int, checkpoint: Path) -> None:
    content = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(content[:keep])
    message = damage(checkpoint)
    assert message.startswith(f"{checkpoint / name}: ")
    if name != manifest.NAME:
        assert f"truncated: {len(content[:keep])} bytes of {len(content)}" in message


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, "state.json"])
def test_any_flipped_bit_is_seen_and_its_file_named(name: str, checkpoint: Path) -> None:
    content = bytearray((checkpoint / name).read_bytes())
    chooser = random.Random(name)
    for bit in [0, 8 * len(content) - 1, *(chooser.randrange(8 * len(content)) for _ in range(100))]:
        content[bit // 8] ^= 1 << bit % 8
        (checkpoint / name).write_bytes(content)
        assert damage(checkpoint).startswith(f"{checkpoint / name}: damaged")
        content[bit // 8] ^= 1 << bit % 8
    (checkpoint / name).write_bytes(content)
    manifest.verify(checkpoint)


def test_any_flipped_bit_of_the_manifest_itself_is_seen(checkpoint: Path) -> None:
    path = checkpoint / manifest.NAME
    content = bytearray(path.read_bytes())
    for bit in range(0, 8 * len(content), 3):  # every byte, at two or three of its bits
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        assert damage(checkpoint).startswith(str(checkpoint)), bit
        content[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(name: str, checkpoint: Path) -> None:
    (checkpoint / name).unlink()
    message = damage(checkpoint)
    assert name in message and message.endswith("missing")


@pytest.mark.parametrize("name", ["extra.json", "more.safetensors", "notes.txt", "model.pt", "data.pkl", "folder"])
def test_a_file_too_many_is_named(name: str, checkpoint: Path) -> None:
    if name == "folder":
        (checkpoint / name).mkdir()
    else:
        (checkpoint / name).touch()
    assert damage(checkpoint).startswith(f"{checkpoint / name}: not ")


class Bomb:
    """What runs when it is unpickled."""

    def __init__(self, crater: Path) -> None:
        self.crater = crater

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.crater),)


def plant(path: Path, as_torch: bool) -> Path:
    crater = path.parent.parent / "crater"
    if as_torch:
        torch.save({"w": Bomb(crater)}, path)
    else:
        path.write_bytes(pickle.dumps(Bomb(crater)))
    return crater


@pytest.mark.parametrize("as_torch", [True, False])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "optimizer.pt", "extra.safetensors", "x.json"])
def test_a_pickle_inside_is_refused_and_never_read(name: str, as_torch: bool, checkpoint: Path) -> None:
    crater = plant(checkpoint / name, as_torch)
    assert damage(checkpoint).startswith(f"{checkpoint / name}: ")
    assert not crater.exists()


@pytest.mark.parametrize("as_torch", [True, False])
@pytest.mark.parametrize("name", [MODEL, "state.json"])
def test_a_pickle_in_the_place_of_a_file_is_refused_even_with_its_checksum(
    name: str, as_torch: bool, checkpoint: Path
) -> None:
    crater = plant(checkpoint / name, as_torch)
    assert damage(checkpoint).startswith(f"{checkpoint / name}: ")
    # Someone who means harm writes the manifest too.
    (checkpoint / manifest.NAME).unlink()
    manifest.write(checkpoint)
    manifest.verify(checkpoint)
    with pytest.raises(DamagedCheckpoint) as caught:
        tensor_file.read(checkpoint / MODEL)
        read_state(checkpoint)
    assert str(caught.value).startswith(f"{checkpoint / name}: ")
    assert not crater.exists()
    # The bomb is a real one.
    if not as_torch:
        pickle.loads((checkpoint / name).read_bytes())
        assert crater.exists()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"files": []}', '{"files": {"model.safetensors": 3}}', '{"files": {"a": {"size": "x"}}}'],
)
def test_a_manifest_that_is_none_is_named(text: str, checkpoint: Path) -> None:
    (checkpoint / manifest.NAME).write_text(text)
    assert damage(checkpoint).startswith(f"{checkpoint / manifest.NAME}: damaged: ")


def test_a_manifest_may_not_point_outside(checkpoint: Path) -> None:
    outside = checkpoint.parent / "outside.json"
    outside.write_text("{}")
    content = json.loads((checkpoint / manifest.NAME).read_text())
    entry = {"size": 2, "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"}
    content["files"]["../outside.json"] = entry
    (checkpoint / manifest.NAME).write_text(json.dumps(content))
    assert "outside.json: missing" in damage(checkpoint)


def test_a_folder_that_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    assert damage(tmp_path / "none") == f"{tmp_path / 'none'}: no such checkpoint folder"
    assert damage(tmp_path) == f"{tmp_path}: no checkpoint: {manifest.NAME} is missing"
