"""Activation checkpointing: keep a layer's inputs alone, and compute the rest again when backward needs it.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). It fits between the engine and a layer
without either knowing: the forward is computed again inside the unit's `backward()`, where the weights are
whole anyway, so that it costs one more forward and no communication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Layer", "checkpointed"]


class Layer(NamedTuple):
    """A layer with its backward pass written by hand, as two functions.

    forward
        `forward(weights, *inputs) -> (output, saved)`. `saved` is what backward needs besides weights; it
        must hold no weights, which are released in between.
    backward
        `backward(weights, gradients, saved, d_output) -> d_input`. Writes the weights' gradients.
    """

    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[[Any, Any, Any, Any], Any]


def checkpointed(
    forward: Callable[..., tuple[Any, Any]],
    backward: Callable[[Any, Any, Any, Any], Any],
    *,
    rng: Any = None,
) -> Layer:
    """The same layer, which keeps its inputs between forward and backward and nothing else.

    The gradients are the same bit for bit: backward sees what forward would have saved, made by the same
    function from the same inputs and weights. So the inputs must not be overwritten in between.

    rng
        The numpy.random.Generator that `forward` draws from (dropout), or a sequence of them. They are put
        back to where they were for the second forward, and afterwards to where they are now.

    >>> layer = checkpointed(forward, backward)                                      # doctest: +SKIP
    >>> with unit.forward() as w:                                                    # doctest: +SKIP
    ...     y, saved = layer.forward(w, x)
    >>> with unit.backward() as (w, g):                     # gathered once          # doctest: +SKIP
    ...     dx = layer.backward(w, g, saved, dy)
    """
    generators = () if rng is None else tuple(rng) if isinstance(rng, (list, tuple)) else (rng,)

    def light_forward(weights: Any, *inputs: Any) -> tuple[Any, Any]:
        states = _states(generators)
        output, _ = forward(weights, *inputs)
        return output, (inputs, states)

    def full_backward(weights: Any, gradients: Any, saved: Any, d_output: Any) -> Any:
        inputs, states = saved
        now = _states(generators)
        _restore(generators, states)
        try:
            _, inside = forward(weights, *inputs)
        finally:
            _restore(generators, now)
        return backward(weights, gradients, inside, d_output)

    return Layer(light_forward, full_backward)


def _states(generators: tuple[Any, ...]) -> list[Any]:
    return [generator.bit_generator.state for generator in generators]


def _restore(generators: tuple[Any, ...], states: list[Any]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.bit_generator.state = state
