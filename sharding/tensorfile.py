"""safetensors files, written in one stream and read in ranges.

A file is 8 bytes (little-endian length of the header), the header (JSON: name -> dtype, shape, data_offsets)
and the data. The safetensors library writes a file whose tensors are all there at once, and reads whole
slices; a checkpoint hashes what it writes, an export writes tensors as they are gathered, and a loader reads
straight into its shards. So the layout is made here, and the library's own checks are run on what is opened.

Knows nothing of ranks and models.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from .agreement import CheckpointError
from .index import FileEntry
from .layout import numpy_dtype
from .precision import cast_into

__all__ = [
    "BLOCK",
    "Header",
    "Source",
    "TensorFile",
    "TensorSpec",
    "bytes_of",
    "to_host",
    "verify_blocks",
    "write_tensors",
]

BLOCK = 16 << 20  # bytes that have a checksum of their own, so that ranks share the work of checking a file
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"

# NumPy's (and ml_dtypes') name -> the format's.
TAGS = {
    "bool": "BOOL",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
DTYPES = {tag: name for name, tag in TAGS.items()}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor in a file. TypeError for a dtype, ValueError for a name, that the format does not have."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in TAGS:
            raise TypeError(
                f"{self.name}: safetensors files cannot hold {self.dtype}; they hold {', '.join(TAGS)}"
            )
        if self.name == _METADATA:
            raise ValueError(
                f"a safetensors file cannot hold a tensor named {_METADATA!r}: that is what its metadata are "
                "called; rename the parameter"
            )
        _check_text(self.name, "the tensor's name")

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


def _check_text(text: Any, what: str) -> None:
    """A header is JSON in UTF-8, and its metadata are strings."""
    if not isinstance(text, str):
        raise TypeError(f"{what} {text!r} is a {type(text).__name__}; safetensors files hold strings there")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} {text!r} cannot be written as UTF-8 ({error.reason})") from error


@dataclass(frozen=True)
class Source:
    """A tensor to be written, and how to get it when its turn comes."""

    spec: TensorSpec
    get: Callable[[], np.ndarray]


class Header:
    """Where each tensor goes in a file of these tensors, and the bytes that say so.

    Wider dtypes come first, so that every tensor is aligned to its elements: some readers map the file.
    """

    def __init__(self, specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> None:
        self.specs = sorted(specs, key=lambda spec: -numpy_dtype(spec.dtype).itemsize)
        for pair in (metadata or {}).items():
            for text in pair:
                _check_text(text, f"metadata {pair!r}:")
        fields: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
        starts, at = {}, 0
        for spec in self.specs:
            fields[spec.name] = {
                "dtype": TAGS[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [at, at + spec.nbytes],
            }
            starts[spec.name] = at
            at += spec.nbytes
        head = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
        head += b" " * (-len(head) % 8)  # the data begins at a multiple of 8
        self.head = _LENGTH.pack(len(head)) + head
        self.bytes = len(self.head) + at
        self.offset = {name: len(self.head) + start for name, start in starts.items()}


def bytes_of(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array of any dtype, ml_dtypes' included."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def to_host(array: Any) -> np.ndarray:
    """A NumPy array itself; a copy of a CuPy array, by its bytes: NumPy knows dtypes that CuPy does not."""
    if isinstance(array, np.ndarray):
        return array
    if not array.size:
        return np.empty(array.shape, array.dtype)
    return array.reshape(-1).view("uint8").get().view(array.dtype).reshape(array.shape)


def write_tensors(
    path: Path, sources: Sequence[Source], metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Write a new file, one tensor after another, and have the system put it on the disk.

    What is hashed is what is in memory, so damage on the way to the disk is found when the file is read.
    """
    header = Header((source.spec for source in sources), metadata)
    get = {source.spec.name: source.get for source in sources}
    blocks = _Blocks()
    with path.open("xb", buffering=0) as file:
        for data in _stream(header, get):
            blocks.add(data)
            _write_all(file.fileno(), data)
        os.fsync(file.fileno())
    return FileEntry(path.name, header.bytes, BLOCK, tuple(blocks.digests()))


