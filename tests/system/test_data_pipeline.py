"""The data room with real processes and real text: kills, memory, a full disk, corpora from Debian."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import psutil
import pytest

from training.data import open_dataset, read_manifest
from training.data.baselines import baseline_perplexities
from training.errors import StorageError

pytestmark = pytest.mark.system

# Of whatever Python the distribution has.
PYTHON_DOCS = next(iter(sorted(Path("/usr/share/doc").glob("python3.*/html/_sources"))), None)
SWORD_WEB = Path("/usr/share/sword/modules/texts/ztext/engWEB2015eb")
MARKUP = re.compile(r"<note.*?</note>|<[^>]*>", re.DOTALL)
OFF = ("--set=prepare.quality.enabled=false", "--set=prepare.repetition.enabled=false")


def command(out, source, *more):
    base = [sys.executable, "-m", "training.data", "prepare", "--out", str(out), "--source", str(source)]
    return [*base, "--vocab-size", "600", "--seq-len", "64", *more]


def run(arguments, **options):
    return subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=300, **options)


def files_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def library_text(tmp_path_factory):
    """About 3 MB of text files of many sizes, from the interpreter's own library."""
    folder = tmp_path_factory.mktemp("library")
    size = 0
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        (folder / f"{path.stem}.txt").write_bytes(path.read_bytes())
        size += path.stat().st_size
        if size > 3_000_000:
            break
    return folder


def processes_of(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for child in psutil.Process(pid).children(recursive=True) if child.is_running()]
    return []


