"""What is current in this thread: the open group and the host stream. One flag says whether one is."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .group import Group
    from .streams import Stream


class ThreadState(threading.local):
    """Read by every call. ``busy`` alone decides whether the quick path is open: it costs one look."""

    busy: bool = False
    group: Group | None = None
    stream: Stream | None = None

    def set_group(self, group: Group | None) -> None:
        self.group = group
        self.busy = group is not None or self.stream is not None

    def set_stream(self, stream: Stream | None) -> None:
        self.stream = stream
        self.busy = stream is not None or self.group is not None


current = ThreadState()
