"""A checkpoint on disk: a folder of three files.

`model.safetensors` holds the model's arrays under the framework's own names, `optimizer.safetensors` every other array,
`manifest.json` all that is not an array and a sha256 of everything. A folder with its final name is complete; a file
that has changed since is detected; nothing in a file is ever executed.
"""

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.backends.base import Array, State
from lockstep.checkpoint import json_codec, manifest, safetensors_file
from lockstep.checkpoint.atomic_folder import fill_folder, find_folder
from lockstep.checkpoint.io import MANIFEST, MODEL, NAMES, OPTIMIZER, OpenFolder, raise_save_errors, write_file
from lockstep.checkpoint.safetensors_file import Form
from lockstep.core import digest
from lockstep.core.arguments import check_path
from lockstep.errors import CheckpointError, SaveError, StateError

RESERVED = ("format", "checksum", "files", "tensors")
_MODEL = "model."


class _Encoded(NamedTuple):
    """The facts of a snapshot as JSON, and the arrays inside them."""

    facts: dict[str, Any]
    arrays: State


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one moment: arrays by name, and the facts, a pytree of plain values.

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
        """Copy the facts, so that training can continue while they are written; raise if they cannot be saved.

        The state's arrays are not copied again: a backend gives copies. The facts are encoded here, in the training
        thread, and not once more when they are written.
        """
        facts, arrays = _encode(self)
        copies = {name: Array(array.data.copy(order="C"), array.dtype) for name, array in arrays.items()}
        frozen = Snapshot(dict(self.state), json_codec.decode(facts, copies))
        object.__setattr__(frozen, "_encoded", _Encoded(facts, copies))
        return frozen


def write(folder: str | os.PathLike[str], snapshot: Snapshot) -> Path:
    """Write a checkpoint and return its path; it is complete and on the disk when this returns.

    An older checkpoint of that name stays complete until the new one replaces it.

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
    """Read a checkpoint and verify every byte; a `CheckpointError` names the file and what is wrong with it."""
    while True:
        with ExitStack() as stack:
            opened = _open_folder(folder, stack)
            try:
                return _read(opened, stack)
            except CheckpointError:
                if _open_folder(folder, stack) == opened:  # else a newer checkpoint has replaced it: read that one
                    raise


def read_fact(folder: str | os.PathLike[str], key: str) -> Any:
    """Read one fact, which must hold no arrays, from the manifest alone; None if the checkpoint does not have it."""
    with ExitStack() as stack:
        opened = _open_folder(folder, stack)
        with _raise_file_errors(opened.path / MANIFEST):
            content = _read_manifest(stack.enter_context(opened.open(MANIFEST)))
            return json_codec.decode(content.get(key), {})


def _check_target(folder: str | os.PathLike[str]) -> Path:
    path = Path(os.path.abspath(check_path("path", folder, SaveError, "ckpt/")))
    if not path.name:
        raise SaveError(f"path must be a folder with a name. Got {str(folder)!r}. Use for example 'ckpt/'.")
    return path


def _encode(snapshot: Snapshot) -> _Encoded:
    """The facts as JSON, and the arrays inside them; raise if a name or a value cannot be saved."""
    for name in snapshot.state:
        bare = name.removeprefix(_MODEL)
        if bare == "__metadata__" or name.startswith(json_codec.PREFIX) or not json_codec.is_utf8(name):
            raise StateError(
                f"An array cannot be saved under the name {name!r}: a name must be UTF-8, not '__metadata__', and not "
                f"begin with {json_codec.PREFIX!r}. Use another name."
            )
        Form.from_array(snapshot.state[name], repr(name))
    for key in snapshot.facts:
        if type(key) is not str or not json_codec.is_utf8(key) or key.startswith("$") or key in RESERVED:
            raise StateError(
                f"A fact cannot be saved under the key {key!r}: a key must be a UTF-8 string, not begin with '$', and "
                f"not be one of {', '.join(RESERVED)}. Use another key."
            )
    return _Encoded(*json_codec.encode(snapshot.facts))


def _select(file: str, named: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the named things that the file holds, under the names they have there."""
    if file == MODEL:
        return {name.removeprefix(_MODEL): value for name, value in named.items() if name.startswith(_MODEL)}
    return {name: value for name, value in named.items() if not name.startswith(_MODEL)}


def _open_folder(folder: str | os.PathLike[str], stack: ExitStack) -> OpenFolder:
    """Open the folder of a checkpoint until the stack is closed."""
    for _ in range(5):  # a folder that was moved aside may be gone when it is opened, and its name in use again
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
    for name in NAMES:  # all at once: an open file stays readable when another process removes it
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
            raise ValueError("its facts have no keys")
        return Snapshot({name: state[name] for name in forms if name in state}, facts)


def _read_manifest(file: BufferedReader) -> dict[str, Any]:
    length = os.fstat(file.fileno()).st_size
    if length > manifest.MAX_BYTES:
        raise ValueError(f"it has {length} bytes, and at most {manifest.MAX_BYTES} are read")
    content = manifest.load(file.read(manifest.MAX_BYTES))
    for key in ("files", "tensors"):
        if not isinstance(content.get(key), dict):
            raise ValueError(f"it has no {key!r}")
    return content


def _parse_tensors(records: dict[str, Any]) -> tuple[dict[str, Form], dict[str, str]]:
    """The form and the digest of every array."""
    forms, digests = {}, {}
    for name, record in records.items():
        form = Form.parse(record) if isinstance(record, dict) else None
        if form is None or record != form.to_record() | {"sha256": record.get("sha256")}:
            raise ValueError(f"the record of {name!r:.100} is not valid")
        forms[name], digests[name] = form, record["sha256"]
    return forms, digests


def _check_files(records: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The length and the digest of the two files of arrays."""
    for name in (MODEL, OPTIMIZER):
        if not isinstance(records.get(name), dict) or set(records[name]) != {"bytes", "sha256"}:
            raise ValueError(f"the record of {name!r} is not valid")
    if len(records) != 2:
        raise ValueError("it lists more files than a checkpoint has")
    return records


def _read_arrays(file: BufferedReader, forms: Mapping[str, Form], record: Mapping[str, Any]) -> State:
    """The arrays of a file whose length and digest are those of the manifest."""
    length = os.fstat(file.fileno()).st_size
    size = safetensors_file.compute_size(forms)
    # The length is compared before any array is made, so that a forged shape takes no memory.
    if type(record["bytes"]) is not int or not length == record["bytes"] == size:
        expected = f"{record['bytes']!r:.50} by its record and {size} by its arrays"
        raise ValueError(f"it has {length} bytes, and the manifest says {expected}")
    state, sha256 = safetensors_file.read(file, forms)
    if sha256 != record["sha256"]:
        raise ValueError(f"its sha256 is {sha256}, and the manifest says {record['sha256']!r:.70}")
    return state


@contextmanager
def _raise_file_errors(path: Path) -> Iterator[None]:
    """Turn an error inside the block into one that names the file."""
    try:
        yield
    except StateError as error:
        raise StateError(f"{error} The file is {path}.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"There is no undamaged checkpoint in {path.parent}. {path.name}: {_explain(error)}. "
            "Use another checkpoint, or copy this file again."
        ) from error


def _explain(error: Exception) -> str:
    return str((isinstance(error, OSError) and error.strerror) or error)
