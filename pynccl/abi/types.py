"""The C structures of NCCL's header, with their initialisers.

Owned here: layout, initial values, and what may be set. One row of ``Field`` a member; the ctypes layout, the
initialiser, the checks and the coverage page derive from the rows. Enums and constants come from ``enums.py``
and are re-exported. Nothing here loads or calls a library.

A zeroed configuration is *not* the default one (``blocking = 0`` asks for non-blocking calls), so the
versioned structures are made by ``initializer()``::

    config = ncclConfig_t.initializer(blocking=0, commName="data-parallel")
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

from pynccl.abi.enums import (
    CONSTANTS,
    ENUMS,
    NCCL_API_MAGIC,
    NCCL_CONFIG_UNDEF_INT,
    NCCL_CONFIG_UNDEF_PTR,
    NCCL_UNDEF_FLOAT,
    NCCL_UNIQUE_ID_BYTES,
    NCCL_VERSION_CODE,
    CommMemStat,
    DataType,
    EncryptionMode,
    HostCftMode,
    NvlsHostMode,
    RedOp,
    Result,
    ScalarResidence,
)

__all__ = [
    "CONSTANTS",
    "C_TYPES",
    "ENUMS",
    "STRUCTS",
    "CommMemStat",
    "DataType",
    "EncryptionMode",
    "Field",
    "HostCftMode",
    "NvlsHostMode",
    "RedOp",
    "Result",
    "ScalarResidence",
    "Versioned",
    "ncclCollConfig_t",
    "ncclConfigExt_t",
    "ncclConfig_t",
    "ncclEncryptionConfig_t",
    "ncclSimInfo_t",
    "ncclUniqueId",
    "ncclWaitSignalDesc_t",
    "pyncclHostFn_t",
    "pyncclInterruptCheck_t",
    "pyncclArrayCall_t",
    "pyncclCall_t",
    "pyncclPython_t",
    "pyncclElement_t",
    "pyncclLayout_t",
    "pyncclSchedule_t",
]

UNSET, NULL = NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_PTR
SIM_INFO_MAGIC = 0x74685283


class Field(NamedTuple):
    """One member of a C structure: its declaration, ctypes type, initial value, first release and meaning."""

    name: str
    c_type: str
    ctype: Any
    initial: int | float | None
    since: str
    meaning: str


def _layout(fields: Sequence[Field]) -> list[tuple[str, Any]]:
    return [(field.name, field.ctype) for field in fields]


def _header(magic: int, since: str) -> tuple[Field, ...]:
    """The three members that open every versioned structure. ``initial`` of ``size`` is filled in with the
    sizeof.

    ``version`` is the release whose layout is sent, never that of the loaded library: releases reused
    padding, so two layouts can have one size, and only ``version`` tells a library which of them it was
    given.
    """
    return (
        Field("size", "size_t", ctypes.c_size_t, None, since, "bytes of this structure"),
        Field("magic", "unsigned int", ctypes.c_uint, magic, since, "marks an initialised structure"),
        Field("version", "unsigned int", ctypes.c_uint, NCCL_VERSION_CODE, since, "release of this layout"),
    )


def _int(name: str, since: str, meaning: str, initial: int = UNSET) -> Field:
    return Field(name, "int", ctypes.c_int, initial, since, meaning)


def _text(name: str, since: str, meaning: str) -> Field:
    return Field(name, "const char*", ctypes.c_char_p, NULL, since, meaning)


class ncclUniqueId(ctypes.Structure):
    """The 128 bytes that name a communicator before it exists; passed *by value*.

    The field is an array of unsigned bytes: a ``c_char`` array would read back cut at its first NUL.
    """

    _fields_ = [("internal", ctypes.c_ubyte * NCCL_UNIQUE_ID_BYTES)]


V = TypeVar("V", bound="Versioned")


class Versioned(ctypes.Structure):
    """A structure that carries its size, magic and version, so that libraries of other ages understand it."""

    FIELDS: ClassVar[tuple[Field, ...]] = ()
    INITIALIZER: ClassVar[str] = ""  # the C macro that this class's ``initializer()`` equals byte for byte

    @classmethod
    def initializer(cls: type[V], **fields: Any) -> V:
        """A structure as the C initialiser macro makes it, with ``fields`` set.

        Members that are left out, or given as None, stay at the library's default. Text is encoded as UTF-8
        and kept alive by the structure, which itself must outlive the call it is passed to.

        Raises TypeError for a member that does not exist or a value of the wrong type, ValueError for a
        number that does not fit the member or text with a NUL in it.
        """
        made = cls()
        for field in cls.FIELDS:
            setattr(made, field.name, ctypes.sizeof(cls) if field.name == "size" else field.initial)
        settable = {field.name: field for field in cls.FIELDS[3:]}
        for name, value in fields.items():
            if name not in settable:
                raise TypeError(
                    f"{cls.__name__} has no field {name!r} to set; the fields are {', '.join(settable)}"
                )
            if value is not None:
                setattr(made, name, _checked(cls.__name__, settable[name], value))
        return made

    def __repr__(self) -> str:
        shown = [
            # A key must not reach a log by way of a traceback.
            f"{field.name}={'...' if field.name == 'psk' else repr(value)}"
            for field in self.FIELDS[3:]
            if (value := getattr(self, field.name)) != field.initial and (field.initial is not NULL or value)
        ]
        return f"{type(self).__name__}.initializer({', '.join(shown)})"


def _checked(owner: str, field: Field, value: Any) -> Any:
    """``value`` as the member takes it. ctypes alone would wrap numbers and cut text without a word."""
    where = f"{owner}.{field.name} ({field.c_type})"
    if field.ctype is ctypes.c_char_p:
        if not isinstance(value, (str, bytes)):
            raise TypeError(f"{where}: {value!r} is not text; pass str or bytes")
        encoded = value.encode() if isinstance(value, str) else value
        if b"\0" in encoded:
            raise ValueError(f"{where}: {value!r} contains a NUL, where C would cut it; remove it")
        return encoded
    if field.ctype in _RANGES:
        try:
            number = value.__index__()
        except AttributeError:
            raise TypeError(f"{where}: {value!r} is not an integer") from None
        low, high = _RANGES[field.ctype]
        if not low <= number <= high:
            raise ValueError(f"{where}: {value!r} does not fit; pass a value from {low} to {high}")
        return number
    if isinstance(value, ctypes.Structure):
        return ctypes.pointer(value)
    return value


_RANGES: Mapping[Any, tuple[int, int]] = {
    ctypes.c_int: (-(2**31), 2**31 - 1),
    ctypes.c_uint64: (0, 2**64 - 1),
}


class ncclConfig_t(Versioned):
    """How a communicator is made: ``ncclCommInitRankConfig``, split, shrink, grow."""

    INITIALIZER = "NCCL_CONFIG_INITIALIZER"
    FIELDS = (
        *_header(NCCL_API_MAGIC, "2.14"),
        _int("blocking", "2.14", "1: a call returns when it is done; 0: it may return in progress. Unset: 1"),
        _int("cgaClusterSize", "2.17", "thread blocks per cluster, 0 to 8"),
        _int("minCTAs", "2.17", "fewest thread blocks (channels) a kernel uses"),
        _int("maxCTAs", "2.17", "most thread blocks (channels) a kernel uses"),
        _text("netName", "2.17", "network module to use, such as 'IB' or 'Socket'"),
        _int("splitShare", "2.18", "1: communicators made by split share the parent's resources"),
        _int("trafficClass", "2.26", "network quality-of-service class"),
        _text("commName", "2.27", "name of the communicator in logs and errors"),
        _int("collnetEnable", "2.27", "1: allow in-network reduction (SHARP)"),
        _int("CTAPolicy", "2.27", "NCCL_CTA_POLICY_* bits"),
        _int("shrinkShare", "2.27", "1: a communicator made by shrink shares the parent's resources"),
        _int("nvlsCTAs", "2.27", "thread blocks that NVLink SHARP kernels use"),
        _int("nChannelsPerNetPeer", "2.28", "channels for each peer reached over the network"),
        _int("nvlinkCentricSched", "2.28", "1: schedule for NVLink first"),
        _int("graphUsageMode", "2.29", "0: no CUDA graphs; 1: one graph at a time; 2: any mix"),
        _int("numRmaCtx", "2.29", "contexts for one-sided calls"),
        _int("maxP2pPeers", "2.30.3", "most peers of point-to-point calls that are set up ahead"),
        _int("graphStreamOrdering", "2.30.7", "1: keep stream order between captured and plain launches"),
        _int("launchOrderImplicit", "2.31", "1: order launches of several communicators implicitly"),
        _int("numRmaSig", "2.31", "signals for each context of one-sided calls"),
        _int("rmaEagerInit", "2.31", "1: set one-sided resources up at init, not at first use"),
        _int("hostCftMode", "2.31.1", "a HostCftMode"),
        _int("nvlsHostMode", "2.32", "NvlsHostMode bits"),
    )
    _fields_ = _layout(FIELDS)


class _ConfigExtKey(ctypes.Structure):
    _fields_ = [("vendorId", ctypes.c_int), ("optionId", ctypes.c_int)]


class _ConfigExtValue(ctypes.Union):
    _fields_ = [("i", ctypes.c_int), ("s", ctypes.c_char_p), ("raw", ctypes.c_void_p)]


class ncclConfigExt_t(ctypes.Structure):
    """One vendor-specific option, linked to the next. NVIDIA's library ignores them all."""


