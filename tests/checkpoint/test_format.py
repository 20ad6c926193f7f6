"""A checkpoint comes back as it was, and others can read its files."""

import json
import os
import threading

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from checkpoint.samples import DTYPES, content, equal, forge, litter, same, snapshot
from lockstep.backends.base import Array
from lockstep.checkpoint import Snapshot, read, safetensors_file, write
from lockstep.checkpoint.format import RESERVED, facts_of
from lockstep.checkpoint.io import Folder
from lockstep.core import digest
from lockstep.errors import CheckpointError, SaveError, StateError

FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors"]


def test_round_trip(tmp_path):
    saved = snapshot(callbacks=[{"seen": (1, 2), "best": float("nan"), "mean": Array(np.ones(2, "i2"), "bfloat16")}])
    path = write(tmp_path / "new" / "mine", saved)
    assert path == tmp_path / "new" / "mine"
    assert sorted(os.listdir(path)) == FILES
    assert litter(path.parent) == []
    found = read(path)
    assert equal(found, saved)
    assert all(array.data.flags.writeable for array in found.state.values())


def test_an_empty_one(tmp_path):
    assert equal(read(write(tmp_path / "mine", Snapshot({}, {}))), Snapshot({}, {}))


@pytest.mark.parametrize("path", ["mine", "mine/", "./mine", "a/../mine"])
def test_paths_as_people_write_them(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(path, snapshot())
    assert equal(read("mine"), snapshot())


def test_the_manifest_is_for_people(tmp_path):
    path = write(tmp_path / "mine", snapshot(note="größer"))
    text = (path / "manifest.json").read_text(encoding="utf-8")
    assert text.startswith('{\n  "format": 1,\n  "checksum": "')
    assert '\n  "step": 3,\n' in text
    assert '"note": "größer"' in text
    found = json.loads(text, parse_constant=pytest.fail)
    assert list(found) == ["format", "checksum", "step", "logs", "mean", "note", "files", "tensors"]
    assert found["files"]["model.safetensors"]["bytes"] == (path / "model.safetensors").stat().st_size
    assert found["tensors"]["model.layer.bias"].items() >= {"dtype": "bfloat16", "shape": [2]}.items()
    assert found["tensors"]["loss.phase"]["stored"] == "F64 pairs"


def test_the_tensors_digests_are_those_of_the_state(tmp_path):
    """So that the digest of a run can be told from its manifest."""
    saved = Snapshot(snapshot().state)
    records = content(write(tmp_path / "mine", saved))["tensors"]
    assert {name: record["sha256"] for name, record in records.items()} == digest.hash_arrays(saved.state)


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=8),
        st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0))),
        max_size=5,
    )
)
def test_the_head_is_one_that_safetensors_reads(state):
    forms = {name: safetensors_file.Form.of(Array(data, str(data.dtype)), name) for name, data in state.items()}
    parts = []
    arrays = {name: Array(data, str(data.dtype)) for name, data in state.items()}
    safetensors_file.write(lambda part: parts.append(bytes(part)), arrays, forms)
    data = b"".join(parts)
    assert len(data) == safetensors_file.size(forms)
    found = dict(safetensors.deserialize(data))
    assert found.keys() == forms.keys()
    for name, entry in found.items():
        assert tuple(entry["shape"]) == forms[name].kind.file_shape(forms[name].shape)
        assert entry["dtype"] == forms[name].kind.file
        assert bytes(entry["data"]) == state[name].tobytes()


def test_numpy_users_read_the_model(tmp_path):
    state = {f"model.{dtype}": Array(np.ones((2, 2), dtype), dtype) for dtype in DTYPES if dtype != "complex128"}
    path = write(tmp_path / "mine", Snapshot(state))
    found = safetensors.numpy.load_file(path / "model.safetensors")
    assert same(dict(sorted(found.items())), {name[6:]: state[name].data for name in sorted(state)})


def test_one_fact_without_the_arrays(tmp_path):
    path = write(tmp_path / "mine", snapshot())
    (path / "model.safetensors").unlink()
    assert facts_of(path, "logs") == {"val_loss": 0.25}
    assert facts_of(path, "nothing") is None
    with pytest.raises(CheckpointError, match=r"manifest.json is not"):
        facts_of(path, "mean")  # an array


def test_a_sealed_one_has_facts_of_its_own():
    saved = snapshot(inner=[np.zeros(2)])
    sealed = saved.sealed()
    assert equal(sealed, saved)
    saved.facts["inner"][0][:] = 9
    saved.facts["inner"].append(1)
    assert same(sealed.facts["inner"], [np.zeros(2)])
    with pytest.raises(StateError, match="Got a set at x"):
        snapshot(x=set()).sealed()


@pytest.mark.parametrize("name", ["model.__metadata__", "__metadata__", "facts.0", "model.\ud800"])
def test_names_that_cannot_be(name, tmp_path):
    with pytest.raises(StateError, match="An array's name"):
        write(tmp_path / "mine", Snapshot({name: Array(np.zeros(1), "float64")}))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("key", [*RESERVED, "$int", 1, "\ud800"])
def test_keys_that_cannot_be(key, tmp_path):
    with pytest.raises(StateError, match="A fact's key"):
        write(tmp_path / "mine", Snapshot({}, {key: 1}))


def test_a_type_that_cannot_be(tmp_path):
    with pytest.raises(StateError, match=r"Got float8 held as uint8\(1,\) at 'model.w'"):
        write(tmp_path / "mine", Snapshot({"model.w": Array(np.zeros(1, "uint8"), "float8")}))