def test_killed_again_and_again_it_ends_with_the_same_bytes(library_text, tmp_path):
    undisturbed = run(command(tmp_path / "one", library_text, "--workers", "1", *OFF))
    assert undisturbed.returncode == 0, undisturbed.stderr
    out = tmp_path / "killed"
    kills = 0
    for moment_s in (0.6, 1.2, 1.8, 2.4, 3.0, 4.0, 5.0, 6.0, 600):
        process = subprocess.Popen(
            command(out, library_text, "--workers", "2", *OFF), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            process.wait(timeout=moment_s)
            break
        except subprocess.TimeoutExpired:
            workers = processes_of(process.pid)
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            _, alive = psutil.wait_procs(workers, timeout=20)
            assert not alive, f"workers outlived their parent: {alive}"
            assert not (out / "manifest.json").exists() or read_manifest(out)
        finally:
            process.stderr.close()
    assert kills >= 1 and process.returncode == 0
    assert files_of(out) == files_of(tmp_path / "one")


def test_an_interrupt_ends_it_at_once_and_the_next_run_goes_on(library_text, tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(out, library_text, "--workers", "2", *OFF),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not list(out.glob(".work/clean/*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    workers = processes_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    error = process.communicate(timeout=20)[1]
    assert process.returncode == 130, error
    assert "interrupted; run the command again to go on" in error and "Traceback" not in error
    assert not psutil.wait_procs(workers, timeout=20)[1]
    assert run(command(out, library_text, "--workers", "2", *OFF)).returncode == 0


PEAK_OF_MAIN = """
import sys
from training.data.__main__ import main
code = main(sys.argv[1:])
print("peak", next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""


def test_memory_does_not_grow_with_the_input(library_text, tmp_path):
    text = b"".join(path.read_bytes() for path in sorted(library_text.iterdir()))
    peaks = []
    for megabytes in (4, 24):
        source = tmp_path / f"{megabytes}.txt"
        with source.open("wb") as stream:
            for number in range(megabytes * 1_000_000 // len(text) + 1):
                stream.write(b"copy %d\n" % number + text)
        tight = ("--set=prepare.part_bytes=1000000", "--set=prepare.max_document_bytes=100000", "--workers=1", *OFF)
        sample = "--set=prepare.tokenizer_sample_bytes=500000"
        arguments = command(tmp_path / f"out{megabytes}", source, *tight, sample)
        done = run([sys.executable, "-c", PEAK_OF_MAIN, *arguments[3:]])
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split("peak")[1]))
    assert peaks[1] < 1.25 * peaks[0] and peaks[1] < 400_000, peaks


def test_a_full_disk_names_the_file_and_leaves_nothing_half_written(library_text, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f'mount -t tmpfs -o size=2m tmpfs {disk} && exec "$@"'
    shell = ["sh", "-c", script, "sh"]
    if run([*shell, "true"]).returncode == 0:
        unmount = ["umount", str(disk)]
        run(unmount)
    else:  # not root: a mount that only this process sees
        shell = ["unshare", "-rm", *shell]
        unmount = None
        if run([*shell, "true"]).returncode:
            pytest.skip("neither root nor user namespaces: no small disk can be made")
    check = f"; code=$?; ls -A {disk}/out >&2; test ! -e {disk}/out/manifest.json || exit 99; exit $code"
    inner = " ".join(command(disk / "out", library_text, "--workers", "2", *OFF)) + check
    try:
        done = run([*shell, "sh", "-c", inner])
    finally:
        if unmount:
            run(unmount)
    assert done.returncode == StorageError.exit_code != 0, done.stderr
    assert f"no space left while writing {disk}/out/" in done.stderr and "Traceback" not in done.stderr


def test_a_source_that_vanishes_half_way_is_named(library_text, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for path in library_text.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    last = sorted(source.iterdir())[-1]
    process = subprocess.Popen(
        command(tmp_path / "out", source, "--workers", "1", *OFF),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out").glob(".work/clean/*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    last.unlink()
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 1
    assert f"{last}: the source has gone since preparation began" in error and "Traceback" not in error
    assert not (tmp_path / "out" / "manifest.json").exists()


def sword_verses(folder):
    """Text of a SWORD zText module: .bzv rows (block, offset, length), .bzs rows (offset, size, size), .bzz zlib."""
    for testament in ("ot", "nt"):
        blocks = (folder / f"{testament}.bzs").read_bytes()
        verses = (folder / f"{testament}.bzv").read_bytes()
        packed = (folder / f"{testament}.bzz").read_bytes()
        unpacked = {}
        for place in range(0, len(verses) - 9, 10):
            block, start, length = struct.unpack_from("<IIH", verses, place)
            if not length:
                continue
            if block not in unpacked:
                offset, size = struct.unpack_from("<II", blocks, 12 * block)
                unpacked = {block: zlib.decompress(packed[offset : offset + size])}
            text = unpacked[block][start : start + length].decode("utf-8", "replace")
            yield " ".join(MARKUP.sub("", text).split())


@pytest.mark.skipif(PYTHON_DOCS is None, reason="package python3-doc (or python3.11-doc) is not installed")
def test_python_documentation(tmp_path):
    done = run(
        [sys.executable, "-m", "training.data", "prepare", "--source", str(PYTHON_DOCS), "--out", str(tmp_path / "out")]
        + ["--vocab-size", "2048", "--seq-len", "128", "--workers", "2", "--set=prepare.validation_fraction=0.05"]
    )
    assert done.returncode == 0, done.stderr
    assert "dropped: dup_5_gram" in done.stdout and "kept" in done.stdout
    assert run([sys.executable, "-m", "training.data", "verify", str(tmp_path / "out")]).returncode == 0
    train, held_out = open_dataset(tmp_path / "out"), open_dataset(tmp_path / "out", "validation")
    assert train.manifest.tokens("train") > 1_000_000
    result = baseline_perplexities(train.blocks(), held_out.blocks(), train.manifest.vocab_size)
    # Real language: far from uniform, and a word tells much about the next one.
    assert result.bigram_perplexity < 0.4 * result.unigram_perplexity < 0.4 * 0.5 * 2048


@pytest.mark.skipif(not SWORD_WEB.is_dir(), reason="package sword-text-web is not installed")
@pytest.mark.parametrize("form", ["tfrecord", "hdf5"])
def test_a_public_domain_bible(tmp_path, form):
    verses = list(sword_verses(SWORD_WEB))
    chapters = ["\n".join(verses[start : start + 25]) for start in range(0, len(verses), 25)]
    source = tmp_path / "web"
    source.mkdir()
    for number, chapter in enumerate(chapters):
        (source / f"{number:05d}.txt").write_text(chapter)
    for number in (700, 900, 1100, 1300):  # some of them may break a rule, their copies then do too
        (source / f"9{number}.txt").write_text(chapters[number].upper())
        (source / f"8{number}.txt").write_text(chapters[number + 50].replace(" the ", " that ", 1))
    flags = ("--format", form, "--workers", "2")
    done = run(command(tmp_path / "out", source, *flags))
    assert done.returncode == 0, done.stderr
    assert "dropped: exact_duplicate" in done.stdout and "dropped: near_duplicate" in done.stdout
    shown = run([sys.executable, "-m", "training.data", "inspect", str(tmp_path / "out")]).stdout
    assert "most frequent tokens" in shown
    rows = np.concatenate(list(open_dataset(tmp_path / "out").blocks()))
    assert rows.size > 500_000 and len(np.unique(rows)) > 400
    assert run([sys.executable, "-m", "training.data", "verify", str(tmp_path / "out")]).returncode == 0