ncclConfigExt_t._fields_ = [
    ("next", ctypes.POINTER(ncclConfigExt_t)),
    ("key", _ConfigExtKey),
    ("val", _ConfigExtValue),
]


class ncclCollConfig_t(Versioned):
    """How one collective runs: the last argument of the ``nccl...Config`` calls. The same on every rank."""

    INITIALIZER = "NCCL_COLLCONFIG_INITIALIZER"
    FIELDS = (
        *_header(NCCL_API_MAGIC, "2.31"),
        Field(
            "ext",
            "ncclConfigExt_t*",
            ctypes.POINTER(ncclConfigExt_t),
            NULL,
            "2.31",
            "vendor-specific options",
        ),
        _int("minCTAs", "2.31", "fewest thread blocks (channels)"),
        _int("maxCTAs", "2.31", "most thread blocks, at most the communicator's maxCTAs"),
        _int("nvlsCTAs", "2.31", "most thread blocks of NVLink SHARP kernels"),
        _int("cgaClusterSize", "2.31", "thread blocks per cluster; one value for a whole group"),
        _text("algSelection", "2.31", "algorithms allowed: 'ring', 'tree,ring', '^nvls'. Unset: automatic"),
        _int("forceAlgSelection", "2.31", "1: a selection that cannot be met is an error", initial=1),
        _int("CTAPolicy", "2.31", "NCCL_CTA_POLICY_* bits. Unset: the communicator's"),
        Field(
            "userProfilerTag",
            "uint64_t",
            ctypes.c_uint64,
            0,
            "2.31",
            "passed to profiler plugins; keep bit 63 clear",
        ),
        Field(
            "launchCompletionEvent",
            "cudaEvent_t",
            ctypes.c_void_p,
            NULL,
            "2.32",
            "CUDA event recorded when the kernel has been launched",
        ),
    )
    _fields_ = _layout(FIELDS)


