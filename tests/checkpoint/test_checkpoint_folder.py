"""A folder of checkpoints: the newest whole one counts, the newest and the best stay, the rest is not touched."""

import os
import shutil
import subprocess
import sys

import pytest

from checkpoint.samples import equal, forge, litter, snapshot
from lockstep.checkpoint import CheckpointFolder, read, read_newest, write
from lockstep.core.file_lock import hold_lock
from lockstep.core.monitor import Monitor
from lockstep.errors import CheckpointError, ModelError, SaveError, StateError


def logged(step, **logs):
    return snapshot(step, logs=logs)


def damage(path):
    with open(path / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")


def test_the_newest_is_read(tmp_path):
    store = CheckpointFolder(tmp_path / "a" / "ckpt")
    assert store.newest() == (None, ())
    for step in (5, 100, 123456789):
        path = store.save(snapshot(step), step)
        assert path == store.path(step)
    assert [path.name for path in map(store.path, store.steps())] == [
        "step-00000005",
        "step-00000100",
        "step-123456789",
    ]
    whole, skipped = store.newest()
    assert whole[0] == path
    assert equal(whole[1], snapshot(123456789))
    assert skipped == ()


def test_damaged_checkpoints_are_skipped_with_the_reason(tmp_path):
    store = CheckpointFolder(tmp_path)
    for step in (1, 2, 3):
        store.save(snapshot(step), step)
    damage(store.path(3))
    (store.path(2) / "manifest.json").unlink()
    whole, skipped = store.newest()
    assert whole[0] == store.path(1)
    assert [path for path, _ in skipped] == [store.path(3), store.path(2)]
    assert "model.safetensors: the sha256 of the file is" in skipped[0][1]
    assert "manifest.json: No such file" in skipped[1][1]
    with pytest.warns(UserWarning, match="A newer checkpoint was skipped") as warned:
        assert equal(read_newest(tmp_path), snapshot(1))
    assert len(warned) == 2
    assert warned[0].filename == __file__


def test_a_store_of_damaged_checkpoints_raises(tmp_path):
    """A run that had checkpoints does not begin anew behind the script's back."""
    store = CheckpointFolder(tmp_path)
    store.save(snapshot(1), 1)
    damage(store.path(1))
    with pytest.raises(
        CheckpointError, match=r"All checkpoints in .* are damaged:\n  .*step-00000001.*\nRestore a checkpoint"
    ):
        store.newest()


def test_a_checkpoint_of_a_newer_format_is_not_skipped(tmp_path):
    store = CheckpointFolder(tmp_path)
    for step in (1, 2):
        store.save(snapshot(step), step)
    manifest = store.path(2) / "manifest.json"
    forge(store.path(2), manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(StateError, match="Upgrade Lockstep"):
        store.newest()


def test_a_file_in_the_place_of_a_store_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"The checkpoints in .*file cannot be listed: Not a directory"):
        CheckpointFolder(tmp_path / "file").newest()


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [6]), (3, [4, 5, 6]), (9, [1, 2, 3, 4, 5, 6]), (None, [1, 2, 3, 4, 5, 6])]
)
def test_the_newest_are_kept(keep, left, tmp_path):
    store = CheckpointFolder(tmp_path, keep)
    for step in range(1, 7):
        store.save(snapshot(step), step)
        assert store.newest().whole[0] == store.path(step)
    assert store.steps() == left
    assert litter(tmp_path) == []


@pytest.mark.parametrize(
    ("best", "values", "left", "step"),
    [
        ("val_accuracy", [0.1, 0.9, 0.5, 0.6], [2, 4], 2),
        ("val_accuracy", [0.1, 0.5, 0.6, 0.9], [4], 4),
        ("val_accuracy", [0.9, 0.9, 0.5, 0.9], [1, 4], 1),  # of equals the first
        ("val_loss", [0.9, 0.1, 0.5, 0.6], [2, 4], 2),
        ("val_loss", [float("nan"), 0.1, float("nan"), 0.6], [2, 4], 2),
        ("val_loss", [float("nan"), None, None, float("nan")], [4], None),  # None: not measured then
        ("val_loss", [0.3, None, 0.2, None], [3, 4], 3),
        (Monitor("speed", mode="max"), [1, 3, 2, 0], [2, 4], 2),
    ],
)
def test_the_best_is_kept(best, values, left, step, tmp_path):
    name = best if isinstance(best, str) else best.name
    for anew in (False, True):  # one store throughout, or a process for each save
        folder = tmp_path / str(anew)
        store = CheckpointFolder(folder, keep=1, best=best)
        for number, value in enumerate(values, start=1):
            store = CheckpointFolder(folder, keep=1, best=best) if anew else store
            store.save(logged(number, **({} if value is None else {name: value})), number)
        assert store.steps() == left
        link = folder / "best"
        assert link.is_symlink() == (step is not None)
        if step is not None:
            assert os.readlink(link) == f"step-{step:08}"  # relative, so that the folder can be moved
            assert read(link).facts["step"] == step
        assert litter(folder) == []


def test_the_best_is_chosen_again_if_it_was_damaged_or_removed(tmp_path):
    store = CheckpointFolder(tmp_path, keep=None, best="val_loss")
    for step, loss in ((1, 0.1), (2, 0.3), (3, 0.2)):
        store.save(logged(step, val_loss=loss), step)
    shutil.rmtree(store.path(1))
    (store.path(3) / "manifest.json").write_text("")
    CheckpointFolder(tmp_path, keep=None, best="val_loss").save(logged(4, val_loss=0.4), 4)
    assert os.readlink(tmp_path / "best") == "step-00000002"


