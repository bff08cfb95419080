"""Laws of the checkpoint files: what is written is read back, by us and by the safetensors library; holes are zeros."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from truegate.errors import UserError
from truegate.law.formats import DTYPES, Checkpoint, SafetensorsFile, SafetensorsWriter, TensorSpec, write_safetensors


def test_parts_written_in_any_order_read_back_and_holes_are_zero(tmp_path):
    path = tmp_path / "model.safetensors"
    specs = [TensorSpec(name="a", dtype="F32", shape=(4, 3)), TensorSpec(name="b", dtype="F32", shape=(2, 2, 5))]
    with SafetensorsWriter(path, specs, {"who": "test"}) as out:
        out.write_at("b", (1, 0, 2), np.array([7.0, 8.0]))
        out.write_rows("a", 2, np.ones((1, 3)))
    want_a, want_b = np.zeros((4, 3)), np.zeros((2, 2, 5))
    want_a[2], want_b[1, 0, 2:4] = 1, [7, 8]
    ours, theirs = SafetensorsFile(path), load_file(path)
    for got in (ours.read("a"), theirs["a"]):
        np.testing.assert_array_equal(got, want_a)
    for got in (ours.read("b"), theirs["b"]):
        np.testing.assert_array_equal(got, want_b)
    assert ours.metadata["who"] == "test"


@pytest.mark.parametrize("name", list(DTYPES))
def test_every_dtype_survives(tmp_path, name):
    values = np.array([[1, 2], [0, 1]]).astype(DTYPES[name])
    write_safetensors(tmp_path / "x.safetensors", {"t": values})
    read = Checkpoint(tmp_path).read("t")
    assert read.dtype == DTYPES[name]
    assert read.tobytes() == values.tobytes()


def test_a_hole_costs_no_disk(tmp_path):
    path = tmp_path / "model.safetensors"
    with SafetensorsWriter(path, [TensorSpec(name="big", dtype="BF16", shape=(1 << 13, 1 << 13))]) as out:
        out.write_at("big", (5, 7), np.array([1.0]))
    assert path.stat().st_size > 1 << 27
    assert path.stat().st_blocks * 512 < 1 << 20
    assert SafetensorsFile(path).read("big")[5, 7] == ml_dtypes.bfloat16(1)


def test_a_write_that_does_not_fit_is_refused(tmp_path):
    with SafetensorsWriter(tmp_path / "m", [TensorSpec(name="a", dtype="F32", shape=(2, 3))]) as out:
        for bad in (
            lambda: out.write("a", np.zeros((3, 2))),
            lambda: out.write_rows("a", 1, np.zeros((2, 3))),
            lambda: out.write_at("a", (0, 2), np.zeros(2)),
        ):
            with pytest.raises(ValueError, match="a: "):
                bad()


@pytest.mark.parametrize("content", [b"", b"hello there", (1 << 40).to_bytes(8, "little") + b"{}"])
def test_files_that_are_no_checkpoints_are_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors"):
        Checkpoint(tmp_path)


def test_a_truncated_file_is_told(tmp_path):
    write_safetensors(tmp_path / "x.safetensors", {"t": np.zeros((8, 8), dtype=np.float32)})
    path = tmp_path / "x.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match="incomplete"):
        Checkpoint(tmp_path).read("t")
