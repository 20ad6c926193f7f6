"""A checkpoint on disk: a folder of three files.

`model.safetensors` holds the model's arrays under the framework's own names,
`optimizer.safetensors` every other array, `manifest.json` all that is not an array
and a sha256 of everything. What has its final name is whole; whatever changed since
is found out; no byte of a file is ever run.
"""

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

from lockstep.backends.base import Array, State
from lockstep.checkpoint import io, json_codec, manifest, safetensors_file
from lockstep.checkpoint.atomic_folder import filled, located
from lockstep.checkpoint.io import MANIFEST, MODEL, OPTIMIZER, Folder
from lockstep.checkpoint.safetensors_file import Form
from lockstep.core import digest
from lockstep.core.arguments import check_path
from lockstep.errors import CheckpointError, SaveError, StateError

RESERVED = ("format", "checksum", "files", "tensors")
_MODEL = "model."


@dataclass(frozen=True)
class Snapshot:
    """What a run is at one moment: arrays by name, and the facts, a nest of plain values.

    >>> import numpy as np
    >>> losses = [0.5]
    >>> sealed = Snapshot({"model.w": Array(np.zeros(2), "float64")}, {"losses": losses}).sealed()
    >>> losses.append(0.4)
    >>> sealed.facts
    {'losses': [0.5]}
    """

    state: State
    facts: dict[str, Any] = field(default_factory=dict)

    def sealed(self) -> "Snapshot":
        """One with facts of its own, so that the run may go on while it is written. Refuses what cannot be kept.

        The state's arrays are as they were: a backend gives copies.
        """
        state, arrays, facts = _parts(self)
        copies = {name: Array(array.data.copy(order="C"), array.dtype) for name, array in arrays.items()}
        return Snapshot(state, json_codec.decode(facts, copies))


def write(folder: str | os.PathLike[str], snapshot: Snapshot) -> Path:
    """Writes a checkpoint and gives its path; it is on the disk, whole, when this returns.

    An older checkpoint of that name is whole until the new one has taken its place.

    >>> import tempfile, numpy as np
    >>> snapshot = Snapshot({"model.w": Array(np.arange(2.0), "float64")}, {"step": 3})
    >>> with tempfile.TemporaryDirectory() as home:
    ...     path = write(home + "/mine", snapshot)
    ...     print(sorted(os.listdir(path)), read(path).state["model.w"].data)
    ['manifest.json', 'model.safetensors', 'optimizer.safetensors'] [0. 1.]
    """
    state, arrays, facts = _parts(snapshot)
    state |= arrays
    forms = {name: Form.of(array, repr(name)) for name, array in state.items()}
    digests = digest.hash_arrays(state)
    content: dict[str, Any] = {**facts, "files": {}}
    content["tensors"] = {name: form.record() | {"sha256": digests[name]} for name, form in forms.items()}
    target = _target(folder)
    with io.saving(target), filled(target) as temporary:
        for file in (MODEL, OPTIMIZER):
            fill = functools.partial(safetensors_file.write, state=_held(file, state), forms=_held(file, forms))
            content["files"][file] = io.write(temporary / file, fill)
        text = manifest.dump(content)
        io.write(temporary / MANIFEST, lambda put: put(text))
    return target


def read(folder: str | os.PathLike[str]) -> Snapshot:
    """Reads a checkpoint and verifies every byte; `CheckpointError` names the file and what is wrong with it."""
    while True:
        with ExitStack() as stack:
            place = _place(folder, stack)
            try:
                return _read(place, stack)
            except CheckpointError:
                if _place(folder, stack) == place:  # else a newer one took its place meanwhile
                    raise


def facts_of(folder: str | os.PathLike[str], key: str) -> Any:
    """One of the facts of a checkpoint, which holds no arrays; None where there is none. Reads the manifest alone."""
    with ExitStack() as stack:
        place = _place(folder, stack)
        with _blaming(place.path / MANIFEST):
            content = _content(stack.enter_context(place.open(MANIFEST)))
            return json_codec.decode(content.get(key), {})


def _target(folder: str | os.PathLike[str]) -> Path:
    path = Path(os.path.abspath(check_path("path", folder, SaveError, "ckpt/")))
    if not path.name:
        raise SaveError(f"A checkpoint is a folder with a name of its own. Got {str(folder)!r}. Choose another path.")
    return path


def _parts(snapshot: Snapshot) -> tuple[State, State, dict[str, Any]]:
    """The state's arrays, those inside the facts, and the facts' JSON."""
    for name in snapshot.state:
        bare = name.removeprefix(_MODEL)
        if bare == "__metadata__" or name.startswith(json_codec.PREFIX) or not json_codec.writable(name):
            raise StateError(
                f"An array's name is UTF-8 text, not '__metadata__', and does not begin with {json_codec.PREFIX!r}. "
                f"Got {name!r}. Choose another name."
            )
        Form.of(snapshot.state[name], repr(name))
    for key in snapshot.facts:
        if type(key) is not str or not json_codec.writable(key) or key.startswith("$") or key in RESERVED:
            raise StateError(
                f"A fact's key is a word in UTF-8, does not begin with '$' and is none of {', '.join(RESERVED)}. "
                f"Got {key!r}. Choose another key."
            )
    facts, arrays = json_codec.encode(snapshot.facts)
    return dict(snapshot.state), arrays, facts


