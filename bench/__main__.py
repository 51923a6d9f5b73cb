"""`python -m bench` lists what can be run, one line each; `python -m bench NAME ...` runs one.

`python -m bench all_reduce_perf -g 2` (or `all_reduce`) is `python -m bench.all_reduce_perf -g 2`.
"""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main", "programs"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 2 for a name that is none. A program ends the process with its own status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    known = programs()
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, known))
        for name, summary in known.items():
            print(f"{name:{width}}  {summary}")
        print("\nRun one with `python -m bench NAME [options]`; its options: `python -m bench NAME -h`.")
        return 0
    name = arguments[0] if arguments[0] in known else f"{arguments[0]}_perf"
    if name not in known:
        print(f"bench: {arguments[0]!r} is no program; one of {', '.join(known)}", file=sys.stderr)
        return 2
    sys.argv = [f"python -m bench.{name}", *arguments[1:]]
    runpy.run_module(f"bench.{name}", run_name="__main__", alter_sys=True)
    return 0


def programs() -> dict[str, str]:
    """Every module here that can be run, with the first line of what it says of itself: sweeps first."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py"), key=_sweeps_first):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if path.name != Path(__file__).name and any(map(_is_main_guard, tree.body)):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def _sweeps_first(path: Path) -> tuple[bool, str]:
    return not path.stem.endswith("_perf"), path.stem


def _is_main_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'"


if __name__ == "__main__":
    sys.exit(main())
