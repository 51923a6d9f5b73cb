"""What counts as an array, and what a collective makes of it; no communicator is needed for any of it."""

from __future__ import annotations

import array
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pynccl import InvalidArgumentError, ReduceOp, arrays, dlpack
from pynccl.abi.enums import DataType, RedOp
from pynccl.elements import ELEMENTS, operation_name
from pynccl.operations import OPERATIONS, Place, Plan, check_rank, plan, plan_message

HOST = Place(rank=1, size=4, on_gpu=False, device=None)
ROOT_IS_ME, ROOT_IS_OTHER = 1, 0


def on_host(name: str, x: Any, out: Any = None, op: Any = "sum", root: int = ROOT_IS_ME) -> Plan:
    return plan(OPERATIONS[name], x, out, op, root, HOST)


def refused(name: str, x: Any, out: Any = None, op: Any = "sum", root: int = ROOT_IS_ME) -> str:
    with pytest.raises((InvalidArgumentError, TypeError)) as caught:
        on_host(name, x, out, op, root)
    text = str(caught.value)
    assert text.startswith(f"{name}: "), text
    return text


# --- element types ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "code"),
    [
        (np.int8, DataType.INT8),
        (np.uint8, DataType.UINT8),
        (np.int32, DataType.INT32),
        (np.uint32, DataType.UINT32),
        (np.int64, DataType.INT64),
        (np.uint64, DataType.UINT64),
        (np.float16, DataType.FLOAT16),
        (np.float32, DataType.FLOAT32),
        (np.float64, DataType.FLOAT64),
        (ml_dtypes.bfloat16, DataType.BFLOAT16),
        (ml_dtypes.float8_e4m3fn, DataType.FLOAT8E4M3),
        (ml_dtypes.float8_e5m2, DataType.FLOAT8E5M2),
    ],
)
def test_each_type_that_nccl_has_is_sent_and_reduced_as_itself(dtype: Any, code: DataType) -> None:
    x = np.zeros(6, dtype)
    for name in ("all_reduce", "all_gather"):
        planned = on_host(name, x)
        assert (planned.dtype, planned.elements) == (code, 6)


def test_booleans_reduce_as_bytes_where_that_is_and_or_or() -> None:
    x = np.zeros(3, bool)
    assert [on_host("all_reduce", x, op=op).op for op in ("max", "min", "prod")] == [
        RedOp.MAX,
        RedOp.MIN,
        RedOp.MIN,
    ]
    for op in ("sum", "avg"):
        assert "use op='max' (any)" in refused("all_reduce", x, op=op)


def test_complex_numbers_reduce_as_pairs_of_floats_where_that_is_right() -> None:
    planned = on_host("all_reduce", np.zeros(3, "c16"))
    assert (planned.dtype, planned.elements, planned.op) == (DataType.FLOAT64, 6, RedOp.SUM)
    for op in ("prod", "max", "min"):
        assert "'sum' and 'avg' only" in refused("all_reduce", np.zeros(3, "c8"), op=op)


@pytest.mark.parametrize("dtype", ["i2", "u2", ">f4", "M8[s]", "S3", "V5", "f4,i2", ml_dtypes.int4])
def test_other_types_move_as_bytes_and_are_not_reduced(dtype: Any) -> None:
    x = np.zeros(4, dtype)
    planned = on_host("all_to_all", x)
    assert (planned.dtype, planned.elements) == (DataType.UINT8, x.dtype.itemsize)
    assert planned.result.dtype == x.dtype
    assert "is not possible for" in refused("all_reduce", x)


def test_16_bit_integers_are_not_reduced_and_the_error_names_what_to_do() -> None:
    assert "x.astype('int32')" in refused("reduce_scatter", np.zeros(4, "i2"))


def test_arrays_of_python_objects_are_refused_even_when_only_moved() -> None:
    assert "broadcast_object" in refused("broadcast", np.array([None, 1]))
    assert "broadcast_object" in refused("broadcast", np.zeros(2, [("a", "f4"), ("b", "O")]))


