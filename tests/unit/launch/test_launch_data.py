"""The fab tasks of the data room: what command they run, and that its exit code is theirs."""

import subprocess
import sys

from launch import data


def test_commands_hold_what_was_asked_for():
    command = data.prepare_command(
        ["a b", "-dash"],
        "out",
        format="hdf5",
        vocab_size=10,
        seq_len=5,
        workers=2,
        config="c.yaml",
        overrides=["x.y=1"],
    )
    assert command[:4] == [sys.executable, "-m", "training.data", "prepare"]
    assert command[4:] == (
        ["--out", "out", "--format", "hdf5", "--vocab-size", "10", "--seq-len", "5", "--workers", "2"]
        + ["--config", "c.yaml", "--set", "x.y=1", "--source=a b", "--source=-dash"]
    )
    assert data.prepare_command([], "out", demo=True)[4:] == ["--demo", "--out", "out"]
    assert data.verify_command("d", workers=3)[3:] == ["verify", "d", "--workers", "3"]
    assert data.inspect_command("d", index=0)[3:] == ["inspect", "d", "--index", "0"]


def test_the_exit_code_is_handed_on(tmp_path, capfd):
    assert data.verify(str(tmp_path)) == 1
    assert "is not a prepared dataset" in capfd.readouterr().err


def test_the_data_commands_and_the_package_import_no_torch():
    code = (
        "import sys, training.data, training.data.__main__, training.data.prepare, training.data.verify, launch.data;"
    )
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_interrupt_waits_for_the_program(monkeypatch):
    class Interrupted:
        waits = 0

        def __init__(self, command):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def wait(self):
            Interrupted.waits += 1
            if Interrupted.waits == 1:
                raise KeyboardInterrupt
            return 130

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    assert data.run(["x"]) == 130 and Interrupted.waits == 2
