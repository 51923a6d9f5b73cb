"""The engine in trainers that differentiate for themselves: HIPS autograd, and functions of a tree (JAX).

`sharded` makes a unit a function of its inputs that autograd differentiates, with the weights whole only
while it computes: in its forward, and again in its vector-Jacobian product. `value_and_grad` gives a function
the whole tree of parameters and takes the whole tree of gradients, for frameworks that want it so. Both are
used inside of `model.microbatch()`, and add up gradients, clip and step like any other loop. Knows what the
engine's contexts give; autograd is imported when it is first needed, JAX never.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .tree import fill, flatten, nest, rebuild

if TYPE_CHECKING:
    from .engine import ShardedModel
    from .unit import Unit

__all__ = ["loss_and_backward", "parameters", "sharded", "value_and_grad"]

_LINK = "autograd link"


# --- HIPS autograd ------------------------------------------------------------------------------------------


def sharded(unit: Unit, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn(weights, *inputs)` as a function of the inputs, for autograd: weights are there when needed.

    Forward gathers the weights, computes and releases them; only the inputs are kept. The vector-Jacobian
    product gathers them again, computes forward again with autograd's tape, then backward, and the weights'
    gradients are reduced into this rank's shard: full sharding (ZeRO-3) with activation checkpointing.

    `fn` is written with `autograd.numpy`; `weights` is the tree that `unit.forward()` gives; inputs are
    positional; the output may be an array or a tuple, list or dict of arrays. Units are called in declared
    order, each once in a microbatch (the root unit as often as you like). Frozen weights get no gradient.

    Differentiate with `loss_and_backward`, or with autograd's own functions if the first unit's input is
    differentiated. Raises RuntimeError in a microbatch whose trainable weights nothing would differentiate.

    >>> layers = [sharded(unit, dense) for unit in model]                            # doctest: +SKIP
    >>> def loss(x, y):                                                              # doctest: +SKIP
    ...     for layer in layers:
    ...         x = layer(x)
    ...     return np.mean((x - y) ** 2)
    >>> with model.microbatch():                                                     # doctest: +SKIP
    ...     value = loss_and_backward(model, loss, x, y)
    """
    extend, isbox, make_vjp = _autograd()
    memo = unit.model.walk.memo

    # Every call takes a link from the call before and gives one to the next, so that the vjps come in reverse
    # order even where the data would let them come in another, and come at all where no input has a gradient.
    @extend.primitive
    def linked(link: float, *inputs: Any) -> tuple[Any, float]:
        with unit.forward() as weights:
            return _apart(fn(weights, *inputs), unit), link

    def vjp_of(argnums: tuple[int, ...], _: Any, arguments: tuple[Any, ...], __: Any) -> Callable[..., Any]:
        inputs = arguments[1:]
        wanted = tuple(number - 1 for number in argnums if number)  # of the inputs

        def vjp(cotangent: Any) -> tuple[Any, ...]:
            d_output, d_link = cotangent
            with unit.backward(zero=False):
                gradients, whole = unit.gradient_views(), unit.weight_views()

                def again(traced: tuple[Any, ...]) -> Any:
                    weights, chosen = traced
                    every = list(inputs)
                    for number, value in zip(wanted, chosen, strict=True):
                        every[number] = value
                    tree = unit.as_tree({**whole, **{name: weights[name] for name in gradients}})
                    return _traced(fn(tree, *every))

                if not gradients and not wanted:
                    return (d_link,)
                start = ({name: whole[name] for name in gradients}, tuple(inputs[n] for n in wanted))
                pull_back, _ = make_vjp(again, start)
                d_weights, d_inputs = pull_back(d_output)
                for name, target in gradients.items():
                    _write(target, d_weights[name], name)
                found = iter(_apart(d_inputs, unit))
            return tuple(next(found) if number else d_link for number in argnums)

        return vjp

    extend.defvjp_argnums(linked, vjp_of)

    def call(*inputs: Any) -> Any:
        result = linked(memo.get(_LINK, 0.0), *inputs)
        if isbox(result):
            memo[_LINK] = result[1]
        elif not unit.model.walk.forward_only and any(shard.group.numel for shard in unit.trainable):
            raise RuntimeError(
                f"sharded: nothing differentiates unit {unit.name!r} in this microbatch, and its gradients "
                "would be missing; run the loss through adapters.loss_and_backward(model, loss, ...), or in "
                "model.evaluate() if you want no gradients"
            )
        return result[0]

    return call


def loss_and_backward(model: ShardedModel, fn: Callable[..., Any], *batch: Any, scale: float = 1.0) -> float:
    """`fn(*batch)`, a scalar made with `sharded` units, and its gradients into the shards. In a microbatch.

    Differentiates with respect to the weights alone. `scale` multiplies the gradients, not the value: 1 /
    microbatches for a mean over them, or a loss scale.
    """
    extend, _, make_vjp = _autograd()
    memo = model.walk.memo

    def from_link(link: Any) -> Any:
        memo[_LINK] = link
        return fn(*batch)

    pull_back, value = make_vjp(from_link, 0.0)
    if np.ndim(value) != 0:
        raise TypeError(f"loss_and_backward: the loss has shape {np.shape(value)}; return a scalar")
    pull_back(extend.vspace(value).ones() * scale)
    return float(value)


def _autograd() -> tuple[Any, Callable[[Any], bool], Callable[..., Any]]:
    try:
        import autograd.extend
        from autograd.core import make_vjp
        from autograd.tracer import isbox
    except ImportError as error:
        raise ImportError(
            f"sharded needs HIPS autograd ({error}); `pip install autograd` brings it"
        ) from error
    return autograd.extend, isbox, make_vjp


