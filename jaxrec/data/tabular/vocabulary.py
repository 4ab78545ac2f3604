"""From the values of a column to rows of its table: by hash, or by a vocabulary of the most frequent values.

A value is known by its key, a 64-bit hash of its UTF-8 text. Values of equal length of up to 8 bytes never share a key;
of n others, any two do with probability n^2 / 2^65 (a ten-millionth among two million), and would share a row.

Shape suffixes: n values, K distinct keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrec.data.block_writer import writing_to

# Odd constants of well-mixed bits: the golden ratio's, and Steele and Vigna's for a 64-bit mix (2021).
_LENGTH, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
# Longer texts are hashed one by one.
_LONG = 256
# The key of an empty text, which stands for a missing value.
EMPTY_KEY = np.uint64(0)


def keys_of(texts: Any) -> np.ndarray:
    """Returns the keys, uint64 [n], of a pyarrow string array without nulls."""
    n = len(texts)
    _, offsets_buffer, data_buffer = texts.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32, n + 1, texts.offset * 4) if n else np.zeros(1, np.int32)
    begin, end = int(offsets[0]), int(offsets[-1])
    # A word of 8 bytes may be read from any byte of the text, so it is padded.
    data = np.zeros(end - begin + 8, np.uint8)
    if data_buffer is not None:
        data[: end - begin] = np.frombuffer(data_buffer, np.uint8, end - begin, begin)
    words = np.ndarray((end - begin + 1,), "<u8", data.data, 0, (1,))
    starts = offsets[:-1].astype(np.int64) - begin
    lengths = np.diff(offsets).astype(np.int64)
    keys = lengths.astype(np.uint64) * _LENGTH
    at, rows = 0, slice(None)
    while at == 0 or len(keys[rows]):
        left = np.minimum(lengths[rows] - at, 8).astype(np.uint64)
        # A shift by 64 is not defined, so an empty text has no word to shift.
        word = np.where(left > 0, words[starts[rows] + at] << ((8 - np.maximum(left, 1)) * np.uint64(8)), 0)
        keys[rows] = mixed(keys[rows] ^ word)
        at += 8
        rows = np.flatnonzero((lengths > at) & (lengths <= _LONG))
    for i in np.flatnonzero(lengths > _LONG):
        text = data[starts[i] : starts[i] + lengths[i]].tobytes()
        keys[i] = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return keys


def mixed(keys: Any) -> Any:
    """Mixes the bits of uint64 keys, one to one."""
    keys = (keys ^ (keys >> _HALF)) * _MIX
    keys = (keys ^ (keys >> _HALF)) * _MIX
    return keys ^ (keys >> _HALF)


def hashed(keys: np.ndarray, rows: int) -> np.ndarray:
    """Returns ids, int32 [n], in a table of `rows` rows; several values may share one."""
    return (keys % np.uint64(rows)).astype(np.int32)


class Vocabulary(NamedTuple):
    """The values that have a row of their own. All others have row 0.

    Attributes:
      keys: uint64 [K], ascending.
      ids: int32 [K], from 1: the most frequent has 1, the next 2.
    """

    keys: np.ndarray
    ids: np.ndarray

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return len(self.keys) + 1

    def look_up(self, keys: np.ndarray) -> np.ndarray:
        """Returns ids, int32 [n]: 0 for a value that is not in the vocabulary."""
        if not len(self.keys):
            return np.zeros(len(keys), np.int32)
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[place] == keys, self.ids[place], 0).astype(np.int32)

    @classmethod
    def of(cls, keys: np.ndarray) -> Vocabulary:
        """Makes a vocabulary of keys in the order of their ids."""
        order = np.argsort(keys)
        return cls(keys[order], (order + 1).astype(np.int32))


class Counts:
    """Exact counts of a table's values. Beyond a number of distinct ones, they lie in files."""

    def __init__(self, folder: Path, name: str, room: int):
        """Takes a folder in --data_dir for files of that name, and how many values memory holds (16 bytes each)."""
        self._folder, self._name, self._room = folder, name, room
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []
        self._size = 0
        self._files = 0

    def add(self, keys: np.ndarray, counts: np.ndarray) -> None:
        """Adds counts, int64 [K], of keys, uint64 [K], which need not differ."""
        self._pending.append((keys, counts))
        self._size += len(keys)
        if self._size > 2 * self._room:
            self._merge_pending()

    def _merge_pending(self) -> None:
        keys, counts = merged(self._pending)
        if len(keys) > self._room:
            with writing_to(self._folder.parent):
                np.save(self._path(self._files, "keys"), keys)
                np.save(self._path(self._files, "counts"), counts)
            self._files += 1
            keys, counts = keys[:0], counts[:0]
        self._pending, self._size = [(keys, counts)], len(keys)

    def _path(self, number: int, what: str) -> Path:
        return self._folder / f"{self._name}-{number}-{what}.npy"

    def parts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (keys, counts) in ranges of keys, ascending, all occurrences of a key added up."""
        runs = [merged(self._pending)]
        for i in range(self._files):
            runs.append((np.load(self._path(i, "keys"), "r"), np.load(self._path(i, "counts"), "r")))
        ranges = max(1, -(-sum(len(keys) for keys, _ in runs) // (2 * self._room)))
        # Keys are spread evenly, so equal ranges hold about as many of them.
        bounds = [int(i * 2**64 // ranges) for i in range(1, ranges)]
        cuts = [[0, *np.searchsorted(keys, np.array(bounds, np.uint64)).tolist(), len(keys)] for keys, _ in runs]
        for i in range(ranges):
            yield merged([(k[c[i] : c[i + 1]], v[c[i] : c[i + 1]]) for (k, v), c in zip(runs, cuts, strict=True)])

    def vocabulary(self, min_count: int, most: int) -> Vocabulary:
        """Returns the vocabulary of the `most` most frequent values of those that occur `min_count` times.

        Of equally frequent values, those with the smaller keys are taken first.
        """
        keys, counts = np.empty(0, np.uint64), np.empty(0, np.int64)
        for more_keys, more in self.parts():
            often = more >= min_count
            keys, counts = np.concatenate([keys, more_keys[often]]), np.concatenate([counts, more[often]])
            order = np.lexsort((keys, -counts))[:most]
            keys, counts = keys[order], counts[order]
        return Vocabulary.of(keys)


def merged(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Adds up counts: keys ascending, each once, and their counts, int64."""
    keys = np.concatenate([np.asarray(k) for k, _ in pairs] or [np.empty(0, np.uint64)])
    counts = np.concatenate([np.asarray(c, np.int64) for _, c in pairs] or [np.empty(0, np.int64)])
    if not len(keys):
        return keys, counts
    order = np.argsort(keys)
    keys, counts = keys[order], counts[order]
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[first], np.add.reduceat(counts, first)