def test_values_that_a_manifest_cannot_store_are_refused(tmp_path, monkeypatch):
    with pytest.raises(StateError, match=rf"and at most {2**23} are read"):
        write(tmp_path / "mine", snapshot(long="x" * 2**23))
    with pytest.raises(
        StateError, match=r"is too large: it has \d+ values, and at most 300000 are read. Keep long lists"
    ):
        write(tmp_path / "mine", snapshot(losses=[0.5] * 300_000))
    with pytest.raises(StateError, match=r"bytes with wide characters, and at most 4194304 are read"):
        write(tmp_path / "mine", snapshot(text="\N{GRINNING FACE}" * 2**20 + "x" * 2**19))
    assert os.listdir(tmp_path) == []


def test_a_format_to_come(tmp_path):
    path = write(tmp_path / "mine", snapshot())
    forge(path, (path / "manifest.json").read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(StateError, match=r"up to format 1. Got one of format 2. Upgrade Lockstep. The file is .*mine"):
        read(path)


@pytest.mark.parametrize("exchange", [True, False])
class TestOverAnOlderOne:
    """Replaced in one move, or by one step aside where the file system has no such move."""

    @pytest.fixture(autouse=True)
    def way(self, exchange, monkeypatch):
        if not exchange:
            monkeypatch.setattr("lockstep.checkpoint.atomic_folder._exchange", lambda left, right: False)

    def test_the_newer_one_stands(self, tmp_path):
        for step in range(3):
            write(tmp_path / "mine", snapshot(step))
            assert equal(read(tmp_path / "mine"), snapshot(step))
            assert os.listdir(tmp_path) == ["mine"]

    def test_a_reader_always_finds_one(self, tmp_path):
        write(tmp_path / "mine", snapshot(0))
        ended = threading.Event()

        def rewrite():
            for step in range(1, 60):
                write(tmp_path / "mine", snapshot(step))
            ended.set()

        writer = threading.Thread(target=rewrite)
        writer.start()
        found = []
        while not ended.is_set():
            found.append(read(tmp_path / "mine").facts["step"])
        writer.join()
        assert found == sorted(found)
        assert len(set(found)) > 3

    @pytest.mark.parametrize("gone", [False, True])
    def test_the_files_that_are_read_are_of_one_folder(self, tmp_path, gone, monkeypatch):
        """Another comes between two files; where it finds the first one gone, the reader begins again."""
        write(tmp_path / "mine", snapshot(0))
        opened, steps = Folder.open, iter([1, 2])

        def slow(folder, name):
            file = opened(folder, name)
            for step in steps:
                if not gone and step == 1:
                    os.rename(tmp_path / "mine", tmp_path / "kept")
                write(tmp_path / "mine", snapshot(step))
            return file

        monkeypatch.setattr(Folder, "open", slow)
        assert read(tmp_path / "mine").facts["step"] == (2 if gone else 0)


def test_an_interrupted_rename_is_repaired(tmp_path):
    """Between the two renames of the longer way, only the one that stepped aside is there."""
    write(tmp_path / "mine", snapshot(1))
    os.rename(tmp_path / "mine", tmp_path / ".mine.0123456789abcdef.previous")
    assert equal(read(tmp_path / "mine"), snapshot(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: os.stat(tmp_path / "nothing"))
        with pytest.raises(SaveError):
            write(tmp_path / "mine", snapshot(2))
    assert equal(read(tmp_path / "mine"), snapshot(1))
    write(tmp_path / "mine", snapshot(3))
    assert equal(read(tmp_path / "mine"), snapshot(3))
    assert os.listdir(tmp_path) == ["mine"]


def test_other_folders_are_not_replaced(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    write(home, snapshot())  # an empty folder may be
    (home / "thesis.txt").write_text("years")
    (tmp_path / "file").write_text("words")
    (tmp_path / "link").symlink_to("home")
    for name, what in [("home", "a folder with other files"), ("file", "a file"), ("link", "a link")]:
        with pytest.raises(SaveError, match=f"Got .*{name}, which is {what}. Choose another name."):
            write(tmp_path / name, snapshot())
    assert (home / "thesis.txt").read_text() == "years"
    assert litter(tmp_path) == []


@pytest.mark.parametrize(("path", "message"), [("/", "a name of its own"), ("mine\0", "path must be a path")])
def test_no_name(path, message):
    with pytest.raises(SaveError, match=message):
        write(path, snapshot())


def test_leftover_folders_without_a_lock_are_removed(tmp_path):
    dead = tmp_path / ".mine.0123456789abcdef.writing"
    dead.mkdir()
    (dead / "manifest.json").write_text("{")
    (dead / "model.safetensors").write_text("half")
    (tmp_path / ".mine.0123456789abcdef.discarded").mkdir()
    (tmp_path / ".mine.fedcba9876543210.writing").mkdir()
    (tmp_path / ".mine.swp").write_text("foreign")
    (tmp_path / ".other.0123456789abcdef.writing").mkdir()
    write(tmp_path / "mine", snapshot())
    assert sorted(os.listdir(tmp_path)) == [".mine.swp", ".other.0123456789abcdef.writing", "mine"]


def test_two_write_one_name_at_once(tmp_path):
    """Neither sweeps the other's folder away; one of them is last."""
    errors = []

    def rewrite(step):
        try:
            for _ in range(20):
                write(tmp_path / "mine", snapshot(step))
        except SaveError as error:  # the place was taken between look and move
            errors.append(error)

    threads = [threading.Thread(target=rewrite, args=(step,)) for step in (1, 2)]
    write(tmp_path / "mine", snapshot(0))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert read(tmp_path / "mine").facts["step"] in (1, 2)
    assert os.listdir(tmp_path) == ["mine"]
