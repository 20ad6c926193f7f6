"""Whatever is done to a checkpoint's files, it is found out, and by a `CheckpointError` that names the file."""

import copy
import hashlib
import json
import os
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.samples import content, equal, forge, snapshot
from lockstep.checkpoint import Snapshot, manifest, read, write
from lockstep.checkpoint.format import read_fact
from lockstep.core.types import Array
from lockstep.errors import CheckpointError, StateError

NAMES = ["manifest.json", "model.safetensors", "optimizer.safetensors"]
TINY = Snapshot(
    {"model.w": Array(np.array([1.5, -0.0], "float32"), "float32"), "optimizer.n": Array(np.asarray(3), "python")},
    {"step": 3},
)


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "mine", TINY)


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_is_detected(folder, name):
    whole = (folder / name).read_bytes()
    with open(folder / name, "r+b", buffering=0) as file:
        for place, byte in enumerate(whole):
            for bit in range(8):
                file.seek(place)
                file.write(bytes([byte ^ 1 << bit]))
                with pytest.raises(CheckpointError, match=rf"in {folder}. {name}: "):
                    read(folder)
            file.seek(place)
            file.write(bytes([byte]))
    assert equal(read(folder), TINY)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_another_length_is_detected(folder, name):
    whole = (folder / name).read_bytes()
    for length in range(len(whole)):
        (folder / name).write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=rf"undamaged checkpoint in .* {name}: "):
            read(folder)
    for more in (b" ", b"\n", b"\0", whole):
        (folder / name).write_bytes(whole + more)
        with pytest.raises(CheckpointError, match=rf"undamaged checkpoint in .* {name}: "):
            read(folder)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["missing", "a folder", "a link", "a pipe", "from another checkpoint"])
def test_a_file_that_is_not_a_regular_file_is_refused(folder, name, what, tmp_path):
    path = folder / name
    os.rename(path, tmp_path / "aside")
    if what == "a folder":
        path.mkdir()
    elif what == "a link":
        path.symlink_to(tmp_path / "aside")  # the very bytes, but outside
    elif what == "a pipe":
        os.mkfifo(path)
    elif what == "from another checkpoint":
        state = {name: Array(array.data + 1, array.dtype) for name, array in TINY.state.items()}
        path.write_bytes((write(tmp_path / "other", Snapshot(state, TINY.facts)) / name).read_bytes())
    with pytest.raises(CheckpointError, match="There is no undamaged checkpoint in "):
        read(folder)


@pytest.mark.parametrize("path", ["nothing", "", "mine/manifest.json", "a\0b", "x" * 5000])
def test_a_path_without_a_checkpoint_raises(folder, path, monkeypatch):
    monkeypatch.chdir(folder.parent)
    with pytest.raises(CheckpointError):
        read(path)


def test_exchanged_files_are_detected(folder):
    """Every file is whole, each in the other's place."""
    model, optimizer = (folder / name for name in NAMES[1:])
    model.rename(folder / "aside")
    optimizer.rename(model)
    (folder / "aside").rename(optimizer)
    with pytest.raises(CheckpointError, match=r"model.safetensors: the file has 80 bytes, and the manifest says 72"):
        read(folder)


def edit(folder, change):
    """Changes the manifest's content and gives it a right checksum."""
    found = content(folder)
    change(found)
    forge(folder, json.dumps(found, indent=2))


HUGE = 2**62


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.pop("files"),
        lambda found: found.pop("tensors"),
        lambda found: found.update(tensors=[]),
        lambda found: found["files"].update({"../../etc/passwd": found["files"]["model.safetensors"]}),
        lambda found: found["files"].pop("model.safetensors"),
        lambda found: found["files"]["model.safetensors"].update(bytes="64"),
        lambda found: found["files"]["model.safetensors"].update(bytes=HUGE),
        lambda found: found["files"]["model.safetensors"].update(sha256=None),
        lambda found: found["files"]["model.safetensors"].update(path="/etc/passwd"),
        lambda found: found["tensors"].update({"model.../../x": found["tensors"]["model.w"]}),
        lambda found: found["tensors"].update({"model.\ud800": found["tensors"]["model.w"]}),
        lambda found: found["tensors"].update({"facts.0": found["tensors"]["model.w"]}),
        lambda found: found["tensors"].update({"model.w": 1}),
        lambda found: found["tensors"]["model.w"].pop("shape"),
        lambda found: found["tensors"]["model.w"].update(more=1),
        lambda found: found["tensors"]["model.w"].update(dtype="object"),
        lambda found: found["tensors"]["model.w"].update(dtype=["float32"]),
        lambda found: found["tensors"]["model.w"].update(dtype="int32"),
        lambda found: found["tensors"]["model.w"].update(stored="F64"),
        lambda found: found["tensors"]["model.w"].update(stored=[]),
        lambda found: found["tensors"]["model.w"].update(stored=None),
        lambda found: found["tensors"]["model.w"].update(sha256=0),
        lambda found: found["tensors"]["model.w"].update(shape=[HUGE, HUGE]),
        lambda found: found["tensors"]["model.w"].update(shape=[-2]),
        lambda found: found["tensors"]["model.w"].update(shape=[2.0]),
        lambda found: found["tensors"]["model.w"].update(shape=[True, 2]),
        lambda found: found["tensors"]["model.w"].update(shape=[1] * 99 + [2]),
        lambda found: found["tensors"]["model.w"].update(shape=[2, 1]),
        lambda found: found["tensors"]["optimizer.n"].update(shape=[1]),
        lambda found: found.update(step={"$int": "9" * 10, "x": 1}),
        lambda found: found.update(step={"$numpy": "model.w"}),
        lambda found: found.update(step={"$bytes": "!"}),
        lambda found: (found.pop("step"), found.update({"$int": "0x1"})),  # facts that are a number
    ],
)
def test_an_edited_manifest_with_a_valid_checksum_is_refused(folder, change):
    edit(folder, change)
    with pytest.raises(CheckpointError, match="There is no undamaged checkpoint in "):
        read(folder)