class ncclSimInfo_t(Versioned):
    """What ``ncclGroupSimulateEnd`` fills in. Its magic differs from that of the configurations."""

    INITIALIZER = "NCCL_SIM_INFO_INITIALIZER"
    FIELDS = (
        *_header(SIM_INFO_MAGIC, "2.22"),
        Field(
            "estimatedTime", "float", ctypes.c_float, NCCL_UNDEF_FLOAT, "2.22", "microseconds; -1: unknown"
        ),
    )
    _fields_ = _layout(FIELDS)


class ncclEncryptionConfig_t(Versioned):
    """Encryption of NCCL's TCP sockets, for ``ncclSetEncryption``."""

    INITIALIZER = "NCCL_ENCRYPTION_CONFIG_INITIALIZER"
    FIELDS = (
        *_header(NCCL_API_MAGIC, "2.32"),
        _int("mode", "2.32", "an EncryptionMode", initial=EncryptionMode.NONE),
        _text("psk", "2.32", "the pre-shared key"),
    )
    _fields_ = _layout(FIELDS)


class ncclWaitSignalDesc_t(ctypes.Structure):
    """How many signals ``ncclWaitSignal`` waits for, and from whom: (opCnt, peer, sigIdx, ctx)."""

    _fields_ = [
        ("opCnt", ctypes.c_int),
        ("peer", ctypes.c_int),
        ("sigIdx", ctypes.c_int),
        ("ctx", ctypes.c_int),
    ]


#: C name -> ctypes class, for every structure that the header defines.
STRUCTS: Mapping[str, type[ctypes.Structure]] = {
    "ncclUniqueId": ncclUniqueId,
    "ncclConfig_t": ncclConfig_t,
    "ncclConfigExt_t": ncclConfigExt_t,
    "ncclCollConfig_t": ncclCollConfig_t,
    "ncclSimInfo_t": ncclSimInfo_t,
    "ncclWaitSignalDesc_t": ncclWaitSignalDesc_t,
    "ncclEncryptionConfig_t": ncclEncryptionConfig_t,
}

#: The function a host stream calls, ``pyncclStreamLaunchHostFunc``. Keep the object alive until it has run.
pyncclHostFn_t = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

#: What a slow wait of the host library asks: anything but 0 ends the waiting call. Keep the object alive.
pyncclInterruptCheck_t = ctypes.CFUNCTYPE(ctypes.c_int)