def test_a_reduction_is_named_by_text_by_enum_and_by_the_abis_enum() -> None:
    assert {operation_name("c", op) for op in ("max", ReduceOp.MAX, RedOp.MAX)} == {"max"}
    with pytest.raises(
        InvalidArgumentError, match="op='median' is not a reduction; use one of sum, prod, max, min, avg"
    ):
        operation_name("c", "median")
    with pytest.raises(TypeError, match="not int"):
        operation_name("c", 0)


def test_the_table_of_elements_agrees_with_the_array_libraries_on_sizes() -> None:
    for name, element in ELEMENTS.items():
        dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
        assert dtype.itemsize == element.itemsize
        if element.reduces_as is not None:
            widths = {DataType.FLOAT32: 4, DataType.FLOAT64: 8, DataType.UINT8: 1}
            assert element.reduce_lanes * widths.get(element.reduces_as, element.itemsize) == element.itemsize


# --- what is an array ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [[1, 2], (1.0,), 3.5, "text", None, object(), {1: 2}])
def test_what_is_no_array_is_refused_with_the_way_to_make_one(x: Any) -> None:
    with pytest.raises(TypeError, match=r"x must be an array .*np.asarray\(x\)|x is None"):
        on_host("all_reduce", x)


def test_numpy_scalars_are_refused_because_they_cannot_be_written() -> None:
    assert "np.array(x)" in refused("all_reduce", np.float32(1))


def test_masked_arrays_are_refused_because_the_mask_would_be_lost() -> None:
    assert ".filled(value)" in refused("all_reduce", np.ma.masked_array([1.0, 2.0], [True, False]))


@pytest.mark.parametrize("make", [bytearray, memoryview, lambda b: array.array("B", b)])
def test_writable_buffers_of_the_standard_library_are_arrays(make: Any) -> None:
    buffer = make(bytearray(b"abcdefgh"))
    planned = on_host("broadcast", buffer)
    assert planned.result is buffer
    assert (planned.elements, planned.dtype) == (8, DataType.UINT8)
    assert planned.send == planned.recv == np.asarray(memoryview(buffer)).ctypes.data


def test_bytes_can_be_sent_and_not_received_into() -> None:
    assert plan_message("send", b"abc", HOST, writes=False).elements == 3
    with pytest.raises(InvalidArgumentError, match="recv: x .* cannot be written"):
        plan_message("recv", b"abc", HOST, writes=True)


class OnlyDlpack:
    """An array that shows nothing but DLPack, of the version the test wants."""

    def __init__(self, base: np.ndarray, *, versioned: bool = True) -> None:
        self.base, self.versioned = base, versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.base.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        if self.versioned:
            return self.base.__dlpack__(**options)
        if options:
            raise TypeError("an exporter from before DLPack 1.0 takes no max_version")
        return self.base.__dlpack__()


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack_exporters_are_used_in_place(versioned: bool) -> None:
    base = np.arange(12, dtype="f4").reshape(3, 4)[1:]
    planned = on_host("all_reduce", OnlyDlpack(base, versioned=versioned))
    assert (planned.send, planned.elements, planned.dtype) == (base.ctypes.data, 8, DataType.FLOAT32)


def test_the_order_of_a_dlpack_array_is_read_from_its_strides() -> None:
    base = np.zeros((4, 6))
    fortran = arrays.view("call", "x", OnlyDlpack(base.T))
    assert (fortran.c_order, fortran.f_order, fortran.shape) == (False, True, (6, 4))
    assert "not contiguous" in refused("all_reduce", OnlyDlpack(base[:, ::2]))


@pytest.mark.parametrize("dtype", ["b1", "i1", "i2", "u8", "f2", "f8", "c8", "c16"])
def test_dlpack_types_are_recognised(dtype: str) -> None:
    assert dlpack.read("call", "x", np.zeros(2, dtype)).dtype == np.dtype(dtype).name


def test_the_default_output_for_a_dlpack_array_is_a_numpy_array() -> None:
    made = on_host("all_gather", OnlyDlpack(np.zeros((2, 3), "f4"))).result
    assert type(made) is np.ndarray
    assert (made.shape, made.dtype) == ((8, 3), np.float32)


