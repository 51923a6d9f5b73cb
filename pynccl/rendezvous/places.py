"""Who this process is in its job, and where the job meets: read from what the launcher set, or from a URL.

Owns the table of launchers. Opens no socket and no file of a meeting.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlencode

from .errors import RendezvousError

PORTS = 8  # where MASTER_PORT may be taken, rank 0 listens on the first free one of this many ports
_OWN_PORTS = range(20000, 30000)  # for launchers that give no port; Linux's ephemeral ones begin at 32768


@dataclasses.dataclass(frozen=True)
class Place:
    """Rank `rank` of `size`, which is `local_rank` of `local_size` on its machine, and meets the others at
    `url`.

    `url` is `tcp://host:port` (with `?ports=8&job=...`: the first free of 8 ports, for this job alone) or
    `file:///path`; it is not used when `size` is 1. `local_rank` and `local_size` are `rank` and `size` when
    the launcher says nothing about machines.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    url: str

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size={self.size}: a job has at least 1 rank")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank={self.rank}: expected 0 to {self.size - 1} in a job of {self.size}")
        if not 0 <= self.local_rank < self.local_size:
            raise ValueError(f"local_rank={self.local_rank}: expected 0 to {self.local_size - 1} here")


@dataclasses.dataclass(frozen=True)
class Launcher:
    """The variables by which one family of launchers tells a process its place; the first one set counts."""

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()  # number of machines
    node_list: tuple[str, ...] = ()  # host names; rank 0 runs on the first
    job: tuple[str, ...] = ()  # what tells two jobs, or two attempts at one, apart
    parent: str = ""  # where no variable does: name of the launcher's process above the ranks of a machine
    chooses_port: bool = False  # no MASTER_PORT is usual: one is derived from the job's name


# The innermost launcher comes first: torchrun inside srun, mpirun inside a Slurm allocation.
LAUNCHERS = (
    Launcher(
        name="torchrun or pynccl.launch",
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        job=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ),
    Launcher(
        name="Open MPI",
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        chooses_port=True,
    ),
    Launcher(
        name="MPICH (PMI)",
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
        job=("PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID"),
        parent="hydra_pmi_proxy",
        chooses_port=True,
    ),
    Launcher(
        name="Slurm",
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        node_list=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        chooses_port=True,
    ),
)


def find_place(url: str | None = None, *, rank: int | None = None, size: int | None = None) -> Place:
    """The place for `pynccl.init(url, rank=, size=)`: what is given counts, the environment says the rest.

    `url` None, "env" or "env://" takes the meeting place from the environment as well.
    Raises RendezvousError if something is neither given nor in the environment, ValueError on a bad value.
    """
    if url in ("env", "env://"):
        url = None
    if url is not None and rank is not None and size is not None:
        return Place(rank, size, rank, size, url)
    launcher = find_launcher()
    if launcher is None and (url, rank, size) != (None, None, None):
        raise RendezvousError(
            f"init: url={url!r}, rank={rank}, size={size}: with no launcher's environment, give all three"
        )
    place = place_from_environment() if url is None else _place(launcher, os.environ, url)
    if rank not in (None, place.rank) or size not in (None, place.size):
        raise RendezvousError(
            f"init: rank={rank}, size={size} given, but the environment says rank {place.rank} of "
            f"{place.size}; leave both out, or give a url as well"
        )
    return place


def place_from_environment(environ: Mapping[str, str] = os.environ) -> Place:
    """This process's place as its launcher set it; with no launcher, the only rank of a job of 1.

    Known launchers: `LAUNCHERS`. Raises RendezvousError naming the variable that is missing or wrong.
    """
    return _place(find_launcher(environ), environ, None)


def find_launcher(environ: Mapping[str, str] = os.environ) -> Launcher | None:
    """The launcher whose variables are set; None if there is none. A rank with no size is an error."""
    half_set = []
    for launcher in LAUNCHERS:
        rank, size = _first(launcher.rank, environ), _first(launcher.size, environ)
        if rank is not None and size is not None:
            return launcher
        if rank is not None:
            half_set.append((rank, " or ".join(launcher.size)))
    if half_set:
        (variable, _), absent = half_set[0]
        raise RendezvousError(f"environment: {variable} is set but {absent} is not; set both, or neither")
    return None


