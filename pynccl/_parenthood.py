"""A child that ends when its parent does, however the parent ends. Linux.

Run as a script, it ties itself to the process that started it and then becomes another program:

    python -I -S _parenthood.py PARENT_PID PROGRAM [ARGUMENT ...]
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """From now on the kernel sends SIGKILL to this process when the thread of `parent` that started it ends.

    If `parent` has ended already, this process ends at once: asking for the signal first and looking second
    leaves no moment in which the parent's end is missed. The request outlives exec, not fork.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    # Python ignores these, and what is ignored stays ignored in the next program.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.stderr.write(f"pynccl.launch: cannot run {sys.argv[2]}: {error.strerror}\n")
        # What a shell answers for a command that is not there, or is not a program.
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
