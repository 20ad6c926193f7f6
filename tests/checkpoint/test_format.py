"""A checkpoint comes back as it was, and others can read its files."""

import json
import os
import threading
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from checkpoint.samples import DTYPES, content, equal, forge, litter, same, snapshot
from lockstep.checkpoint import Snapshot, json_codec, read, safetensors_file, write
from lockstep.checkpoint.format import RESERVED, read_fact
from lockstep.checkpoint.io import OpenFolder
from lockstep.core import digest
from lockstep.core.types import Array
from lockstep.errors import CheckpointError, SaveError, StateError

FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors"]


def test_round_trip(tmp_path):
    saved = snapshot(
        callbacks=[{"seen": (1, 2), "best": float("nan"), "mean": Array(np.ones(2, ml_dtypes.bfloat16), "bfloat16")}]
    )
    path = write(tmp_path / "new" / "mine", saved)
    assert path == tmp_path / "new" / "mine"
    assert sorted(os.listdir(path)) == FILES
    assert litter(path.parent) == []
    found = read(path)
    assert equal(found, saved)
    assert all(array.data.flags.writeable for array in found.state.values())


def test_an_empty_snapshot_round_trips(tmp_path):
    assert equal(read(write(tmp_path / "mine", Snapshot({}, {}))), Snapshot({}, {}))