def test_a_step_can_be_saved_again(tmp_path):
    store = CheckpointFolder(tmp_path, keep=2, best="val_loss")
    store.save(logged(1, val_loss=0.1), 1)
    store.save(logged(2, val_loss=0.2), 2)
    store.save(logged(1, val_loss=0.3), 1)
    assert os.readlink(tmp_path / "best") == "step-00000002"
    assert store.steps() == [1, 2]


def test_a_step_older_than_the_newest_is_kept(tmp_path):
    store = CheckpointFolder(tmp_path, keep=1)
    store.save(snapshot(5), 5)
    store.save(snapshot(3), 3)
    assert store.steps() == [3, 5]
    store.save(snapshot(6), 6)
    assert store.steps() == [6]


def test_a_metric_without_a_known_direction_raises(tmp_path):
    with pytest.raises(ModelError, match="mode='min'"):
        CheckpointFolder(tmp_path, best="speed")


def test_foreign_files_are_not_touched(tmp_path):
    foreign = [".hidden", ".step-00000001.swp", "notes.txt", "step-1", "step-00000001.bak", "step-0000000x", "steps"]
    for name in foreign:
        (tmp_path / name).write_text(name)
    store = CheckpointFolder(tmp_path, keep=1, best="val_loss")
    store.save(snapshot(1), 1)
    (store.path(1) / "notes.txt").write_text("mine")  # inside a checkpoint, too
    store.save(snapshot(2), 2)
    store.save(snapshot(3), 3)
    assert {name: (tmp_path / name).read_text() for name in foreign} == {name: name for name in foreign}
    assert (store.path(1) / "notes.txt").read_text() == "mine"
    assert store.steps() == [1, 3]
    assert equal(read(store.path(1)), snapshot(1))


@pytest.mark.parametrize("make", [os.mkdir, lambda path: open(path, "w").close()], ids=["folder", "file"])
def test_a_file_or_folder_named_best_raises(make, tmp_path):
    make(tmp_path / "best")
    store = CheckpointFolder(tmp_path, best="val_loss")
    with pytest.raises(
        SaveError, match=r"The link to the best checkpoint cannot be created, because .*best exists and is not a link"
    ):
        store.save(snapshot(1), 1)
    assert store.newest().whole[0] == store.path(1)
    assert not (tmp_path / "best").is_symlink()


def test_leftovers_are_removed(tmp_path):
    store = CheckpointFolder(tmp_path)
    store.save(snapshot(1), 1)
    for role in ("writing", "discarded", "previous"):
        shutil.copytree(store.path(1), tmp_path / f".step-00000001.0123456789abcdef.{role}")
    (tmp_path / ".best.0123456789abcdef.writing").symlink_to("step-00000001")
    assert store.steps() == [1]
    store.save(snapshot(2), 2)
    assert litter(tmp_path) == []
    assert store.steps() == [1, 2]


def test_a_checkpoint_moved_aside_counts(tmp_path):
    store = CheckpointFolder(tmp_path)
    store.save(snapshot(1), 1)
    os.rename(store.path(1), tmp_path / ".step-00000001.0123456789abcdef.previous")
    assert store.steps() == [1]
    assert equal(store.newest().whole[1], snapshot(1))
    assert equal(read_newest(tmp_path), snapshot(1))
    store.save(snapshot(2), 2)
    assert equal(read(store.path(1)), snapshot(1))
    assert litter(tmp_path) == []


def test_a_folder_in_use_is_not_removed(tmp_path):
    store = CheckpointFolder(tmp_path)
    store.save(snapshot(1), 1)
    folder = tmp_path / ".mine.0123456789abcdef.writing"
    shutil.copytree(store.path(1), folder)
    with hold_lock(folder / "manifest.json"):
        store.save(snapshot(2), 2)
        assert sorted(os.listdir(folder)) == sorted(os.listdir(store.path(2)))
    store.save(snapshot(3), 3)
    assert not folder.exists()


HOLD = """
import sys, time
from pathlib import Path
from lockstep.core.file_lock import hold_lock
with hold_lock(Path(sys.argv[1])) as mine:
    print(mine, flush=True)
    time.sleep(60)
"""


def test_a_second_process_cannot_save_to_the_folder(tmp_path):
    store = CheckpointFolder(tmp_path)
    store.save(snapshot(1), 1)
    command = [sys.executable, "-c", HOLD, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "True\n"
        with pytest.raises(
            SaveError, match=r"Another process is saving checkpoints to .* Use a separate folder for each run"
        ):
            store.save(snapshot(2), 2)
        assert store.newest().whole[0] == store.path(1)
        other.kill()
    store.save(snapshot(2), 2)  # a dead process holds nothing
    assert store.steps() == [1, 2]


def test_read_newest_reads_one_or_the_newest(tmp_path):
    path = write(tmp_path / "mine", snapshot(7))
    assert equal(read_newest(path), snapshot(7))
    store = CheckpointFolder(tmp_path / "store")
    store.save(snapshot(1), 1)
    store.save(snapshot(2), 2)
    assert equal(read_newest(tmp_path / "store"), snapshot(2))
    assert equal(read_newest(str(store.path(1))), snapshot(1))
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            read_newest(place)


def test_a_store_that_changes_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    """The only checkpoint goes while it is read, because a newer one has come."""
    store = CheckpointFolder(tmp_path, keep=1)
    store.save(snapshot(1), 1)

    def meanwhile(path):
        if not store.path(2).exists():
            store.save(snapshot(2), 2)
        return read(path)

    monkeypatch.setattr("lockstep.checkpoint.checkpoint_folder.read", meanwhile)
    assert store.newest().whole[0] == store.path(2)