class pyncclCall_t(ctypes.Structure):
    """A collective as a record; ``nccl_abi.h`` says what the members mean."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        *((name, ctypes.c_int) for name in ("kind", "dtype", "op", "root")),
        ("send", ctypes.c_void_p),
        ("recv", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("comm", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    ]


class pyncclLayout_t(ctypes.Structure):
    """Where in an array object its parts lie; ``nccl_abi.h`` says what the members mean."""

    _fields_ = [
        *((f"{name}_at", ctypes.c_int) for name in ("type", "data", "axes", "shape", "element", "flags")),
        ("flags", ctypes.c_int),
        ("type", ctypes.c_void_p),
        ("none", ctypes.c_void_p),
    ]


class pyncclElement_t(ctypes.Structure):
    """A kind of array elements that a call takes; ``nccl_abi.h`` says what the members mean."""

    _fields_ = [
        ("tag", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        *((name, ctypes.c_int) for name in ("dtype", "lanes", "op")),
    ]


class pyncclArrayCall_t(ctypes.Structure):
    """A collective on array objects, as a record; ``nccl_abi.h`` says what the members mean."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("layout", ctypes.POINTER(pyncclLayout_t)),
        ("elements", ctypes.POINTER(pyncclElement_t)),
        *((name, ctypes.c_int) for name in ("nelements", "kind", "root", "rank", "nranks")),
        ("comm", ctypes.c_void_p),
    ]


class pyncclPython_t(ctypes.Structure):
    """Functions of Python's C interface, by address; ``nccl_abi.h`` says what for."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        *((f"PyEval_{name}Thread", ctypes.c_void_p) for name in ("Save", "Restore")),
        *((name, ctypes.c_void_p) for name in ("PyLong_FromLong", "PyLong_AsVoidPtr", "PyCFunction_NewEx")),
    ]


class pyncclSchedule_t(ctypes.Structure):
    """One rank's part of a schedule for the host library; ``nccl_abi.h`` says what the members mean."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("fingerprint", ctypes.c_uint),
        *((name, ctypes.c_int) for name in ("nranks", "rank", "parts", "in_blocks", "out_blocks")),
        *(
            (name, ctypes.c_int)
            for name in ("in_root", "out_root", "scratch_chunks", "sends_in", "sends_out")
        ),
        *((name, ctypes.c_int) for name in ("most_rounds", "most_apart", "nrounds", "nsends", "nexposed")),
        *((name, ctypes.c_int) for name in ("apart_chunks", "most_receives")),
        *((name, ctypes.c_void_p) for name in ("steps", "rounds", "sends", "exposed", "to", "from_")),
    ]


_handle = ctypes.c_void_p
#: C type, without ``const`` -> ctypes type; the functions' argtypes are looked up here.
#: Pointers to data are plain addresses; pointers to results are typed, so a wrong ``byref`` is a TypeError.
C_TYPES: Mapping[str, Any] = {
    "void": None,
    "char*": ctypes.c_char_p,
    "char**": ctypes.POINTER(ctypes.c_char_p),
    "char***": ctypes.POINTER(ctypes.POINTER(ctypes.c_char_p)),
    "double": ctypes.c_double,
    "int": ctypes.c_int,
    "int*": ctypes.POINTER(ctypes.c_int),
    "size_t": ctypes.c_size_t,
    "unsigned int": ctypes.c_uint,
    "void*": ctypes.c_void_p,
    "void**": ctypes.POINTER(ctypes.c_void_p),
    **{
        f"{kind}{bits}_t*": ctypes.POINTER(getattr(ctypes, f"c_{kind}{bits}"))
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
    "cudaStream_t": _handle,
    "ncclComm_t": _handle,
    "ncclComm_t*": ctypes.POINTER(_handle),
    "ncclWindow_t": _handle,
    "ncclWindow_t*": ctypes.POINTER(_handle),
    "ncclParamHandle_t": _handle,
    "ncclParamHandle_t*": ctypes.POINTER(_handle),
    "ncclResult_t": ctypes.c_int,
    "ncclResult_t*": ctypes.POINTER(ctypes.c_int),
    "ncclDataType_t": ctypes.c_int,
    "ncclRedOp_t": ctypes.c_int,
    "ncclRedOp_t*": ctypes.POINTER(ctypes.c_int),
    "ncclScalarResidence_t": ctypes.c_int,
    "ncclCommMemStat_t": ctypes.c_int,
    "ncclUniqueId": ncclUniqueId,
    **{f"{name}*": ctypes.POINTER(struct) for name, struct in STRUCTS.items()},
    "pyncclHostFn_t": pyncclHostFn_t,
    "pyncclInterruptCheck_t": pyncclInterruptCheck_t,
    "pyncclCall_t*": ctypes.POINTER(pyncclCall_t),
    "pyncclPython_t*": ctypes.POINTER(pyncclPython_t),
    "pyncclSchedule_t*": ctypes.POINTER(pyncclSchedule_t),
}
