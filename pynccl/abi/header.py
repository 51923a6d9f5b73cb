"""Compare ``nccl.h`` with this package's tables: ``python -m pynccl.abi.header [nccl.h]`` prints every
difference.

Owned here: reading the header's declarations, as far as NCCL's style of writing them goes. Both sides become
one flat mapping from a fact ("function ncclSend", "ncclConfig_t member 4") to its text, so that nothing can
differ unseen: functions, arguments, enumerators, constants, structure members, initialisers, opaque handles.
This is what to run first when a new NCCL is out.
"""

from __future__ import annotations

import ast
import ctypes
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pynccl.abi.enums import CONSTANTS, ENUMS, INT_MAX, INT_MIN
from pynccl.abi.prototypes import PROTOTYPES
from pynccl.abi.types import C_TYPES, STRUCTS, Versioned

Facts = dict[str, str]


def differences(header: str) -> list[str]:
    """Every fact in which the header's text and the tables disagree; empty when they are the same."""
    theirs, ours = header_facts(header), table_facts()
    return [
        f"{fact}: the header has {theirs.get(fact, 'nothing')}, the tables have {ours.get(fact, 'nothing')}"
        for fact in sorted(theirs.keys() | ours.keys())
        if theirs.get(fact) != ours.get(fact)
    ]


def installed_header() -> Path:
    """The ``nccl.h`` that cuda-pathfinder finds, such as a wheel's. FileNotFoundError if there is none."""
    from cuda.pathfinder import find_nvidia_header_directory

    folder = find_nvidia_header_directory("nccl")
    if folder is None:
        raise FileNotFoundError("no nccl.h found; pip install nvidia-nccl-cu12, or give the path of a header")
    return Path(folder) / "nccl.h"


# --- the tables' side ---------------------------------------------------------------------------------------


def table_facts() -> Facts:
    """What the tables say, as facts."""
    facts: Facts = {}
    for prototype in PROTOTYPES.values():
        arguments = ", ".join(f"{arg.text} {arg.name}" for arg in prototype.args)
        for prefix in ("", "p"):  # every function has an alias for profilers
            facts[f"function {prefix}{prototype.name}"] = f"{prototype.result} ({arguments})"
    for enum, members in ENUMS.items():
        facts |= {f"{enum}.{name}": str(int(value)) for name, value in members.items()}
    facts |= {f"constant {name}": _value(value) for name, value in CONSTANTS.items()}
    for name, struct in STRUCTS.items():
        facts |= _numbered(f"{name} member", _members(struct))
        if issubclass(struct, Versioned):
            initial = (f"sizeof({name})" if f.name == "size" else _value(f.initial) for f in struct.FIELDS)
            facts |= _numbered(f"{struct.INITIALIZER} value", initial)
    handles = [
        name for name, ctype in C_TYPES.items() if ctype is ctypes.c_void_p and name.startswith("nccl")
    ]
    return facts | {f"handle {name}": "opaque" for name in handles}


# Structures without a table of fields: ctypes type -> C text.
_TEXT: Mapping[Any, str] = {
    ctypes.c_int: "int",
    ctypes.c_char_p: "const char*",
    ctypes.c_void_p: "void*",
    ctypes.POINTER(STRUCTS["ncclConfigExt_t"]): "ncclConfigExt_t*",
}


def _members(struct: type[ctypes.Structure | ctypes.Union], prefix: str = "") -> Iterator[str]:
    if issubclass(struct, Versioned):
        yield from (f"{field.c_type} {field.name}" for field in struct.FIELDS)
        return
    for name, ctype in ((row[0], row[1]) for row in struct._fields_):
        if issubclass(ctype, (ctypes.Structure, ctypes.Union)):
            yield from _members(ctype, f"{prefix}{name}.")
        elif issubclass(ctype, ctypes.Array):
            yield f"char {prefix}{name}[{ctype._length_}]"
        else:
            yield f"{_TEXT[ctype]} {prefix}{name}"


# --- the header's side --------------------------------------------------------------------------------------


