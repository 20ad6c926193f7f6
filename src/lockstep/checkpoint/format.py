"""The format of a checkpoint on disk: a folder of three files.

`model.safetensors` contains the model's arrays under the framework's own names, `optimizer.safetensors` all other
arrays, and `manifest.json` everything else, with the sha256 of each file and each array. A folder with its final name
is complete, a file that was changed later is detected, and no code in a file is ever executed.
"""

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.checkpoint import json_codec, manifest, safetensors_file
from lockstep.checkpoint.atomic_folder import fill_folder, find_folder
from lockstep.checkpoint.io import MANIFEST, MODEL, NAMES, OPTIMIZER, OpenFolder, raise_save_errors, write_file
from lockstep.checkpoint.safetensors_file import Form
from lockstep.core import digest
from lockstep.core.arguments import check_path
from lockstep.core.types import Array, State
from lockstep.errors import CheckpointError, SaveError, StateError

RESERVED = ("format", "checksum", "files", "tensors")
_MODEL = "model."


class _Encoded(NamedTuple):
    """The facts of a snapshot (its values that are not state arrays) as JSON, and the arrays inside the facts."""

    facts: dict[str, Any]
    arrays: State


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one moment: arrays by name, and `facts`, a pytree of plain values.

    >>> import numpy as np
    >>> losses = [0.5]
    >>> frozen = Snapshot({"model.w": Array(np.zeros(2), "float64")}, {"losses": losses}).freeze()
    >>> losses.append(0.4)
    >>> frozen.facts
    {'losses': [0.5]}
    """

    state: State
    facts: dict[str, Any] = field(default_factory=dict)
    _encoded: _Encoded | None = field(default=None, init=False, repr=False, compare=False)

    def freeze(self) -> "Snapshot":
        """Returns the snapshot with a copy of its facts, so that training can continue.

        Raises StateError if one of the facts, or the name of an array, cannot be saved.

        The arrays of the state are copies already. The facts are encoded here, in the training thread, and are not
        encoded again when they are written.
        """
        facts, arrays = _encode(self)
        copies = {name: Array(array.data.copy(order="C"), array.dtype) for name, array in arrays.items()}
        frozen = Snapshot(dict(self.state), json_codec.decode(facts, copies))
        object.__setattr__(frozen, "_encoded", _Encoded(facts, copies))
        return frozen


def write(folder: str | os.PathLike[str], snapshot: Snapshot) -> Path:
    """Writes a checkpoint to a folder, and returns its path once the checkpoint is synced to the disk.

    An older checkpoint in this folder stays complete until the new checkpoint replaces it.

    >>> import tempfile, numpy as np
    >>> snapshot = Snapshot({"model.w": Array(np.arange(2.0), "float64")}, {"step": 3})
    >>> with tempfile.TemporaryDirectory() as home:
    ...     path = write(home + "/mine", snapshot)
    ...     print(sorted(os.listdir(path)), read(path).state["model.w"].data)
    ['manifest.json', 'model.safetensors', 'optimizer.safetensors'] [0. 1.]
    """
    facts, arrays = snapshot._encoded or _encode(snapshot)
    state = {**snapshot.state, **arrays}
    forms = {name: Form.from_array(array, repr(name)) for name, array in state.items()}
    digests = digest.hash_arrays(state)
    content: dict[str, Any] = {**facts, "files": {}}
    content["tensors"] = {name: form.to_record() | {"sha256": digests[name]} for name, form in forms.items()}
    target = _check_target(folder)
    with raise_save_errors(target), fill_folder(target) as temporary:
        for file in (MODEL, OPTIMIZER):
            fill = functools.partial(safetensors_file.write, state=_select(file, state), forms=_select(file, forms))
            content["files"][file] = write_file(temporary / file, fill)
        text = manifest.dump(content)
        write_file(temporary / MANIFEST, lambda put: put(text))
    return target


def read(folder: str | os.PathLike[str]) -> Snapshot:
    """Returns the checkpoint in a folder; verifies every byte, and raises CheckpointError for a damaged file."""
    while True:
        with ExitStack() as stack:
            opened = _open_folder(folder, stack)
            try:
                return _read(opened, stack)
            except CheckpointError:
                if _open_folder(folder, stack) == opened:  # otherwise a newer checkpoint has replaced it
                    raise


def read_fact(folder: str | os.PathLike[str], key: str) -> Any:
    """Returns the value that a checkpoint's manifest has for `key`, e.g. its step; None if there is none.

    Reads the manifest only, so the value must not contain arrays.
    """
    with ExitStack() as stack:
        opened = _open_folder(folder, stack)
        with _raise_file_errors(opened.path / MANIFEST):
            content = _read_manifest(stack.enter_context(opened.open(MANIFEST)))
            return json_codec.decode(content.get(key), {})


def _check_target(folder: str | os.PathLike[str]) -> Path:
    path = Path(os.path.abspath(check_path("path", folder, SaveError, "ckpt/")))
    if not path.name:
        raise SaveError(
            f"A checkpoint needs a folder with a name. Got path={str(folder)!r}. Use for example path='ckpt/'."
        )
    return path


def _encode(snapshot: Snapshot) -> _Encoded:
    """Returns the facts of a snapshot as JSON, and the arrays in them; raises if a name or a value cannot be saved."""
    for name in snapshot.state:
        bare = name.removeprefix(_MODEL)
        if bare == "__metadata__" or name.startswith(json_codec.PREFIX) or not json_codec.is_utf8(name):
            raise StateError(
                f"The array named {name!r} cannot be saved under this name. Rename the array: a name must be valid "
                f"UTF-8, must not be '__metadata__', and must not begin with {json_codec.PREFIX!r}."
            )
        Form.from_array(snapshot.state[name], repr(name))
    for key in snapshot.facts:
        if type(key) is not str or not json_codec.is_utf8(key) or key.startswith("$") or key in RESERVED:
            raise StateError(
                f"The fact with the key {key!r} cannot be saved under this key. Use a key that is a valid UTF-8 "
                f"string, does not begin with '$', and is not one of {', '.join(RESERVED)}."
            )
    return _Encoded(*json_codec.encode(snapshot.facts))


def _select(file: str, named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those entries of a dict by array name that belong to `file`, under the arrays' names in this file."""
    if file == MODEL:
        return {name.removeprefix(_MODEL): value for name, value in named.items() if name.startswith(_MODEL)}
    return {name: value for name, value in named.items() if not name.startswith(_MODEL)}


