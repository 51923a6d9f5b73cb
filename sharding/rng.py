"""States of NumPy random generators as JSON, and back, also on another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["Generators", "generator_states", "planned_states", "restore_states"]

Generators = np.random.Generator | Mapping[str, np.random.Generator] | None


def _named(call: str, rng: Generators) -> dict[str, np.random.Generator]:
    named = dict(rng or {}) if rng is None or isinstance(rng, Mapping) else {"": rng}
    for name, generator in named.items():
        if not isinstance(generator, np.random.Generator):
            raise TypeError(
                f"{call}: rng{f'[{name!r}]' if name else ''} is a {type(generator).__name__}; pass a "
                "numpy.random.Generator (np.random.default_rng makes one), or a dict of them"
            )
    return named


def generator_states(call: str, rng: Generators) -> dict[str, Any]:
    """Name -> state (JSON) of each generator; a single one has the name ""."""
    return {name: _to_json(generator.bit_generator.state) for name, generator in _named(call, rng).items()}


def planned_states(
    rng: Generators, saved: Mapping[str, Sequence[Any]], rank: int, source: str
) -> list[tuple[np.random.Generator, Any]]:
    """What each generator is to become on this rank. ValueError if the checkpoint has nothing for it.

    `saved` is name -> states by rank. States that were equal on all ranks are everybody's. Else rank r gets
    what rank r had; on more ranks than saved, rank r gets that of rank r % saved, jumped ahead by its
    distance: a stream that no other rank is in.
    """
    plans = []
    for name, generator in _named("load", rng).items():
        label = f"rng[{name!r}]" if name else "rng"
        if name not in saved:
            kept = ", ".join(repr(each) for each in saved) or "none"
            raise ValueError(f"load: {source} has no state for {label}; it has {kept} (a single rng is '')")
        states = saved[name]
        kind = type(generator.bit_generator).__name__
        if states[0]["bit_generator"] != kind:
            raise ValueError(
                f"load: {label} is a {kind} and {source} has the state of a {states[0]['bit_generator']}; "
                f"make it with np.random.Generator(np.random.{states[0]['bit_generator']}())"
            )
        if all(state == states[0] for state in states):
            plans.append((generator, _from_json(states[0])))
            continue
        state = _from_json(states[rank % len(states)])
        if rank >= len(states):
            state = _jumped(type(generator.bit_generator), state, rank // len(states), label)
        plans.append((generator, state))
    return plans


def restore_states(plans: Sequence[tuple[np.random.Generator, Any]]) -> None:
    """Let the generators become what was planned."""
    for generator, state in plans:
        generator.bit_generator.state = state


def _jumped(kind: Any, state: Any, jumps: int, label: str) -> Any:
    if not hasattr(kind, "jumped"):
        raise ValueError(
            f"load: {label} is a {kind.__name__}, which cannot be jumped ahead for more ranks than saved; "
            "use PCG64, or seed it anew"
        )
    scratch = kind()
    scratch.state = state
    return scratch.jumped(jumps).state


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": value.dtype.name}
    return value.item() if isinstance(value, np.generic) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"array", "dtype"}:
            return np.array(value["array"], value["dtype"])
        return {key: _from_json(item) for key, item in value.items()}
    return value