def test_a_read_only_dlpack_array_is_refused_as_an_output() -> None:
    base = np.zeros(4)
    base.flags.writeable = False
    assert "its exporter says read-only" in refused("all_reduce", OnlyDlpack(base))


class OnGpu:
    """Says that it is on a GPU; CUDA is not there to be asked."""

    __cuda_array_interface__ = {"shape": (3,), "typestr": "<f4", "data": (4096, False), "version": 3}


def test_gpu_arrays_are_refused_by_the_host_library_with_the_way_out() -> None:
    text = refused("all_reduce", OnGpu())
    assert "cupy.asnumpy(x)" in text
    assert "library='nccl'" in text


def test_numpy_arrays_are_refused_by_nccl_with_the_way_out() -> None:
    with pytest.raises(InvalidArgumentError, match=r"in host memory .* cupy.asarray\(x\)"):
        plan(OPERATIONS["all_reduce"], np.zeros(3), None, "sum", None, Place(0, 2, True, 0))


# --- shapes, sizes, layouts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "result"),
    [
        ("all_gather", (3, 5), (12, 5)),
        ("all_gather", (), (4,)),
        ("all_gather", (0, 5), (0, 5)),
        ("gather", (3,), (12,)),
        ("reduce_scatter", (8, 5), (2, 5)),
        ("reduce_scatter", (0, 5), (0, 5)),
        ("scatter", (4,), (1,)),
        ("all_to_all", (8, 5), (8, 5)),
    ],
)
def test_the_shape_of_a_default_output(name: str, shape: tuple[int, ...], result: tuple[int, ...]) -> None:
    assert on_host(name, np.zeros(shape, "f4")).result.shape == result


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "reduce"])
def test_without_out_calls_that_keep_the_shape_work_in_place(name: str) -> None:
    x = np.zeros((2, 3))
    planned = on_host(name, x)
    assert planned.result is x
    assert planned.send == planned.recv == x.ctypes.data


@pytest.mark.parametrize("name", ["reduce", "gather"])
def test_off_the_root_nothing_is_returned_and_out_is_not_used(name: str) -> None:
    planned = on_host(name, np.zeros(2), "not looked at", root=ROOT_IS_OTHER)
    assert planned.result is None
    assert planned.recv is None


@pytest.mark.parametrize(("name", "elements"), [("broadcast", 3), ("scatter", 3)])
def test_off_the_root_x_may_be_none_when_there_is_out(name: str, elements: int) -> None:
    out = np.zeros(3)
    planned = on_host(name, None, out, root=ROOT_IS_OTHER)
    assert planned.result is out
    assert planned.elements == elements
    assert "pass out=" in refused(name, None, root=ROOT_IS_OTHER)
    assert "its data is read there" in refused(name, None, out, root=ROOT_IS_ME)


def test_elements_that_do_not_divide_over_the_ranks_say_how_to_pad() -> None:
    assert refused("reduce_scatter", np.zeros(10, "f4")) == (
        "reduce_scatter: 10 elements do not divide over 4 ranks (float32, shape (10,)); "
        "pad to 12 or pass a (4, k) array"
    )


def test_a_first_axis_that_does_not_divide_is_refused_unless_out_says_the_shape() -> None:
    x = np.zeros((2, 6))
    assert "x.reshape(4, -1)" in refused("reduce_scatter", x)
    assert on_host("reduce_scatter", x, np.zeros(3)).elements == 3


@pytest.mark.parametrize(
    ("name", "x", "out"),
    [("all_gather", 3, 13), ("reduce_scatter", 12, 4), ("all_reduce", 3, 4), ("scatter", 4, 2)],
)
def test_an_output_of_the_wrong_size_names_the_right_one(name: str, x: int, out: int) -> None:
    assert re.search(rf"out has {out} elements .* must have \d+", refused(name, np.zeros(x), np.zeros(out)))


def test_nothing_is_cast_between_input_and_output() -> None:
    assert "pass an out of float32" in refused("all_reduce", np.zeros(3, "f4"), np.zeros(3, "f8"))