def _traced(outputs: Any) -> Any:
    """Containers made by plain Python as containers that autograd sees into."""
    from autograd import builtins

    if type(outputs) in (tuple, list):
        return getattr(builtins, type(outputs).__name__)([_traced(item) for item in outputs])
    if type(outputs) is dict:
        return builtins.dict({key: _traced(item) for key, item in outputs.items()})
    return outputs


def _apart(outputs: Any, unit: Unit) -> Any:
    """The outputs, copied where they are views of the unit's weights, whose memory is about to be reused."""
    weights = list(unit.weight_views().values())

    def apart(leaf: Any) -> Any:
        return leaf.copy() if any(np.may_share_memory(leaf, weight) for weight in weights) else leaf

    return rebuild(outputs, {name: apart(leaf) for name, leaf in flatten(outputs)})


# --- functions of a whole tree ------------------------------------------------------------------------------


def value_and_grad(
    model: ShardedModel,
    fn: Callable[..., tuple[Any, Any]],
    *,
    like: Any = None,
    convert: Callable[[Any], Any] | None = None,
) -> Callable[..., Any]:
    """A function of a batch: it calls `fn(parameters, *batch) -> (value, gradients)` and reduces the latter.

    For frameworks that differentiate a function of a tree: `fn` may be `jax.jit(jax.value_and_grad(loss))`,
    or autograd's `value_and_grad(loss)`, or your own. The result returns `value` as fn gave it, so `has_aux`
    works. Call it inside of `model.microbatch()`.

    `parameters` is the tree of all weights, in the compute dtype; `gradients` is a tree of the same names
    (None, or nothing, for frozen ones). The weights are gathered unit by unit, and all are whole while fn
    runs: sharded are gradients, optimizer state and what is kept between steps. Make the model with
    `reshard_after_forward=False`: then fn gets the gathered memory itself. Otherwise it gets copies, and
    backward gathers once more than is needed.

    like
        A tree with the containers that fn wants, for named tuples and flat dicts of dotted names. By default
        the parameters come in dicts and lists.
    convert
        Applied to each weight: `jax.dlpack.from_dlpack` for CuPy arrays in JAX on a GPU, for instance.

    Raises ValueError for gradients of other names or shapes than the weights'. fn must not keep its
    parameters: their memory is reused.
    """

    def step(*batch: Any) -> Any:
        value, gradients = fn(parameters(model, like=like, convert=convert), *batch)
        _wait_for(value)
        found = {name: leaf for name, leaf in flatten(gradients) if leaf is not None}
        _check_names(model, found)
        for unit, names in reversed(list(_parts(model))):
            with unit.backward(zero=False):
                for name, target in unit.gradient_views().items():
                    if name in names:
                        _write(target, found[name], name)
        return value

    return step


def parameters(model: ShardedModel, *, like: Any = None, convert: Callable[[Any], Any] | None = None) -> Any:
    """All weights, whole, as one tree. Collective; in `microbatch()` (before backward) or `evaluate()`.

    Arrays are the gathered memory itself where it stays whole until backward, and copies where it does not.
    `like` and `convert`: see `value_and_grad`.
    """
    leaves: dict[str, Any] = {}
    stays = not (model.reshard_after_forward or model.walk.forward_only)
    for unit, names in _parts(model):
        with unit.forward():
            views = unit.weight_views()
            for name in names:
                home = model.home_of(unit.owner(name))
                leaf = views[name] if stays or home.kept_weights is not None else views[name].copy()
                leaves[name] = leaf if convert is None else convert(leaf)
    if like is not None:
        for name, _ in flatten(like):
            if name not in leaves:
                raise ValueError(
                    f"like: there is no parameter {name!r}; the names are {', '.join(model.names)}"
                )
        return rebuild(like, leaves)
    return fill(nest(list(model.names), "", model.mappings), leaves)


def _parts(model: ShardedModel) -> Iterator[tuple[Unit, list[str]]]:
    """Each unit and the names to read and write in it: each name of the model once.

    A parameter that several units share lies in the root unit and is shown in the others, which hand on its
    gradient: the root unit is left with what nobody else shows.
    """
    elsewhere = {name for unit in model.units for name in unit.shown}
    for unit in model.all_units:
        yield unit, [name for name in unit.shown if not (unit.kept and name in elsewhere)]


def _check_names(model: ShardedModel, found: dict[str, Any]) -> None:
    """ValueError unless there is a gradient for each trainable parameter, and none for an unknown name."""
    unknown = [name for name in found if name not in set(model.names)]
    missing = [
        name for name in model.names if name not in found and model.is_trainable(model.owners.get(name, name))
    ]
    if unknown or missing:
        what = f"there is no parameter {unknown[0]!r}" if unknown else f"{missing[0]!r} has no gradient"
        raise ValueError(
            f"value_and_grad: {what}; fn must return (value, gradients), the gradients a tree like the "
            "parameters that it was given"
        )


def _wait_for(value: Any) -> None:
    """JAX computes on while Python goes on: what reads the weights must be done before they are released."""
    for _, leaf in flatten(value):
        if hasattr(leaf, "block_until_ready"):
            leaf.block_until_ready()


def _write(target: Any, gradient: Any, name: str) -> None:
    """The gradient, of whatever library, into the engine's memory (a cast, if its dtype is another)."""
    if isinstance(target, np.ndarray):
        gradient = np.asarray(gradient)
    elif type(gradient).__module__.partition(".")[0] != "cupy":
        import cupy

        gradient = cupy.from_dlpack(gradient)
    if gradient.shape != target.shape:
        raise ValueError(
            f"the gradient of {name!r} has shape {gradient.shape}, and the parameter {target.shape}; return "
            "gradients of the parameters that fn was given"
        )
    target[...] = gradient
