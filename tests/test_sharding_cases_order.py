"""How much is live, in which order, with which delays, and on which communicator: no result changes.

Cases from public reports of people who train with FSDP and ZeRO, each on 1, 2, 3 and 4 ranks; the reference
is one rank on the concatenated batch.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from sharding_ranks import (  # type: ignore[import-not-found]
    LR,
    RANKS,
    assert_shards,
    batch,
    chain,
    each_n,
    flat,
    forward,
    host,
    reference,
    run_threads,
    sharded,
    stepped,
    train,
    ways,
)

from sharding import SGD, PhaseError

# --- memory and order ---------------------------------------------------------------------------------------


@each_n
def test_of_50_units_at_most_two_whole_weights_and_two_whole_gradients_are_live(n: int) -> None:
    def rank(comm: Any) -> None:
        params = {"layers": [{"w": np.eye(3)[[1, 2, 0]], "b": np.zeros(3)} for _ in range(50)]}
        with sharded(comm, params) as model:
            for step in range(2):
                train(model, *batch(comm.rank, n, step))
                assert_shards(model, "grad", reference(params, step))
                model.zero_grad()
            counts = model.counters
            assert counts.live_weight_buffers == counts.live_grad_buffers == 0
            assert counts.peak_weight_buffers == (2 if n > 1 else 0)
            assert counts.peak_grad_buffers == (2 if n > 1 else 1)
            assert counts.calls() == {
                "all_gather": 2 * 50 * 2 if n > 1 else 0,
                "reduce_scatter": 2 * 50 if n > 1 else 0,
                "all_reduce": 0,
            }

    host(n, rank)


@each_n
def test_a_rank_that_skips_units_or_has_no_batch_adds_zero(n: int) -> None:
    def rank(comm: Any) -> None:
        params = chain()
        x, t = batch(0, 1)
        for way in ways(n).values():
            with sharded(comm, params, **way) as model:
                for kind in ("nothing opened", "an empty batch", "one unit opened"):
                    if comm.rank == 0:
                        train(model, x, t)
                    elif kind == "an empty batch":
                        train(model, x[:0], t[:0])
                    else:
                        with model.microbatch():
                            if kind == "one unit opened":
                                with model[1].forward():
                                    pass
                                with model[1].backward():
                                    pass
                    assert_shards(model, "grad", reference(params))
                    model.zero_grad()

    host(n, rank)


@each_n
def test_an_earlier_unit_after_a_later_one_is_a_clear_error(n: int) -> None:
    def rank(comm: Any) -> None:
        with sharded(comm) as model:
            train(model, *batch(comm.rank, n))
            model.zero_grad()
            with model.microbatch():
                with model[1].forward():
                    pass
                with (
                    pytest.raises(
                        PhaseError,
                        match=r"layers\.0\.forward\(\).* passed .* expects unit 'layers\.2'.*declared order",
                    ),
                    model[0].forward(),
                ):
                    pass
                with model[0].backward():
                    pass
                with (
                    pytest.raises(
                        PhaseError, match=r"layers\.1\.backward\(\).*expects no further unit.*reverse order"
                    ),
                    model[1].backward(),
                ):
                    pass
            model.zero_grad()
            train(model, *batch(comm.rank, n))
            assert_shards(model, "grad", reference(chain()))

    host(n, rank)


# --- streams ------------------------------------------------------------------------------------------------


class Delayed:
    """A communicator that holds up every collective, on the stream it is queued on: the injected fault."""

    def __init__(self, inner: Any, seconds: Any) -> None:
        self._inner, self._seconds = inner, seconds

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in ("all_gather", "reduce_scatter", "all_reduce"):
            return value

        def delayed(*args: Any, **kwargs: Any) -> Any:
            pause = self._seconds()
            stream = kwargs.get("stream")
            if stream is None:
                time.sleep(pause)
            else:
                stream.call(lambda: time.sleep(pause))
            return value(*args, **kwargs)

        return delayed

    def split(self, color: int, key: int = 0) -> Delayed:
        return Delayed(self._inner.split(color, key), self._seconds)


@each_n
def test_delays_before_every_collective_and_step_change_no_result(n: int) -> None:
    def rank(comm: Any) -> None:
        random = np.random.default_rng(comm.rank)

        def pause() -> float:
            return 0.002 * int(random.integers(2))

        for way in ways(n).values():
            params = chain()
            with sharded(Delayed(comm, pause), params, debug=True, **way) as model:
                assert n == 1 or model.runtime.overlap == model.prefetch
                opt = SGD(model, lr=LR)
                for step in range(3):
                    x, t = batch(comm.rank, n, step)
                    if step == 1:  # the last gathers of this one are nobody's: they may still run at the end
                        with model.microbatch():
                            pass
                    else:
                        for k in range(2):
                            train(model, x[k::2], t[k::2], last=k == 1)
                        grads = reference(params, step)
                        params = stepped(params, grads, LR)
                    time.sleep(pause())
                    opt.step()
                    model.zero_grad()
                    assert_shards(model, "data", flat(params))
                    with model.evaluate():
                        if step == 2:
                            np.testing.assert_array_equal(forward(model, x)[-1], plain_forward(params, x))

    host(n, rank)


def plain_forward(params: Any, x: np.ndarray) -> np.ndarray:
    for layer in params["layers"]:
        x = x @ layer["w"] + layer["b"]
    return x


class Failing(Delayed):
    """A communicator whose gathers fail on their streams, from the one numbered `since` on."""

    def __init__(self, inner: Any, since: int) -> None:
        self.count = 0
        self._since = since
        super().__init__(inner, lambda: 0)

    def all_gather(self, *args: Any, stream: Any = None, **kwargs: Any) -> Any:
        def fail() -> None:
            raise OverflowError("injected")

        self.count += 1
        if self.count > self._since:
            stream.call(fail)
        return self._inner.all_gather(*args, stream=stream, **kwargs)

    def split(self, color: int, key: int = 0) -> Failing:
        return Failing(self._inner.split(color, key), self._since)


def test_a_gather_that_fails_while_nobody_waits_for_it_is_an_error_of_its_microbatch() -> None:
    def rank(comm: Any) -> None:
        with sharded(Failing(comm, 3)) as model:
            with pytest.raises(OverflowError, match="injected"), model.microbatch():
                for unit in model:  # these three arrive, those for the backward that is left out do not
                    with unit.forward():
                        pass
            with pytest.raises(PhaseError, match="OverflowError ended"):
                model.grad_norm()

    host(2, rank)


def test_the_whole_of_it_needs_nothing_but_the_protocol() -> None:
    def rank(comm: Any) -> None:
        for way in ways(comm.size).values():
            params = chain()
            with sharded(comm, params, **way) as model:
                opt = SGD(model, lr=LR)
                for step in range(2):
                    train(model, *batch(comm.rank, comm.size, step))
                    params = stepped(params, reference(params, step), LR)
                    opt.step()
                    model.zero_grad()
                assert_shards(model, "data", flat(params))

    for n in RANKS:
        run_threads(n, rank)
