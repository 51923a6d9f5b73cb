"""What is current in this thread: the open group and the host stream."""

from __future__ import annotations

import threading
import weakref
from threading import get_ident
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .group import Group
    from .streams import Stream


busy: set[int] = set()
"""The threads that have a group open or a stream. The quick path of calls is closed to them; every call looks
here, and to look whether there are any at all takes a quarter of what `threading.local` does."""


class ThreadState(threading.local):
    """One for each thread."""

    stream: Stream | None = None
    _group: weakref.ref[Group] | None = None

    @property
    def group(self) -> Group | None:
        """The open one. Its block alone keeps it alive: Ctrl-C can end a block before it has said so here."""
        opened = None if self._group is None else self._group()
        if opened is None and self._group is not None:
            self.set_group(None)
        return opened

    def set_group(self, group: Group | None) -> None:
        self._group = None if group is None else weakref.ref(group)
        self._say_busy()

    def set_stream(self, stream: Stream | None) -> None:
        self.stream = stream
        self._say_busy()

    @property
    def busy(self) -> bool:
        """Whether there is either."""
        return get_ident() in busy

    def _say_busy(self) -> None:
        (busy.discard if self.stream is None and self._group is None else busy.add)(get_ident())


current = ThreadState()
