"""The phases of a microbatch, and the order in which its units are gathered and reduced.

RESTING -> FORWARD -> BACKWARD -> RESTING. FORWARD walks the units in declared order, BACKWARD in reverse.
Every rank walks all of them in every microbatch, whether its data needs them or not: a unit that the user
skips is gathered and released (and its zero gradient reduced) in passing. So the collectives of all ranks
pair, whatever each rank opens. What a call may not do is said before it changes anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import ShardedModel
    from .unit import Unit

__all__ = ["BACKWARD", "FORWARD", "RESTING", "PhaseError", "Walk"]

RESTING, FORWARD, BACKWARD = "RESTING", "FORWARD", "BACKWARD"


class PhaseError(RuntimeError):
    """A call that does not fit the phase: the message says what came before and what is expected."""


class Walk:
    """Where a microbatch is."""

    def __init__(self, model: ShardedModel) -> None:
        self.model = model
        self.phase = RESTING
        self._next = 0
        """The position of the unit that comes next."""
        self._open: Unit | None = None
        self._last: Unit | None = None
        """The unit that was opened last in this microbatch."""
        self.wrote = False
        """A unit's backward was opened in this microbatch."""
        self._forward_only = False
        self._sync = True
        self.memo: dict[str, Any] = {}
        """What adapters remember until the microbatch ends."""

    @property
    def opened(self) -> bool:
        """Whether the user has opened any unit beside the root in this microbatch."""
        return self._last is not None

    @property
    def forward_only(self) -> bool:
        """Whether this is (or the last one was) a forward pass alone."""
        return self._forward_only

    @contextmanager
    def run(self, *, forward_only: bool, sync: bool) -> Iterator[None]:
        """One microbatch. What the user leaves out is made up for; an exception ends it on all ranks.

        Ranks leave together: a rank that has all it needs must not go on alone where another one fails at the
        end. (A microbatch that reduces nothing is left alone: the next one that does finds out.)
        """
        self._forward_only, self._sync = forward_only, sync
        self._last, self.wrote = None, False
        self.memo.clear()
        try:
            self._enter_forward()
            yield
            self._check_unbroken()
            if self.phase == FORWARD:
                self._pass_to(len(self.model.units))
                if not forward_only:
                    self._enter_backward()
            if not forward_only:
                self._finish_backward()
            self.model.gatherer.release_all()
            self.model.runtime.settle()
            if forward_only or self._sync:
                self.model.runtime.meet(self.model.mesh)
        except BaseException as error:
            self.model.abandon(error)
            raise
        self.phase = RESTING

    def abandon(self) -> None:
        """Whatever the phase was, it is over."""
        self.phase, self._open = RESTING, None

    def _check_unbroken(self) -> None:
        if self._open is not None:
            raise PhaseError(
                f"the microbatch ends inside the context of unit {self._open.name!r}; close that first"
            )
        if self.phase == RESTING:
            raise PhaseError(
                "an exception ended a unit's backward() and the microbatch went on; its gradients are void: "
                "let the exception leave the microbatch, then call zero_grad()"
            )

    # --- from phase to phase --------------------------------------------------------------------------------

    def _enter_forward(self) -> None:
        model = self.model
        self.phase, self._next = FORWARD, 0
        if model.root is not None:
            model.gatherer.start(model.root)
        self._prefetch()

    def _enter_backward(self) -> None:
        """Every unit has been through forward; those still whole stay so until their backward."""
        model = self.model
        self._pass_to(len(model.units))
        self.phase, self._next = BACKWARD, len(model.units) - 1
        if model.root is not None:
            model.reducer.begin(model.root, zero=True)
        self._prefetch()

    def _finish_backward(self) -> None:
        model = self.model
        self._pass_to(-1)
        if model.root is not None:
            model.reducer.finish(model.root, self._sync)
        model.reducer.drain()

    def _pass_to(self, position: int) -> None:
        """Take part in the collectives of the units from here to `position`, which the user skipped."""
        model = self.model
        forward = self.phase == FORWARD
        while self._next != position:
            unit = self._advance()
            if forward:
                self._leave_forward(unit)
                continue
            model.reducer.begin(unit, zero=True)
            model.gatherer.release(unit)
            model.reducer.finish(unit, self._sync)

    def _advance(self) -> Unit:
        """Start the next unit's gather, then the one's after it."""
        unit = self.model.units[self._next]
        self.model.gatherer.start(unit)
        self._next += 1 if self.phase == FORWARD else -1
        self._prefetch()
        return unit

    def _prefetch(self) -> None:
        model = self.model
        if model.prefetch and 0 <= self._next < len(model.units):
            model.gatherer.start(model.units[self._next])

    def _leave_forward(self, unit: Unit) -> None:
        if self.model.reshard_after_forward or self._forward_only:
            self.model.gatherer.release(unit, keep_part=not self._forward_only)

    # --- the contexts of units ------------------------------------------------------------------------------

    def open_forward(self, unit: Unit) -> None:
        """Make a unit whole for its forward, and start the next one's gather."""
        call = f"{unit.name}.forward()"
        if self.phase == RESTING:
            raise PhaseError(
                f"{call} outside of a microbatch; open one: `with model.microbatch():`, or "
                "`with model.evaluate():` for a forward pass alone"
            )
        if self.phase == BACKWARD:
            raise PhaseError(
                f"{call} after backward began in this microbatch; recompute inside the unit's backward() "
                "instead"
            )
        if not unit.kept:
            self._check_closed(call)
            if unit.position < self._next:
                raise PhaseError(
                    f"{call}: this microbatch has passed the unit already and expects {self._expected()}; "
                    "open each unit once, in declared order"
                )
            self._pass_to(unit.position)
            self._advance()
            self._open = self._last = unit
        self.model.gatherer.ready(unit)

    def close_forward(self, unit: Unit) -> None:
        """The forward of a unit is over."""
        if not unit.kept and self.phase == FORWARD:
            self._open = None
            self._leave_forward(unit)

    def open_backward(self, unit: Unit, zero: bool) -> None:
        """Make a unit whole for its backward, with room for gradients; start the previous one's gather."""
        call = f"{unit.name}.backward()"
        if self.phase == RESTING:
            raise PhaseError(f"{call} outside of a microbatch; open one: `with model.microbatch():`")
        if self._forward_only:
            raise PhaseError(f"{call} inside evaluate(), which is a forward pass alone; use microbatch()")
        if self.phase == FORWARD and self._next == 0 and self.model.units:
            raise PhaseError(f"{call} before any forward(); run the forward pass first")
        if self.phase == FORWARD or not unit.kept:
            self._check_closed(call)
        if self.phase == BACKWARD and not unit.kept and unit.position > self._next:
            raise PhaseError(
                f"{call}: this microbatch has passed the unit already and expects {self._expected()}; open "
                "each unit once, in reverse order"
            )
        if self.phase == FORWARD:
            self._enter_backward()
        self.wrote = True
        if not unit.kept:
            self._pass_to(unit.position)
            self._advance()
            self._open = self._last = unit
            self.model.reducer.begin(unit, zero)
        self.model.reducer.open(unit)
        self.model.gatherer.ready(unit)

    def close_backward(self, unit: Unit) -> None:
        """The backward of a unit is over: reduce its gradients, release its weights."""
        model = self.model
        model.reducer.close(unit)
        if not unit.kept:
            self._open = None
            model.gatherer.release(unit)
            model.reducer.finish(unit, self._sync)

    def _expected(self) -> str:
        units = self.model.units
        after = f" after {self._last.name!r}" if self._last is not None else ""
        return (
            f"unit {units[self._next].name!r}" if 0 <= self._next < len(units) else "no further unit"
        ) + after

    def _check_closed(self, call: str) -> None:
        if self._open is not None:
            raise PhaseError(f"{call} inside the context of unit {self._open.name!r}; close that one first")

    def require_resting(self, call: str) -> None:
        """PhaseError inside a microbatch."""
        if self.phase != RESTING:
            what = (
                "a forward pass (evaluate)" if self._forward_only else f"{self.phase.lower()} of a microbatch"
            )
            raise PhaseError(f"{call} inside {what}; it belongs outside of microbatches")