def reheaded(folder, old, new):
    """Changes the head of the model's file, as a forger would: everything else says so too."""
    path = folder / "model.safetensors"
    length = int.from_bytes(path.read_bytes()[:8], "little")
    head, data = path.read_bytes()[8 : 8 + length], path.read_bytes()[8 + length :]
    assert old in head
    head = head.replace(old, new).rstrip()
    head += b" " * (-len(head) % 8)
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)
    record = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    edit(folder, lambda found: found["files"].update({"model.safetensors": record}))


@pytest.mark.parametrize(
    ("old", "new"), [(b'"w"', b'"v"'), (b"F32", b"I32"), (b"[2]", b"[1]"), (b"[0,8]", b"[8,0]"), (b"}}", b"} }")]
)
def test_a_forged_header_is_refused(folder, old, new):
    reheaded(folder, old, new)
    with pytest.raises(CheckpointError, match=r"model.safetensors: "):
        read(folder)


def test_a_header_that_claims_more_bytes_than_the_file_has_is_refused(folder):
    """No memory is taken for what a file only says it holds."""
    reheaded(folder, b'"shape":[2],"data_offsets":[0,8]', f'"shape":[{2**36}],"data_offsets":[0,{2**38}]'.encode())
    edit(folder, lambda found: found["tensors"]["model.w"].update(shape=[2**36]))
    with pytest.raises(
        CheckpointError, match=rf"and the manifest says \d+ by the record of the file and {2**38 + 88} by the shapes of"
    ):
        read(folder)


def test_a_pipe_in_the_place_of_a_folder_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "step-00000009")
    with pytest.raises(CheckpointError, match="Not a directory"):
        read(tmp_path / "step-00000009")


def test_an_empty_array_of_impossible_shape_is_refused(tmp_path):
    """No byte in the file, and numpy still cannot make it."""
    folder = write(tmp_path / "mine", Snapshot({"model.w": Array(np.empty((0, 2, 2)), "float64")}))
    reheaded(folder, b"[0,2,2]", f"[0,{HUGE},{HUGE}]".encode())
    edit(folder, lambda found: found["tensors"]["model.w"].update(shape=[0, HUGE, HUGE]))
    with pytest.raises(CheckpointError, match=r"model.safetensors: the array 'w' cannot be created"):
        read(folder)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"step": 3', '"step": NaN', "not JSON"),
        ('"step": 3', '"step": 1e999', "too large"),
        ('"step": 3', '"step": 0.' + "1" * 5000, "digits"),
        ('"step": 3', f'"step": {"9" * 5000}', "digits"),
        ('"step": 3', f'"step": {"[" * 100_000}', "deep"),
        ('"step": 3', f'"step": {"[" * 500}{"]" * 500}', "deep"),
        ('"step": 3', '"step": 3, "step": 4', "a JSON object has the key 'step' twice"),
        ('"step": 3', "\"step\": '3'", "Expecting"),
        ('"step": 3', '"step": "\ud800"', "utf-8"),
        ('"format": 1', '"format": 0', "the format number 0 is not valid"),
        ('"format": 1', '"format": 01', "delimiter"),
        ('"format": 1', '"format": -1', "first lines"),
        ('"format": 1', '"format": 9999999999', "first lines"),
        ("{\n", "[\n", "first lines"),
        ("{\n", "\ufeff{\n", "first lines"),
    ],
)
def test_a_manifest_that_is_not_strict_json_is_refused(folder, old, new, reason):
    text = (folder / "manifest.json").read_text()
    assert old in text
    forge(folder, text.replace(old, new, 1))
    with pytest.raises(CheckpointError, match=rf"manifest.json: .*{reason}"):
        read(folder)
    with pytest.raises(CheckpointError, match=reason):
        read_fact(folder, "step")


