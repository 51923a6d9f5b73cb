"""Reductions made by the user: a sum of values that each rank multiplies by a factor of its own first."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from . import arrays
from .abi.enums import ScalarResidence
from .abi.errors import InvalidArgumentError, InvalidUsageError
from .elements import ElementType

if TYPE_CHECKING:
    from .core import Core


_REAL_KINDS = "biufVO"  # V: ml_dtypes' numbers; O: whatever becomes a number, such as a Fraction


class PreMulSum:
    """An ``op`` for one communicator and one dtype, until ``destroy`` or the communicator's end."""

    def __init__(self, comm: Core, scalar: Any, dtype: Any) -> None:
        call = "premul_sum"
        element = arrays.numpy_element(call, "dtype", arrays.numpy_dtype(call, dtype))
        if element.reduces_as is None or "sum" not in element.reductions:
            raise InvalidArgumentError(f"{call}: {element.name} cannot be summed; {element.remedy}")
        self.comm, self._element, self._dtype = comm, element, element.reduces_as
        pointer, residence, self._keep = _scalar(call, scalar, element, comm)
        box = ctypes.c_int()
        code = comm.library.ncclRedOpCreatePreMulSum(
            ctypes.byref(box), pointer, self._dtype, residence, comm.handle
        )
        comm._settle(code, f"{call} (ncclRedOpCreatePreMulSum)")
        self._handle: int | None = box.value
        comm._own(self)

    @property
    def handle(self) -> int:
        """The ``ncclRedOp_t``. InvalidUsageError once destroyed."""
        if self._handle is None:
            raise InvalidUsageError("this premul_sum was destroyed; make a new one with comm.premul_sum(...)")
        return self._handle

    @property
    def factor(self) -> Any:
        """The factor: one element, in host memory or on the GPU. InvalidUsageError once destroyed."""
        assert self.handle is not None
        return self._keep

    def _check_element(self, call: str, element: ElementType) -> None:
        if element.name != self._element.name:
            raise InvalidArgumentError(
                f"{call}: op is a premul_sum of {self._element.name} and the array is {element.name}; "
                f"make one with comm.premul_sum(scalar, {element.name!r})"
            )

    def _check_comm(self, call: str, comm: Core) -> None:
        if comm is not self.comm:
            raise InvalidArgumentError(
                f"{call}: op is a premul_sum of {self.comm!r}; make one with this communicator's premul_sum"
            )

    def _invalidate(self) -> None:
        """Its communicator has ended, and the operation with it."""
        self._handle = None

    def destroy(self) -> None:
        """Free the operation; calls already made with it are not affected. Doing it twice is fine."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self.comm._disown(self)
            self.comm._settle(
                self.comm.library.ncclRedOpDestroy(handle, self.comm.handle), "premul_sum (ncclRedOpDestroy)"
            )

    def __enter__(self) -> PreMulSum:
        return self

    def __exit__(self, *exc: object) -> None:
        self.destroy()

    def __repr__(self) -> str:
        return f"<PreMulSum {self._element.name}{' destroyed' if self._handle is None else ''}>"


def _scalar(call: str, scalar: Any, element: ElementType, comm: Core) -> tuple[int, ScalarResidence, Any]:
    """Where the factor lies: in host memory, read now; or on the GPU, read when the collective runs."""
    if comm.on_gpu and hasattr(scalar, "__cuda_array_interface__"):
        buffer = arrays.view(call, "scalar", scalar)
        if buffer.count != 1 or buffer.element.name != element.name:
            raise InvalidArgumentError(f"{call}: scalar on the GPU must be one {element.name}, not {buffer}")
        return buffer.address, ScalarResidence.DEVICE, buffer.keep
    value = np.asarray(scalar)
    if value.size != 1 or value.dtype.kind not in _REAL_KINDS:
        raise InvalidArgumentError(f"{call}: scalar={scalar!r} must be one real number")
    value = value.reshape(1)
    # The factor of a complex sum multiplies both parts, so it is a float of half the size.
    name = {"complex64": "float32", "complex128": "float64"}.get(element.name, element.name)
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # judged below
            held = value.astype(arrays.numpy_dtype(call, name))
        exact = float(value[0])
    except (
        TypeError,
        ValueError,
        OverflowError,
    ) as error:  # an object that is no number, or beyond all floats
        raise InvalidArgumentError(
            f"{call}: scalar={scalar!r} must be one real number that fits {element.name} ({error})"
        ) from error
    if held.dtype.kind in "iu" and held[0] != value[0]:
        raise InvalidArgumentError(
            f"{call}: scalar={scalar!r} is not a whole number that fits {element.name}"
        )
    if math.isfinite(exact) and not math.isfinite(float(held[0])):
        raise InvalidArgumentError(f"{call}: scalar={scalar!r} is too large for {element.name}")
    return held.ctypes.data, ScalarResidence.HOST_IMMEDIATE, held
