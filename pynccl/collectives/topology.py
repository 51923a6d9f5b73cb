"""What messages cost between which ranks: ports and links with latency and bandwidth.

A topology sorts messages into link classes (say, inside a node and between nodes) and says through which two
ports a message goes, out and in. Messages of the same round share their ports' bandwidth. Owns these numbers;
knows nothing of schedules. All times are in seconds, all sizes in bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from pynccl.collectives.schedule import Array

__all__ = ["TOPOLOGIES", "Link", "Topology", "flat", "nodes", "parse", "rails"]


@dataclasses.dataclass(frozen=True)
class Link:
    """A class of links: `alpha` seconds a message, `beta` seconds a byte."""

    name: str
    alpha: float
    beta: float


# Orders of magnitude of today's machines, for comparing algorithms; measure yours for predictions.
_NVLINK = Link("gpu", 3e-6, 1 / 300e9)
_NETWORK = Link("network", 8e-6, 1 / 45e9)
_SPINE = Link("spine", 12e-6, 1 / 45e9)
_GAMMA = 1 / 500e9
_DELTA = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Topology:
    """Where ranks are and what connects them.

    `links`: the classes. `gamma`: seconds for each byte reduced; `delta`: for each byte copied inside a rank.
    `link(source, target)`, arrays of ranks: the class of each message. `port[class][rank]`: the number of the
    port through which a rank's messages of a class go; ranks with the same number share it. Out and in are
    two.
    """

    name: str
    n: int
    links: tuple[Link, ...]
    link: Callable[[Array, Array], Array]
    port: tuple[Array, ...]
    gamma: float = _GAMMA
    delta: float = _DELTA
    node: Array = dataclasses.field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __str__(self) -> str:
        links = ", ".join(f"{k.name} {k.alpha * 1e6:g} us + {1e-9 / k.beta:g} GB/s" for k in self.links)
        return f"{self.name} ({links})"


def flat(n: int, link: Link = _NVLINK, *, gamma: float = _GAMMA, delta: float = _DELTA) -> Topology:
    """`n` ranks, each with one port to a network that blocks nothing."""
    return Topology(
        "flat", n, (link,), _same_class, (np.arange(n),), gamma, delta, np.zeros(n, dtype=np.int64)
    )


def nodes(
    n: int,
    per_node: int | Sequence[int],
    *,
    inside: Link = _NVLINK,
    between: Link = _NETWORK,
    gamma: float = _GAMMA,
    delta: float = _DELTA,
) -> Topology:
    """Nodes of `per_node` ranks (a number, or one for each node), which share the node's network port."""
    node, _ = _places(n, per_node)
    ports = (np.arange(n), node)
    name = f"{int(node.max()) + 1} nodes"
    return Topology(
        name,
        n,
        (inside, between),
        lambda s, t: (node[s] != node[t]).astype(np.int64),
        ports,
        gamma,
        delta,
        node,
    )


def rails(
    n: int,
    per_node: int | Sequence[int],
    *,
    inside: Link = _NVLINK,
    between: Link = _NETWORK,
    across: Link = _SPINE,
    gamma: float = _GAMMA,
    delta: float = _DELTA,
) -> Topology:
    """Nodes as in `nodes`, but each rank has a network port of its own, on the rail of its place in the node.

    Messages between nodes that stay on a rail are of class `between`, those that change it of class `across`.
    Both go through the same port, so what the ports carry is counted together.
    """
    node, place = _places(n, per_node)

    def link(source: Array, target: Array) -> Array:
        away = node[source] != node[target]
        return np.where(away, np.where(place[source] == place[target], 1, 2), 0)

    ports = (np.arange(n), n + np.arange(n), n + np.arange(n))
    name = f"{int(node.max()) + 1} nodes with rails"
    return Topology(name, n, (inside, between, across), link, ports, gamma, delta, node)


def _same_class(source: Array, target: Array) -> Array:
    return np.zeros(np.broadcast_shapes(np.shape(source), np.shape(target)), dtype=np.int64)


def _places(n: int, per_node: int | Sequence[int]) -> tuple[Array, Array]:
    """The node of each rank and its place in it."""
    if isinstance(per_node, int):
        if per_node < 1:
            raise ValueError(f"topology: {per_node} ranks a node; take 1 or more")
        return np.arange(n) // per_node, np.arange(n) % per_node
    sizes = np.asarray(per_node, dtype=np.int64)
    if len(sizes) == 0 or (sizes < 1).any() or sizes.sum() != n:
        raise ValueError(f"topology: nodes of {list(per_node)} ranks are not {n} ranks")
    node = np.repeat(np.arange(len(sizes)), sizes)
    return node, np.arange(n) - (np.cumsum(sizes) - sizes)[node]


TOPOLOGIES: dict[str, Callable[..., Topology]] = {"flat": flat, "nodes": nodes, "rails": rails}


def parse(text: str, n: int) -> Topology:
    """The topology of a command line: "flat", "nodes:8", "rails:8", or "nodes:8,8,4" for nodes of other
    sizes.
    """
    kind, _, sizes = text.partition(":")
    if kind not in TOPOLOGIES or bool(sizes) == (kind == "flat"):
        raise ValueError(
            f"topology {text!r}: write flat, nodes:8, rails:8 or nodes:8,8,4 (ranks in each node)"
        )
    if not sizes:
        return flat(n)
    try:
        numbers = [int(size) for size in sizes.split(",")]
    except ValueError:
        raise ValueError(f"topology {text!r}: {sizes!r} are not numbers of ranks in each node") from None
    if max(numbers) > n:
        raise ValueError(f"topology {text!r}: a node of {max(numbers)} ranks, and there are {n} in all")
    return TOPOLOGIES[kind](n, numbers[0] if len(numbers) == 1 else numbers)