def header_facts(text: str) -> Facts:
    """What the header's text says, as facts. ValueError for a value that cannot be understood."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL).replace("\\\n", " ")
    defines = dict(
        re.findall(r"^[ \t]*#[ \t]*define[ \t]+(NCCL_\w+)[ \t]+(\S[^\n]*)$", text, flags=re.MULTILINE)
    )
    code = " ".join(re.sub(r"^[ \t]*#[^\n]*$", "", text, flags=re.MULTILINE).split())

    facts: Facts = {}
    for name, value in defines.items():
        if name.endswith("_INITIALIZER"):
            facts |= _numbered(f"{name} value", (_initial(item, defines, code) for item in _items(value)))
        else:
            facts[f"constant {name}"] = _value(_evaluate(value, defines))
    for result, name, arguments in re.findall(
        r"(ncclResult_t|const char\*|void) +(p?nccl\w+) ?\(([^()]*)\) ?;", code
    ):
        listed = ", ".join(
            _declarator(argument) for argument in arguments.split(",") if argument.strip() != "void"
        )
        facts[f"function {name}"] = f"{result} ({listed})"
    facts |= {f"{enum}.{name}": str(value) for enum, name, value in _enumerators(code, defines)}
    for tag, body, name in re.findall(r"typedef struct ?(\w*) ?\{((?:[^{}]|\{[^{}]*\})*)\} ?(\w+) ?;", code):
        renamed = re.sub(rf"\bstruct {tag}\b", name, body) if tag else body
        facts |= _numbered(f"{name} member", _struct_members(renamed, defines))
    return facts | {
        f"handle {name}": "opaque" for name in re.findall(r"typedef struct \w+ ?\* ?(\w+) ?;", code)
    }


def _declarator(text: str) -> str:
    """One argument or member with the star at the type: ``void *ptr`` and ``void* ptr`` are the same."""
    return re.sub(r" ?(\*+) ?(?=\w)", r"\1 ", " ".join(text.split()))


def _struct_members(body: str, defines: Mapping[str, str]) -> Iterator[str]:
    for inner, owner, plain in re.findall(r"(?:struct|union) ?\{([^{}]*)\} ?(\w+) ?;|([^;{}]+);", body):
        if plain.strip():
            yield re.sub(r"\[(\w+)\]", lambda m: f"[{_evaluate(m[1], defines)}]", _declarator(plain))
        for member in _struct_members(inner, defines):
            c_type, name = member.rsplit(" ", 1)
            yield f"{c_type} {owner}.{name}"


def _enumerators(code: str, defines: Mapping[str, str]) -> Iterator[tuple[str, str, int]]:
    for body, enum in re.findall(r"typedef enum ?\{([^{}]*)\} ?(\w+) ?;", code):
        following = 0
        for name, _, value in (item.partition("=") for item in body.split(",") if item.strip()):
            number = _evaluate(value, defines) if value else following
            if not isinstance(number, int):
                raise ValueError(f"{enum}.{name.strip()} = {value.strip()}: not an integer")
            following = number + 1
            yield enum, name.strip(), number


def _items(initializer: str) -> list[str]:
    return [item.strip() for item in initializer.strip().strip("{}").split(",") if item.strip()]


def _initial(item: str, defines: Mapping[str, str], code: str) -> str:
    if item.startswith("sizeof"):
        return item
    named = {name: str(value) for _, name, value in _enumerators(code, defines)}
    return _value(_evaluate(item, {**named, **defines}))


_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def _evaluate(text: str, defines: Mapping[str, str]) -> int | float | str | None:
    """The value of a C constant expression of the few kinds that the header uses."""
    text = re.sub(r"sizeof\(\w+\)", "4", text.strip())  # only enums are measured inside an expression
    text = re.sub(r"(\d\.\d+)f\b", r"\1", text)

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Name):
            if node.id in _NAMED:
                return _NAMED[node.id]
            if node.id in defines:
                return _evaluate(defines[node.id], defines)
        raise ValueError(f"cannot tell the value of {text!r} in the header")

    return value(ast.parse(text, mode="eval").body)


_NAMED: Mapping[str, int | None] = {"INT_MIN": INT_MIN, "INT_MAX": INT_MAX, "NULL": None}


def _value(value: int | float | str | None) -> str:
    return "NULL" if value is None else repr(int(value) if isinstance(value, int) else value)


def _numbered(what: str, items: Any) -> Facts:
    return {f"{what} {index}": item for index, item in enumerate(items)}


def main(arguments: list[str]) -> int:
    path = Path(arguments[0]) if arguments else installed_header()
    found = differences(path.read_text())
    print("\n".join(found) if found else f"{path}: no difference in {len(table_facts())} facts")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