@pytest.mark.parametrize("name", [*OPERATIONS])
def test_arrays_that_are_not_contiguous_are_refused_with_what_to_do(name: str) -> None:
    assert "np.ascontiguousarray(x)" in refused(name, np.zeros((8, 8))[:, ::2])


def test_fortran_order_is_fine_where_elements_only_meet_their_like() -> None:
    x, out = np.zeros((2, 3), order="F"), np.zeros((2, 3), order="F")
    assert on_host("all_reduce", x, out).elements == 6
    assert "do not list their elements in the same order" in refused("all_reduce", x, np.zeros((2, 3)))
    assert "do not list their elements in the same order" in refused("all_reduce", x, np.zeros(6))


def test_fortran_order_is_refused_where_blocks_must_lie_along_the_first_axis() -> None:
    assert "Fortran order" in refused("all_gather", np.zeros((2, 3), order="F"))


def test_read_only_arrays_may_be_read_and_not_written() -> None:
    x = np.zeros(4)
    x.flags.writeable = False
    assert on_host("all_reduce", x, np.zeros(4)).send == x.ctypes.data
    assert "pass out=" in refused("all_reduce", x)
    assert "pass a writable array" in refused("all_reduce", np.zeros(4), x)


@pytest.mark.parametrize(
    ("name", "x", "out"),
    [
        ("all_reduce", slice(0, 4), slice(0, 4)),
        ("all_gather", slice(4, 8), slice(0, 16)),
        ("reduce_scatter", slice(0, 16), slice(4, 8)),
        ("gather", slice(4, 8), slice(0, 16)),
        ("scatter", slice(0, 16), slice(4, 8)),
        ("all_reduce", slice(0, 4), slice(4, 8)),
        ("all_to_all", slice(0, 4), slice(4, 8)),
    ],
)
def test_in_place_forms_and_neighbours_are_no_overlap(name: str, x: slice, out: slice) -> None:
    memory = np.zeros(16)
    assert on_host(name, memory[x], memory[out]).send == memory[x].ctypes.data


@pytest.mark.parametrize(
    ("name", "x", "out"),
    [
        ("all_reduce", slice(0, 4), slice(2, 6)),
        ("all_gather", slice(0, 4), slice(0, 16)),
        ("all_gather", slice(5, 9), slice(0, 16)),
        ("reduce_scatter", slice(0, 16), slice(0, 4)),
        ("all_to_all", slice(0, 4), slice(0, 4)),
        ("scatter", slice(0, 16), slice(3, 7)),
    ],
)
def test_any_other_overlap_is_refused(name: str, x: slice, out: slice) -> None:
    memory = np.zeros(16)
    assert "overlap" in refused(name, memory[x], memory[out])


def test_an_array_of_no_elements_overlaps_nothing() -> None:
    memory = np.zeros(4)
    assert on_host("all_reduce", memory[2:2], memory[2:2]).elements == 0


@given(
    shape=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    step=st.lists(st.sampled_from([1, 1, 1, 2, -1]), min_size=4, max_size=4),
    order=st.sampled_from("CF"),
)
def test_contiguity_from_strides_is_what_numpy_says(
    shape: tuple[int, ...], step: list[int], order: Any
) -> None:
    x = np.zeros(shape, order=order)[tuple(slice(None, None, n) for n in step[: len(shape)])]
    found = arrays.is_contiguous(x.shape, x.strides, x.itemsize)
    assert found == (x.flags.c_contiguous, x.flags.f_contiguous)


def test_a_rank_is_an_integer_in_range() -> None:
    assert check_rank("c", "root", np.int64(3), 4) == 3
    with pytest.raises(
        InvalidArgumentError, match="c: root=4 is not a rank of this communicator; use 0 to 3"
    ):
        check_rank("c", "root", 4, 4)
    with pytest.raises(InvalidArgumentError, match="root=-1"):
        check_rank("c", "root", -1, 4)
    with pytest.raises(TypeError, match="root must be an integer, not float"):
        check_rank("c", "root", 1.0, 4)
