"""The command and the commit with which a run was started."""

import subprocess
import sys

from lockstep.launch.command import read_command, read_commit


def test_the_command_can_be_typed_again(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "train.py", "--name", "two words"])
    assert read_command().partition(" ")[2] == "train.py --name 'two words'"


def test_the_commit_is_that_of_the_scripts_folder(tmp_path, monkeypatch):
    folder = tmp_path / "repository"
    folder.mkdir()
    script = folder / "train.py"
    script.write_text("")
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.chdir(tmp_path)
    assert read_commit() == ""

    def git(*words):
        names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        return subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True, text=True).stdout

    git("init")
    git("add", "train.py")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD").strip()
    assert read_commit() == commit
    script.write_text("changed")
    assert read_commit() == f"{commit}-dirty"
    monkeypatch.setenv("PATH", "")
    assert read_commit() == ""  # git is not installed
