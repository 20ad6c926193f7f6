import pickle
import subprocess
import sys

import cloudpickle
import pytest

from lockstep.cli.verify import load_function
from lockstep.errors import ModelError


def test_the_function_is_found_and_the_guard_left_out(script):
    path = script("def make():\n    return 7\nif __name__ == '__main__':\n    raise SystemExit\n")
    assert load_function(f"{path}:make")() == 7


def test_it_imports_its_neighbours(script, tmp_path):
    (tmp_path / "neighbour_of_train.py").write_text("number = 8\n")
    path = script("from neighbour_of_train import number\ndef make():\n    return number\n")
    assert load_function(f"{path}:make")() == 8


def test_a_fresh_process_needs_no_file(script, tmp_path):
    path = script("class Model:\n    number = 9\n\ndef make():\n    return Model()\n")
    pickled = tmp_path / "pickled"
    pickled.write_bytes(cloudpickle.dumps(load_function(f"{path}:make")()))
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
    assert load_function(f"{path}:make")() == 10
    assert sys.modules["json"].__file__ != str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.py", "'train.py' must have the form FILE.py:FUNCTION."),
        ("train.py:", "'train.py:' must have the form FILE.py:FUNCTION."),
        (":make", "':make' must have the form FILE.py:FUNCTION."),
        ("nowhere.py:make", "The file 'nowhere.py' does not exist."),
    ],
)
def test_an_invalid_name_is_refused(text, message):
    with pytest.raises(ModelError) as caught:
        load_function(text)
    assert str(caught.value).startswith(message)


def test_a_missing_function_is_refused(script):
    path = script("number = 1\ndef make_trainer():\n    pass\n")
    with pytest.raises(ModelError, match=r"defines no function 'make'. Use one of its functions: make_trainer\.$"):
        load_function(f"{path}:make")
    with pytest.raises(ModelError, match="defines no function 'number'"):
        load_function(f"{path}:number")