def _stream(header: Header, get: Mapping[str, Callable[[], np.ndarray]]) -> Iterator[memoryview]:
    yield memoryview(header.head)
    for spec in header.specs:
        data = bytes_of(get[spec.name]())
        for start in range(0, len(data), BLOCK):
            yield data[start : start + BLOCK]


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


class _Blocks:
    """SHA-256 of each BLOCK bytes of a stream."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._hash, self._room = hashlib.sha256(), BLOCK

    def add(self, data: memoryview) -> None:
        while data:
            part = data[: self._room]
            self._hash.update(part)
            self._room -= len(part)
            data = data[len(part) :]
            if not self._room:
                self._done.append(self._hash.hexdigest())
                self._hash, self._room = hashlib.sha256(), BLOCK

    def digests(self) -> list[str]:
        return [*self._done, self._hash.hexdigest()] if self._room < BLOCK else self._done


def verify_blocks(path: Path, entry: FileEntry, blocks: Iterable[int]) -> None:
    """CheckpointError, naming the file, if any of these blocks is not what was written."""
    with path.open("rb", buffering=0) as file:
        for block in blocks:
            start = block * entry.block
            data = bytearray(min(entry.block, entry.bytes - start))
            _read_all(file.fileno(), memoryview(data), start, path)
            if hashlib.sha256(data).hexdigest() != entry.sha256[block]:
                raise CheckpointError(
                    f"{path}: bytes {start} to {start + len(data)} do not match their checksum; the file was "
                    "damaged or changed after the save"
                )


def _read_all(descriptor: int, target: memoryview, offset: int, path: Path) -> None:
    while target:
        count = os.preadv(descriptor, [target], offset)
        if count == 0:
            raise CheckpointError(f"{path}: it ends at byte {offset}; it is truncated")
        target, offset = target[count:], offset + count


class TensorFile:
    """A safetensors file, opened for reading ranges of its tensors.

    CheckpointError, naming the file, for one that is not there or whose header is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safetensors.safe_open(path, "numpy"):
                pass
            self._file = path.open("rb", buffering=0)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing") from error
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"{path}: it is not a whole safetensors file ({error})") from error
        head = bytearray(_LENGTH.size)
        _read_all(self._file.fileno(), memoryview(head), 0, path)
        (length,) = _LENGTH.unpack(head)
        text = bytearray(length)
        _read_all(self._file.fileno(), memoryview(text), _LENGTH.size, path)
        self._start = _LENGTH.size + length
        self._tensors = json.loads(text)
        self.metadata: dict[str, str] = self._tensors.pop(_METADATA, {})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def spec(self, name: str) -> TensorSpec:
        """What a tensor is. CheckpointError if there is none of that name."""
        if name not in self._tensors:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        fields = self._tensors[name]
        return TensorSpec(name, tuple(fields["shape"]), DTYPES[fields["dtype"]])

    def read(self, name: str, start: int, target: Any) -> None:
        """Fill `target` (1-d, contiguous) with elements [start, start + len(target)), cast to its dtype.

        Straight into its memory where that is in the host and the dtypes agree, else a block at a time.
        """
        dtype = numpy_dtype(self.spec(name).dtype)
        offset = self._start + self._tensors[name]["data_offsets"][0] + start * dtype.itemsize
        if isinstance(target, np.ndarray) and target.dtype == dtype:
            _read_all(self._file.fileno(), bytes_of(target), offset, self.path)
            return
        step = BLOCK // dtype.itemsize
        for at in range(0, target.size, step):
            part = target[at : at + step]
            block = np.empty(part.size, dtype)
            _read_all(self._file.fileno(), bytes_of(block), offset + at * dtype.itemsize, self.path)
            if isinstance(part, np.ndarray):
                cast_into(part, block)
            else:  # cast here: CuPy does not know every dtype, but can carry its bytes
                narrow = np.empty(part.size, part.dtype)
                cast_into(narrow, block)
                part.view("uint8").set(narrow.view(np.uint8))
