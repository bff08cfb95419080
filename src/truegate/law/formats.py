"""Checkpoint files: a streaming, sparse safetensors writer, and a reader that also knows bf16, fp8 and e8m0.

Invariant: a byte that was never written reads as zero and costs no disk. A file is 8 bytes of header length, a JSON
header {name: {dtype, shape, data_offsets}}, then the tensors back to back.
"""

import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from truegate.errors import UserError

# safetensors' name of a dtype -> the numpy dtype that holds its values
DTYPES: dict[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
        "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
    }.items()
}  # fmt: skip
CONFIG_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # config.json's name -> safetensors' name
_MAX_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Name, safetensors dtype and shape of one tensor of a file that is about to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class SafetensorsWriter:
    """Writes tensors in any order and in parts: every tensor is declared first, what is not written stays zero."""

    def __init__(self, path: Path, tensors: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> None:
        self._specs = {t.name: t for t in tensors}
        header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        self._starts: dict[str, int] = {}
        end = 0
        for t in self._specs.values():
            self._starts[t.name] = end
            header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [end, end + t.num_bytes]}
            end += t.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 64)  # data start on a 64-byte boundary: readers map the file
        self._base = 8 + len(text)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.ftruncate(self._file, self._base + end)
        self._write(len(text).to_bytes(8, "little") + text, 0)

    def write(self, name: str, values: NDArray[Any]) -> None:
        """All of a tensor."""
        spec = self._specs[name]
        if values.shape != spec.shape:
            raise ValueError(f"{name}: {values.shape} given, {spec.shape} declared")
        self._put(name, 0, values)

    def write_rows(self, name: str, first: int, rows: NDArray[Any]) -> None:
        """Consecutive entries of a tensor's first axis, beginning with entry `first`."""
        spec = self._specs[name]
        if rows.shape[1:] != spec.shape[1:] or not 0 <= first <= spec.shape[0] - rows.shape[0]:
            raise ValueError(f"{name}: rows {rows.shape} from {first} do not fit {spec.shape}")
        self._put(name, first * math.prod(spec.shape[1:]), rows)

    def write_at(self, name: str, index: tuple[int, ...], values: NDArray[Any]) -> None:
        """A run of values along the last axis, beginning at `index`."""
        spec = self._specs[name]
        if values.ndim != 1 or not 0 <= index[-1] <= spec.shape[-1] - len(values):
            raise ValueError(f"{name}: {values.shape} at {index} does not fit {spec.shape}")
        self._put(name, int(np.ravel_multi_index(index, spec.shape)), values)

    def _put(self, name: str, first: int, values: NDArray[Any]) -> None:
        dtype = DTYPES[self._specs[name].dtype]
        data = np.ascontiguousarray(values, dtype=dtype)
        self._write(data.tobytes(), self._base + self._starts[name] + first * dtype.itemsize)

    def _write(self, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(self._file, view, offset)
            view, offset = view[done:], offset + done

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SafetensorsFile:
    """Read-only view of one file: tensors come back as arrays that alias the mapped file, in their own dtype."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise UserError(f"{path}: no such file; is the download complete?")
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > min(_MAX_HEADER, path.stat().st_size):
                raise UserError(f"{path}: not a safetensors file (header of {size} bytes)")
            try:
                header = json.loads(file.read(size), object_pairs_hook=self._once)
            except ValueError:
                raise UserError(f"{path}: not a safetensors file (its header is not JSON)") from None
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self._entries: dict[str, dict[str, Any]] = header
            self._base = 8 + size
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _once(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        """An object of the header, refusing a name that comes twice (JSON readers keep the last silently)."""
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{self.path}: {twice} occurs twice in the header")
        return found

    def names(self) -> list[str]:
        """Every tensor, in the order of its bytes in the file."""
        return sorted(self._entries, key=lambda name: self._entries[name]["data_offsets"])

    def release(self, name: str) -> None:
        """Give the file's pages up to this tensor's end back to the system: mapped pages count as resident.

        From the file's start, because a fault maps the pages around it too, those of earlier tensors included.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, 0, self._base + self._entries[name]["data_offsets"][1])

    def spec(self, name: str) -> TensorSpec:
        entry = self._entries[name]
        return TensorSpec(name=name, dtype=entry["dtype"], shape=tuple(entry["shape"]))

    def read(self, name: str) -> NDArray[Any]:
        """The whole tensor, without a copy."""
        entry = self._entries[name]
        if entry["dtype"] not in DTYPES:
            raise UserError(f"{self.path}: {name} has dtype {entry['dtype']}, which is not known here")
        dtype = DTYPES[entry["dtype"]]
        first, end = entry["data_offsets"]
        if self._base + end > len(self._map):
            raise UserError(f"{self.path}: {name} ends beyond the file; the download is incomplete")
        flat = np.frombuffer(self._map, dtype=dtype, count=(end - first) // dtype.itemsize, offset=self._base + first)
        return flat.reshape(entry["shape"])


class Checkpoint:
    """Every tensor of a model folder, whichever of its safetensors files holds it."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.exists():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            files = sorted(p.name for p in folder.glob("*.safetensors"))
        if not files:
            raise UserError(f"{folder}: no safetensors file; give a folder in Hugging Face layout")
        self._files = [SafetensorsFile(folder / name) for name in files]
        self._where: dict[str, SafetensorsFile] = {}
        for file in self._files:
            for name in file.names():
                if name in self._where:
                    raise UserError(f"{folder}: {name} is in both {self._where[name].path.name} and {file.path.name}")
                self._where[name] = file

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def spec(self, name: str) -> TensorSpec:
        return self._file(name).spec(name)

    def read(self, name: str) -> NDArray[Any]:
        """One tensor by name, without a copy."""
        return self._file(name).read(name)

    def release(self, name: str) -> None:
        """Unmap a file's bytes up to the end of this tensor; reading them again maps them again."""
        self._file(name).release(name)

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._where:
            raise UserError(f"the checkpoint holds no tensor {name}")
        return self._where[name]


def write_safetensors(
    path: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> None:
    """A small checkpoint in one call: dtypes are taken from the arrays."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    specs = [TensorSpec(name=n, dtype=names[a.dtype], shape=a.shape) for n, a in tensors.items()]
    with ExitStack() as stack:
        writer = stack.enter_context(SafetensorsWriter(path, specs, metadata))
        for name, array in tensors.items():
            writer.write(name, array)
