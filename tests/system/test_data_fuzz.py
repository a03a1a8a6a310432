"""Ten thousand damaged shards: a reader gives the right rows or a DataError, and never hangs or dies."""

from __future__ import annotations

import random

import numpy as np
import pytest

from training.data.formats import ShardLayout, get_format
from training.errors import DataError

pytestmark = pytest.mark.system

LAYOUT = ShardLayout(9, "uint16")
INPUTS_A_FORMAT = 5000


def damaged(data: bytes, rng: random.Random) -> bytes:
    """`data` with one to four of: flipped bits, overwritten, removed, doubled or inserted pieces."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(out) + 1)
        kind = rng.randrange(5)
        piece = rng.randbytes(rng.choice((1, 2, 4, 8, 12, 30)))
        if kind == 0 and out:
            out[place % len(out)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[place : place + len(piece)] = piece
        elif kind == 2:
            del out[place : place + rng.choice((1, 4, 100, len(out)))]
        elif kind == 3:
            out[place:place] = out[place : place + 50]
        else:
            out[place:place] = piece
    return bytes(out)


@pytest.mark.parametrize("name", ["tfrecord", "hdf5"])
def test_damaged_shards_give_the_right_rows_or_a_data_error(tmp_path, name):
    rng = random.Random(2026)
    rows = np.random.default_rng(1).integers(0, 65536, (30, 9), dtype=np.uint16)
    path = tmp_path / "shard"
    shard_format = get_format(name)
    writer = shard_format.open_writer(path, LAYOUT, {"compression": "gzip" if name == "hdf5" else "none"})
    writer.append(rows)
    writer.close()
    sound = path.read_bytes()
    known = set(map(bytes, rows))
    refused = 0
    for _ in range(INPUTS_A_FORMAT):
        path.write_bytes(damaged(sound, rng))
        try:
            reader = shard_format.open_reader(path, LAYOUT, True)
            try:
                found = reader.read(0, len(reader)).copy()
                reader.take(range(len(reader)))
            finally:
                reader.close()
        except DataError as error:
            assert str(path) in error.cause and error.remedy
            refused += 1
            continue
        # Whole records may be missing or doubled, which the manifest tells; none may be wrong.
        assert {bytes(row) for row in found} <= known
    assert refused > INPUTS_A_FORMAT // 2