def _held(file: str, named: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the named things that the file holds, under the names they have there."""
    if file == MODEL:
        return {name.removeprefix(_MODEL): value for name, value in named.items() if name.startswith(_MODEL)}
    return {name: value for name, value in named.items() if not name.startswith(_MODEL)}


def _place(folder: str | os.PathLike[str], stack: ExitStack) -> Folder:
    """The folder, held as long as the stack is open."""
    for _ in range(5):  # one that stepped aside may be gone, and its place filled, at the second look
        try:
            return stack.enter_context(Folder(located(Path(folder))))
        except FileNotFoundError as error:
            reason: Exception = error
        except (OSError, ValueError) as error:
            reason = error
            break
    raise CheckpointError(
        f"A checkpoint is a folder with a {MANIFEST}. Got {str(folder)!r}: {_reason(reason)}. Look for it elsewhere."
    ) from reason


def _read(folder: Folder, stack: ExitStack) -> Snapshot:
    path = folder.path
    state: State = {}
    opened = {}
    for name in io.NAMES:  # all at once: they stay readable when another process removes them
        with _blaming(path / name):
            opened[name] = stack.enter_context(folder.open(name))
    with _blaming(path / MANIFEST):
        content = _content(opened[MANIFEST])
        forms, digests = _tensors(content.pop("tensors"))
        sizes = _files(content.pop("files"))
    for name in (MODEL, OPTIMIZER):
        with _blaming(path / name):
            prefix = _MODEL if name == MODEL else ""
            found = _arrays(opened[name], _held(name, forms), sizes[name])
            state |= {prefix + key: array for key, array in found.items()}
    with _blaming(path / MANIFEST):
        for name, sha256 in digest.hash_arrays(state).items():
            if sha256 != digests[name]:
                raise ValueError(f"the sha256 of {name!r:.100} is another in the file")
        inside = {name: state.pop(name) for name in forms if name.startswith(json_codec.PREFIX)}
        facts = json_codec.decode(content, inside)
        if not isinstance(facts, dict):
            raise ValueError("its facts have no keys")
        return Snapshot({name: state[name] for name in forms if name in state}, facts)


def _content(file: BufferedReader) -> dict[str, Any]:
    length = os.fstat(file.fileno()).st_size
    if length > manifest.MAX_BYTES:
        raise ValueError(f"it has {length} bytes, and at most {manifest.MAX_BYTES} are read")
    content = manifest.load(file.read(manifest.MAX_BYTES))
    for key in ("files", "tensors"):
        if not isinstance(content.get(key), dict):
            raise ValueError(f"it has no {key!r}")
    return content


def _tensors(records: dict[str, Any]) -> tuple[dict[str, Form], dict[str, str]]:
    """The form and the digest of every array."""
    forms, digests = {}, {}
    for name, record in records.items():
        form = Form.parse(record) if isinstance(record, dict) else None
        if form is None or record != form.record() | {"sha256": record.get("sha256")}:
            raise ValueError(f"the record of {name!r:.100} is none")
        forms[name], digests[name] = form, record["sha256"]
    return forms, digests


def _files(records: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The length and the digest of the two files of arrays."""
    for name in (MODEL, OPTIMIZER):
        if not isinstance(records.get(name), dict) or set(records[name]) != {"bytes", "sha256"}:
            raise ValueError(f"the record of {name!r} is none")
    if len(records) != 2:
        raise ValueError("it lists more files than a checkpoint has")
    return records


def _arrays(file: BufferedReader, forms: Mapping[str, Form], record: Mapping[str, Any]) -> State:
    """The arrays of a file whose length and digest are those of the manifest."""
    length = os.fstat(file.fileno()).st_size
    size = safetensors_file.size(forms)
    if type(record["bytes"]) is not int or not length == record["bytes"] == size:
        expected = f"{record['bytes']!r:.50} by its record and {size} by its arrays"
        raise ValueError(f"it has {length} bytes, and the manifest says {expected}")
    state, sha256 = safetensors_file.read(file, forms)
    if sha256 != record["sha256"]:
        raise ValueError(f"its sha256 is {sha256}, and the manifest says {record['sha256']!r:.70}")
    return state


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Says which file it was."""
    try:
        yield
    except StateError as error:
        raise StateError(f"{error} The file is {path}.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"A checkpoint's files are as they were written. In {path.parent}, {path.name} is not: {_reason(error)}. "
            "Use another checkpoint, or bring this file again."
        ) from error


def _reason(error: Exception) -> str:
    return str((isinstance(error, OSError) and error.strerror) or error)
