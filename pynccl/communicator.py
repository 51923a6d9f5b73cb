"""The Communicator: its parts put together, and the two ways to make one from nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from .abi.errors import InvalidArgumentError, InvalidUsageError
from .abi.library import Library, load
from .config import UniqueId
from .core import Config
from .derive import Derivation
from .memory import OneSided
from .objects import Objects
from .operations import check_rank, integer
from .threadstate import current


class Communicator(Objects, OneSided, Derivation):
    """A rank's end of a group of ranks that communicate. Every rank makes the same calls, in the same order.

    Made by ``pynccl.init()`` where a launcher started the ranks. Use it in a ``with`` block, or end it by
    ``destroy`` (after errors: ``abort``). One thread at a time may use it.

    Parameters
    ----------
    nranks, unique_id, rank
        How many ranks there are, the UniqueId that one of them made, and which one this is.
    config
        Fields of NCCL's ``ncclConfig_t`` by name, for example ``{"blocking": False, "maxCTAs": 8}``.
    library
        "nccl", "host", a path, or a loaded Library; None: ``PYNCCL_LIBRARY``, else automatic. The same on
        every rank.
    timeout
        Seconds after which waiting for other ranks is an NcclTimeoutError. None: ``PYNCCL_TIMEOUT``, else 600
        on the host library and no limit on NCCL. On NCCL it covers making communicators and starting calls
        (they are non-blocking underneath), not the work on the GPU.
    name
        Appears in messages, and in NCCL's logs.
    selection
        A table of ``pynccl.collectives.tune``, or its file: which algorithm for which size, for calls that
        name none (prepared ones on a GPU, and communicators split from this one, keep the library's own). The
        same on every rank. InvalidUsageError for one made with other ranks, hosts, or another library.

    Attributes
    ----------
    rank, size
        This rank, from 0, and how many there are. (Made in a group or non-blocking, a communicator that comes
        from another one learns them when it is made: -1 and 0 until then.)
    name
        As given.
    library
        The loaded Library: its ``kind`` is "host" or "nccl"; ``path``, ``version_string``.
    on_gpu
        Whether calls take arrays in GPU memory.
    device
        The CUDA device, None in host memory.
    handle, closed
        The ``ncclComm_t``; whether it was ended.

    Common to all calls
    -------------------
    Arrays are of any library (NumPy, CuPy, PyTorch, DLPack, ``__cuda_array_interface__``), contiguous, and
    never copied or cast.

    ``stream`` is where the call runs: in host memory a ``pynccl.Stream``, or None, to return when it is done;
    on a GPU None means the array library's current stream.

    ``algorithm`` allows only one of NCCL's algorithms, or some: "ring", "tree,ring", all but one: "^nvls".
    It needs NCCL 2.31, and is the same on every rank. The host library has no such choice: it refuses these
    names. Any library takes the algorithms of ``pynccl.collectives``: "pynccl:ring", or a schedule; then
    ``op`` may also be a ufunc, an elementwise kernel, or a function of two arrays.
    """

    def __init__(
        self,
        nranks: int,
        unique_id: UniqueId | bytes,
        rank: int,
        *,
        config: Config = None,
        library: str | Library | None = None,
        timeout: float | None = None,
        name: str | None = None,
        selection: Any = None,
    ) -> None:
        nranks = integer("Communicator", "nranks", nranks, 1)
        rank = check_rank("Communicator", "rank", rank, nranks)
        uid = unique_id if isinstance(unique_id, UniqueId) else UniqueId.from_bytes(unique_id)
        self._begin(load(library), rank, nranks, timeout, name, config)
        lib, packed, given = self.library, uid._as_struct(), self._config
        table = None if selection is None else self._load_selection(selection)

        def make(box: Any) -> int:
            if given is None:
                return lib.ncclCommInitRank(box, nranks, packed, rank)
            return lib.ncclCommInitRankConfig(box, nranks, packed, rank, ctypes.byref(given))

        function = "ncclCommInitRank" if given is None else "ncclCommInitRankConfig"
        self._create(f"Communicator ({function})", make)
        if table is not None:
            self._select(table)

    def _load_selection(self, selection: Any) -> Any:
        from .collectives.tune import load as load_table  # only those who use tables pay for it

        if current.group is not None or not (self._blocking or self._waits_by_itself):
            self._end("never made: selection= was refused")
            raise InvalidUsageError(
                "Communicator: selection= is compared between the ranks at once; make the communicator "
                "blocking, and outside pynccl.group()"
            )
        try:
            table = load_table(selection)
            if table.size != self.size:
                raise InvalidUsageError(
                    f"Communicator: the selection table was made with {table.size} ranks and there are "
                    f"{self.size}; make one with pynccl.collectives.tune.tune(comm)"
                )
        except BaseException:
            self._end("never made: selection= was refused")
            raise
        return table

    def _select(self, table: Any) -> None:
        """Use the table from now on; the communicator ends if it does not hold here."""
        try:
            table.check(self)
        except InvalidUsageError:
            self.destroy()  # on every rank
            raise
        except BaseException:
            self.abort()
            raise
        self._selection = table
        self._open_quick_path()

    @classmethod
    def init_all(
        cls,
        n: int,
        *,
        devices: Sequence[int] | None = None,
        library: str | Library | None = None,
        timeout: float | None = None,
        name: str | None = None,
    ) -> list[Communicator]:
        """``n`` communicators of one clique, all in this process (``ncclCommInitAll``); element r is rank r.

        ``devices`` are the GPUs (None: 0 to n-1). One thread drives them all inside ``pynccl.group()``, or n
        threads take one each.
        """
        call = "Communicator.init_all (ncclCommInitAll)"
        n = integer("Communicator.init_all", "n", n, 1)
        if devices is not None and len(devices) != n:
            raise InvalidArgumentError(f"{call}: {len(devices)} devices for {n} ranks; give one for each")
        if current.group is not None:
            raise InvalidUsageError(f"{call}: it is a group of its own; call it outside pynccl.group()")
        ordinals = None
        if devices is not None:
            ordinals = (ctypes.c_int * n)(*(integer(call, "each device", device, 0) for device in devices))
        lib = load(library)
        comms = [cls.__new__(cls) for _ in range(n)]
        for rank, comm in enumerate(comms):
            comm._begin(lib, rank, n, timeout, name, None)
        handles = (ctypes.c_void_p * n)()
        try:
            with comms[0]._deadline():
                code = lib.ncclCommInitAll(handles, n, ordinals)
            if code:
                comms[0]._fail(code, call)
        except BaseException:
            for comm in comms:
                comm._not_made()
            raise
        for comm, handle in zip(comms, handles, strict=True):
            comm._box.value = handle
            comm._made(0)
        return comms