def _place(launcher: Launcher | None, environ: Mapping[str, str], url: str | None) -> Place:
    if launcher is None:
        return Place(0, 1, 0, 1, url or "")
    rank, size = _whole(launcher.rank, environ), _whole(launcher.size, environ)
    assert rank is not None and size is not None  # find_launcher saw both
    local_rank, local_size = _whole(launcher.local_rank, environ), _whole(launcher.local_size, environ)
    if local_size is None and _whole(launcher.nodes, environ) == 1:
        local_size = size
    if url is None:
        url = "" if size == 1 else _url(launcher, environ, one_machine=local_size == size)
    try:
        return Place(
            rank,
            size,
            rank if local_rank is None else local_rank,
            size if local_size is None else local_size,
            url,
        )
    except ValueError as error:
        raise RendezvousError(f"environment of {launcher.name}: {error}") from error


def _url(launcher: Launcher, environ: Mapping[str, str], *, one_machine: bool) -> str:
    job = _job(launcher, environ, one_machine=one_machine)
    host = "127.0.0.1" if one_machine else _master_address(launcher, environ)
    port, ports = _ports(launcher, environ, job)
    query = urlencode([pair for pair in (("ports", ports), ("job", job)) if pair[1] not in (1, "")])
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}{'?' if query else ''}{query}"


def _master_address(launcher: Launcher, environ: Mapping[str, str]) -> str:
    address = environ.get("MASTER_ADDR", "").strip("[]")
    if address:
        return address
    nodes = _first(launcher.node_list, environ)
    if nodes is not None:
        return first_host(nodes[1])
    raise RendezvousError(
        f"environment of {launcher.name}: MASTER_ADDR is not set and the ranks may be on several machines; "
        "set it to rank 0's host on every rank (127.0.0.1 on one machine; mpirun has -x or -genv for this)"
    )


def _ports(launcher: Launcher, environ: Mapping[str, str], job: str) -> tuple[int, int]:
    own = _whole(("PYNCCL_PORT",), environ)
    if own is not None:
        return _port("PYNCCL_PORT", own), 1
    master = _whole(("MASTER_PORT",), environ)
    if master is not None:
        # torchrun's agent listens on MASTER_PORT itself for as long as the job lives.
        first = _port("MASTER_PORT", master) + (environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
        if first > 65535:
            raise RendezvousError(f"MASTER_PORT={master} is torchrun's and the last one; set PYNCCL_PORT")
        return first, min(PORTS, 65536 - first)
    if launcher.chooses_port:
        digest = hashlib.sha256(f"{os.getuid()} {job}".encode()).digest()
        return _OWN_PORTS[int.from_bytes(digest[:8], "big") % (len(_OWN_PORTS) - PORTS)], PORTS
    raise RendezvousError(
        f"environment of {launcher.name}: MASTER_PORT is not set; set the same free port on every rank"
    )


def _job(launcher: Launcher, environ: Mapping[str, str], *, one_machine: bool) -> str:
    parts = [environ[name] for name in launcher.job if environ.get(name)]
    if one_machine and launcher.parent:  # its process id says nothing on another machine
        parts += _ancestor(launcher.parent)
    return "/".join(parts)


def _ancestor(name: str) -> list[str]:
    """[pid, start time] of the nearest process above this one called `name`; [] if there is none.

    MPICH's launcher gives its ranks no job name, and a wrapper script may stand between it and them.
    """
    pid = os.getppid()
    while pid > 1:
        try:
            # pid (name) state ppid ... 22: start time; the name may hold spaces and brackets itself.
            head, tail = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)
        except OSError:  # it has just ended: then it is not our launcher
            return []
        fields = tail.split()
        if head.split("(", 1)[1] == name[:15]:
            return [str(pid), fields[19]]
        pid = int(fields[1])
    return []


def first_host(nodes: str) -> str:
    """The first name of a Slurm host list: "node[08-11,20],gpu1" gives "node08"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    name = "" if first is None else re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])
    if not name or "[" in name:
        raise RendezvousError(f"Slurm's host list {nodes!r} cannot be read; set MASTER_ADDR to rank 0's host")
    return name


def _first(names: tuple[str, ...], environ: Mapping[str, str]) -> tuple[str, str] | None:
    return next(((name, environ[name]) for name in names if environ.get(name)), None)


def _whole(names: tuple[str, ...], environ: Mapping[str, str]) -> int | None:
    found = _first(names, environ)
    if found is None:
        return None
    name, text = found
    if not re.fullmatch(r"\d{1,9}", text.strip(), re.ASCII):
        raise RendezvousError(f"environment: {name}={text!r} is not a whole number")
    return int(text)


def _port(name: str, value: int) -> int:
    if not 1 <= value <= 65535:
        raise RendezvousError(f"environment: {name}={value} is not a port; expected 1 to 65535")
    return value