@pytest.mark.parametrize("path", ["mine", "mine/", "./mine", "a/../mine"])
def test_relative_paths_are_resolved(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(path, snapshot())
    assert equal(read("mine"), snapshot())


def test_the_manifest_is_indented_json(tmp_path):
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


def test_the_manifest_has_the_digests_of_the_state(tmp_path):
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
def test_safetensors_reads_the_header(state):
    forms = {name: safetensors_file.Form.from_array(Array(data, str(data.dtype)), name) for name, data in state.items()}
    parts = []
    arrays = {name: Array(data, str(data.dtype)) for name, data in state.items()}
    safetensors_file.write(lambda part: parts.append(bytes(part)), arrays, forms)
    data = b"".join(parts)
    assert len(data) == safetensors_file.compute_size(forms)
    found = dict(safetensors.deserialize(data))
    assert found.keys() == forms.keys()
    for name, entry in found.items():
        assert tuple(entry["shape"]) == forms[name].kind.file_shape(forms[name].shape)
        assert entry["dtype"] == forms[name].kind.file
        assert bytes(entry["data"]) == state[name].tobytes()


def test_safetensors_numpy_reads_the_model(tmp_path):
    state = {f"model.{dtype}": Array(np.ones((2, 2), dtype), dtype) for dtype in DTYPES if dtype != "complex128"}
    path = write(tmp_path / "mine", Snapshot(state))
    found = safetensors.numpy.load_file(path / "model.safetensors")
    assert same(dict(sorted(found.items())), {name[6:]: state[name].data for name in sorted(state)})


def test_a_fact_is_read_without_the_arrays(tmp_path):
    path = write(tmp_path / "mine", snapshot())
    (path / "model.safetensors").unlink()
    assert read_fact(path, "logs") == {"val_loss": 0.25}
    assert read_fact(path, "nothing") is None
    with pytest.raises(CheckpointError, match=r"manifest.json: "):
        read_fact(path, "mean")  # an array


def test_a_frozen_snapshot_has_facts_of_its_own():
    saved = snapshot(inner=[np.zeros(2)])
    frozen = saved.freeze()
    assert equal(frozen, saved)
    saved.facts["inner"][0][:] = 9
    saved.facts["inner"].append(1)
    assert same(frozen.facts["inner"], [np.zeros(2)])
    with pytest.raises(StateError, match="cannot store the set at x"):
        snapshot(x=set()).freeze()


def test_a_frozen_snapshot_is_encoded_once(tmp_path, monkeypatch):
    encode, calls = json_codec.encode, []
    monkeypatch.setattr(json_codec, "encode", lambda nest: calls.append(nest) or encode(nest))
    saved = snapshot(inner=[np.zeros(2)])
    frozen = saved.freeze()
    path = write(tmp_path / "mine", frozen)
    assert len(calls) == 1
    assert equal(read(path), saved)
    assert read(write(tmp_path / "other", replace(frozen, facts={"step": 4}))).facts == {"step": 4}  # not the old ones


@pytest.mark.parametrize("name", ["model.__metadata__", "__metadata__", "facts.0", "model.\ud800"])
def test_invalid_array_names_raise(name, tmp_path):
    with pytest.raises(StateError, match=r"The array named .* cannot be saved under this name"):
        write(tmp_path / "mine", Snapshot({name: Array(np.zeros(1), "float64")}))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("key", [*RESERVED, "$int", 1, "\ud800"])
def test_invalid_fact_keys_raise(key, tmp_path):
    with pytest.raises(StateError, match=r"The fact with the key .* cannot be saved under this key"):
        write(tmp_path / "mine", Snapshot({}, {key: 1}))


def test_an_unknown_type_raises(tmp_path):
    with pytest.raises(StateError, match=r"cannot store float8 in uint8\(1,\) at 'model.w'"):
        write(tmp_path / "mine", Snapshot({"model.w": Array(np.zeros(1, "uint8"), "float8")}))


def test_a_manifest_that_is_too_large_is_not_written(tmp_path, monkeypatch):
    with pytest.raises(StateError, match=rf"the text can have at most {2**23} bytes, got \d+"):
        write(tmp_path / "mine", snapshot(long="x" * 2**23))
    with pytest.raises(
        StateError,
        match=r"to be read again: the text can have at most 300000 values, got \d+. Store long lists, .* as numpy",
    ):
        write(tmp_path / "mine", snapshot(losses=[0.5] * 300_000))
    with pytest.raises(StateError, match=r"a text with wide characters can have at most 4194304 bytes, got \d+"):
        write(tmp_path / "mine", snapshot(text="\N{GRINNING FACE}" * 2**20 + "x" * 2**19))
    assert os.listdir(tmp_path) == []


def test_a_newer_format_raises(tmp_path):
    path = write(tmp_path / "mine", snapshot())
    forge(path, (path / "manifest.json").read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(
        StateError,
        match=r"has format 2, and this version of Lockstep reads formats up to 1. Upgrade Lockstep. The file is .*mine",
    ):
        read(path)


@pytest.mark.parametrize("exchange", [True, False])
class TestOverAnOlderOne:
    """Replaced in one move, or by one step aside where the file system has no such move."""

    @pytest.fixture(autouse=True)
    def way(self, exchange, monkeypatch):
        if not exchange:
            monkeypatch.setattr("lockstep.checkpoint.atomic_folder._exchange", lambda left, right: False)

    def test_the_newer_checkpoint_replaces_the_older(self, tmp_path):
        for step in range(3):
            write(tmp_path / "mine", snapshot(step))
            assert equal(read(tmp_path / "mine"), snapshot(step))
            assert os.listdir(tmp_path) == ["mine"]

    def test_a_reader_always_finds_a_checkpoint(self, tmp_path):
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
    def test_all_files_are_read_from_one_folder(self, tmp_path, gone, monkeypatch):
        """Another comes between two files; where it finds the first one gone, the reader begins again."""
        write(tmp_path / "mine", snapshot(0))
        opened, steps = OpenFolder.open, iter([1, 2])

        def slow(folder, name):
            file = opened(folder, name)
            for step in steps:
                if not gone and step == 1:
                    os.rename(tmp_path / "mine", tmp_path / "kept")
                write(tmp_path / "mine", snapshot(step))
            return file

        monkeypatch.setattr(OpenFolder, "open", slow)
        assert read(tmp_path / "mine").facts["step"] == (2 if gone else 0)


def test_a_folder_moved_aside_by_a_killed_process_is_found(tmp_path):
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


def test_a_file_link_or_foreign_folder_is_not_replaced(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    write(home, snapshot())  # an empty folder may be
    (home / "thesis.txt").write_text("years")
    (tmp_path / "file").write_text("words")
    (tmp_path / "link").symlink_to("home")
    for name, what in [("home", "a folder with other files"), ("file", "a file"), ("link", "a link")]:
        with pytest.raises(SaveError, match=f"cannot replace .*{name}, which is {what}. Use another path."):
            write(tmp_path / name, snapshot())
    assert (home / "thesis.txt").read_text() == "years"
    assert litter(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "message"), [("/", "A checkpoint needs a folder with a name"), ("mine\0", "path must be a path")]
)
def test_a_path_without_a_name_raises(path, message):
    with pytest.raises(SaveError, match=message):
        write(path, snapshot())


def test_leftovers_of_dead_processes_are_removed(tmp_path):
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


def test_two_threads_write_one_name(tmp_path):
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