WIDE = "\N{GRINNING FACE}"
COUNT = manifest.MAX_VALUES - 200  # less what the rest of the manifest holds
COSTLY = {  # what takes most memory for a value, or for a byte
    "objects": ",".join(['{"":0}'] * (COUNT // 3)),
    "strings": ",".join(f'"{index:06x}é"' for index in range(COUNT)),
    "scalars": ",".join(['{"$scalar":["float64","0000000000000000"]}'] * (COUNT // 5)),
    "pairs": '{"$dict":[' + ",".join(f"[{index},0]" for index in range(COUNT // 4)) + "]}",
    "wide": f'"{"a" * (2**22 - 2000)}{WIDE}"',
}


@pytest.mark.parametrize("what", COSTLY)
def test_a_forged_manifest_takes_little_memory(tmp_path, what):
    """The worst that is read at all; the file system's pages are not counted."""
    folder = write(tmp_path / "mine", TINY)
    forge(folder, (folder / "manifest.json").read_text().replace('"step": 3', f'"step": [{COSTLY[what]}]'))
    tracemalloc.start()
    try:
        facts = read(folder).facts
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(facts["step"]) >= 1
    assert peak < 64e6


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("[]," * 150_001 + "[]", r"can have at most 300000 values, got \d+"),
        ('""' * 600_001, "the text can have at most 300000 values"),  # no JSON, but found out by what counts it
        (f'"{"a" * (2**22)}{WIDE}"', "a text with wide characters can have at most 4194304 bytes, got "),
        (f'"{"a" * (2**23)}"', "can have at most 8388608 bytes, got "),
        ('"' + '\\"' * 2_000_000, "the text can have at most 300000 values"),
    ],
)
def test_a_manifest_that_is_too_large_is_not_parsed(folder, more, reason, monkeypatch):
    monkeypatch.setattr(manifest.json, "loads", None)
    forge(folder, (folder / "manifest.json").read_text().replace('"step": 3', f'"step": [{more}]'))
    with pytest.raises(CheckpointError, match=reason):
        read(folder)


def test_nesting_is_limited_whatever_the_recursion_limit(folder):
    """The parser would overflow the stack, which ends the process."""
    deep = '"]]", ' + "[" * 140_000
    forge(folder, (folder / "manifest.json").read_text().replace('"step": 3', f'"step": [{deep}'))
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        with pytest.raises(CheckpointError, match="nested too deeply"):
            read(folder)
    finally:
        sys.setrecursionlimit(before)


def test_a_huge_sparse_manifest_is_not_read(folder):
    """A hole in a file takes no room on the disk, and would in memory."""
    os.truncate(folder / "manifest.json", 2**40)
    with pytest.raises(CheckpointError, match=rf"can have at most {manifest.MAX_BYTES} bytes, got "):
        read(folder)


def test_a_huge_sparse_file_of_arrays_is_not_read(folder):
    os.truncate(folder / "model.safetensors", 2**40)
    with pytest.raises(CheckpointError, match=f"the file has {2**40} bytes, and the manifest says"):
        read(folder)


words = st.sampled_from(
    ["step", "files", "tensors", "shape", "dtype", "stored", "$int", "$dict", "$numpy", "$tuple", "..", "/", "float32"]
)
junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture
def rich(tmp_path):
    folder = write(tmp_path / "mine", snapshot(deep={"a": [(1, 2), {3: b"x"}]}))
    return folder, content(folder)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_manifest_edited_at_random_raises_or_changes_only_facts(rich, data):
    folder, before = rich
    found = copy.deepcopy(before)
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(found, data)
    forge(folder, json.dumps(found, indent=2, ensure_ascii=False))
    try:
        facts = read(folder).facts
    except (CheckpointError, StateError):
        return
    # What was taken is another checkpoint, whole: only its facts can have changed.
    assert isinstance(facts, dict)
    assert found["files"] == before["files"]
    assert found["tensors"] == before["tensors"]


def mutate(node, data):
    """Changes, adds or removes something, somewhere below a node."""
    inner = [
        key for key in (node if isinstance(node, dict) else range(len(node))) if isinstance(node[key], dict | list)
    ]
    if inner and data.draw(st.booleans()):
        mutate(node[data.draw(st.sampled_from(inner))], data)
    elif isinstance(node, list):
        node.insert(data.draw(st.integers(0, len(node))), data.draw(junk))
    else:
        keys = st.sampled_from(list(node)) | words if node else words
        key = data.draw(keys)
        if key in node and data.draw(st.booleans()):
            del node[key]
        else:
            node[key] = data.draw(junk)
