"""What is current in this thread: the open group and the host stream. One flag says whether one is."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .group import Group
    from .streams import Stream


class ThreadState(threading.local):
    """Read by every call. ``busy`` alone decides whether the quick path is open: it costs one look."""

    busy: bool = False
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
        self.busy = group is not None or self.stream is not None

    def set_stream(self, stream: Stream | None) -> None:
        self.stream = stream
        self.busy = stream is not None or self._group is not None


current = ThreadState()
