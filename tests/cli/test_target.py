import pickle
import subprocess
import sys

import cloudpickle
import pytest

from lockstep.cli import target
from lockstep.errors import ModelError


def test_the_function_is_found_and_the_guard_left_out(script):
    path = script("def make():\n    return 7\nif __name__ == '__main__':\n    raise SystemExit\n")
    assert target.load(f"{path}:make")() == 7


def test_it_imports_its_neighbours(script, tmp_path):
    (tmp_path / "neighbour_of_train.py").write_text("number = 8\n")
    path = script("from neighbour_of_train import number\ndef make():\n    return number\n")
    assert target.load(f"{path}:make")() == 8


def test_a_fresh_process_needs_no_file(script, tmp_path):
    path = script("class Model:\n    number = 9\n\ndef make():\n    return Model()\n")
    pickled = tmp_path / "pickled"
    pickled.write_bytes(cloudpickle.dumps(target.load(f"{path}:make")()))
    path.unlink()
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).number)"
    answer = subprocess.run(
        [sys.executable, "-c", code, str(pickled)], cwd="/", capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout == "9\n"
    assert pickle.loads(pickled.read_bytes()).number == 9


def test_a_name_that_the_standard_library_has(tmp_path):
    path = tmp_path / "json.py"
    path.write_text("def make():\n    return 10\n")
    assert target.load(f"{path}:make")() == 10
    assert sys.modules["json"].__file__ != str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.py", "A function is named as FILE.py:FUNCTION. Got 'train.py'."),
        ("train.py:", "A function is named as FILE.py:FUNCTION. Got 'train.py:'."),
        (":make", "A function is named as FILE.py:FUNCTION. Got ':make'."),
        ("nowhere.py:make", "The file must be there. Got 'nowhere.py', which is none."),
    ],
)
def test_a_name_that_is_none(text, message):
    with pytest.raises(ModelError) as caught:
        target.load(text)
    assert str(caught.value).startswith(message)


def test_a_function_that_is_not_there(script):
    path = script("number = 1\ndef make_trainer():\n    pass\n")
    with pytest.raises(ModelError, match=r"must define a function 'make'. It does not. Use one of: make_trainer\.$"):
        target.load(f"{path}:make")
    with pytest.raises(ModelError, match="must define a function 'number'"):
        target.load(f"{path}:number")
