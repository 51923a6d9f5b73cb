"""What units, models and optimizers are called, and what they tell of themselves."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from sharding_ranks import FakeComm, abc, alone, chain, run_threads, walk  # type: ignore[import-not-found]

from sharding import SGD, AdamW, by_layer, fully_shard


def test_optimizers_say_what_they_need_and_what_they_are() -> None:
    def rank(comm: FakeComm) -> None:
        with pytest.raises(TypeError, match="AdamW: model is a dict; pass the model from fully_shard"):
            AdamW(chain())
        with fully_shard(chain(), comm, units="layers.*") as model:
            assert [unit.name for unit in model] == ["layers.0", "layers.1", "layers.2"]
            assert repr(model) == "<ShardedModel of 3 units, 36 parameters, full_shard over 1 rank>"
            assert repr(model[0]) == "<Unit 'layers.0': 2 parameters, 12 elements>"
            opt = SGD(model, lr=0.5)
            assert repr(opt) == "<SGD after 0 steps: lr=0.5, 0 bytes of state>"
            assert len(model.relayout_listeners) == 1
            gone = weakref.ref(opt)
            del opt
            gc.collect()
            assert gone() is None
            model.freeze("*")
            assert model.relayout_listeners == []
            with pytest.raises(ValueError, match="AdamW: nothing in the model is trainable"):
                AdamW(model)

    alone(rank)


def test_by_layer_with_a_parameter_named_root_says_what_to_rename() -> None:
    def rank(comm: FakeComm) -> None:
        with pytest.raises(ValueError, match=r"unit of root.w 'root'.*by_layer.*rename that, or pass a dict"):
            fully_shard({"root": {"w": np.zeros(3)}, "a": np.zeros(3)}, comm, units=by_layer)

    alone(rank)


def test_events_tell_of_waits_and_computation_in_their_order() -> None:
    def rank(comm: FakeComm) -> None:
        with abc(comm) as model:
            seen: list[tuple[Any, ...]] = []
            model.on_event(lambda *event: seen.append(event))
            walk(model, comm)
            told = [(name, unit, detail) for name, unit, _, _, detail in seen]
            assert told[:2] == [("gather", "a", ""), ("compute", "a", "forward")]
            assert [unit for name, unit, _ in told if name == "reduce"] == ["c", "b", "a"]
            assert all(start <= stop for _, _, start, stop, _ in seen)

    run_threads(2, rank)


def test_units_are_found_by_name_and_position() -> None:
    def rank(comm: FakeComm) -> None:
        with abc(comm) as model:
            assert len(model) == 3 and model[1] is model["b"] and list(reversed(model)) == list(model)[::-1]
            with pytest.raises(KeyError, match="no unit 'd'; the units are a, b, c"):
                model["d"]

    alone(rank)