def _open_folder(folder: str | os.PathLike[str], stack: ExitStack) -> OpenFolder:
    """Opens the folder of a checkpoint; closing the stack closes the folder."""
    for _ in range(5):  # again, if another process has renamed the folder since `find_folder` returned its path
        try:
            return stack.enter_context(OpenFolder(find_folder(Path(folder))))
        except FileNotFoundError as error:
            reason: Exception = error
        except (OSError, ValueError) as error:
            reason = error
            break
    raise CheckpointError(
        f"There is no checkpoint at {str(folder)!r}: {_explain(reason)}. "
        f"Use the path of a folder with a {MANIFEST}, or of a folder of such folders."
    ) from reason


def _read(folder: OpenFolder, stack: ExitStack) -> Snapshot:
    path = folder.path
    state: State = {}
    files = {}
    for name in NAMES:  # all are opened first, because an open file stays readable when another process removes it
        with _raise_file_errors(path / name):
            files[name] = stack.enter_context(folder.open(name))
    with _raise_file_errors(path / MANIFEST):
        content = _read_manifest(files[MANIFEST])
        forms, digests = _parse_tensors(content.pop("tensors"))
        records = _check_files(content.pop("files"))
    for name in (MODEL, OPTIMIZER):
        with _raise_file_errors(path / name):
            prefix = _MODEL if name == MODEL else ""
            arrays = _read_arrays(files[name], _select(name, forms), records[name])
            state |= {prefix + key: array for key, array in arrays.items()}
    with _raise_file_errors(path / MANIFEST):
        for name, sha256 in digest.hash_arrays(state).items():
            if sha256 != digests[name]:
                raise ValueError(f"the sha256 of {name!r:.100} differs from that of the array in the file")
        inside = {name: state.pop(name) for name in forms if name.startswith(json_codec.PREFIX)}
        facts = json_codec.decode(content, inside)
        if not isinstance(facts, dict):
            raise ValueError(
                f"the manifest must contain a dict of values, but contains a value of type {type(facts).__name__}"
            )
        return Snapshot({name: state[name] for name in forms if name in state}, facts)


def _read_manifest(file: BufferedReader) -> dict[str, Any]:
    length = os.fstat(file.fileno()).st_size
    if length > manifest.MAX_BYTES:
        raise ValueError(f"the file can have at most {manifest.MAX_BYTES} bytes, got {length}")
    content = manifest.load(file.read(manifest.MAX_BYTES))
    for key in ("files", "tensors"):
        if not isinstance(content.get(key), dict):
            raise ValueError(f"the manifest has no {key!r}")
    return content


def _parse_tensors(records: dict[str, Any]) -> tuple[dict[str, Form], dict[str, str]]:
    """Returns the form and the digest of every array by name; raises `ValueError` for a record that is not valid."""
    forms, digests = {}, {}
    for name, record in records.items():
        form = Form.parse(record) if isinstance(record, dict) else None
        if form is None or record != form.to_record() | {"sha256": record.get("sha256")}:
            raise ValueError(f"the record of the array {name!r:.100} is not valid")
        forms[name], digests[name] = form, record["sha256"]
    return forms, digests


def _check_files(records: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the records of the two files of arrays; raises `ValueError` if they are not valid."""
    for name in (MODEL, OPTIMIZER):
        if not isinstance(records.get(name), dict) or set(records[name]) != {"bytes", "sha256"}:
            raise ValueError(f"the record of the file {name!r} is not valid")
    if len(records) != 2:
        raise ValueError("the manifest lists more files than a checkpoint has")
    return records


def _read_arrays(file: BufferedReader, forms: Mapping[str, Form], record: Mapping[str, Any]) -> State:
    """Returns the arrays of a file; raises `ValueError` if the manifest has another length or sha256 of the file."""
    length = os.fstat(file.fileno()).st_size
    size = safetensors_file.compute_size(forms)
    # The length is compared before any array is created, so that a wrong shape takes no memory.
    if type(record["bytes"]) is not int or not length == record["bytes"] == size:
        expected = f"{record['bytes']!r:.50} by the record of the file and {size} by the shapes of the arrays"
        raise ValueError(f"the file has {length} bytes, and the manifest says {expected}")
    state, sha256 = safetensors_file.read(file, forms)
    if sha256 != record["sha256"]:
        raise ValueError(f"the sha256 of the file is {sha256}, and the manifest says {record['sha256']!r:.70}")
    return state


@contextmanager
def _raise_file_errors(path: Path) -> Iterator[None]:
    """Raises an error inside the block again, as a CheckpointError or StateError that names the file."""
    try:
        yield
    except StateError as error:
        raise StateError(f"{error} The file is {path}.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"There is no undamaged checkpoint in {path.parent}. {path.name}: {_explain(error)}. "
            f"Use another checkpoint, or copy {path.name} again."
        ) from error


def _explain(error: Exception) -> str:
    return str((isinstance(error, OSError) and error.strerror) or error)
