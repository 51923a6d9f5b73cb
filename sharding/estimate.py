"""What training a model of some size would cost on each rank, with no arrays: every strategy side by side.

    python -m sharding.estimate --params 7e9 --ranks 8 --layers 32
    python -m sharding.estimate --params 70e9 --layers 80 --ranks 8 --param-dtype bfloat16 --json

The model is `--layers` equal units. The formulae are those of `sharding.report` (its docstring has the
table): with P parameters, N ranks and AdamW, in float32

    no_shard 16 P,   shard_optimizer 8 P + 8 P/N,   shard_grad_op 4 P + 12 P/N,   full_shard 16 P/N

bytes of state, and with 16-bit weights and gradients (reduce="bfloat16") and float32 masters

    no_shard 16 P,   shard_optimizer 4 P + 12 P/N,   shard_grad_op 2 P + 14 P/N,   full_shard 16 P/N,

beside two units of weights and two of gradients that live while they are computed with. Sent per step and
rank, x (N - 1)/N, for m microbatches, in elements: 2 P, 2 P, (m + 1) P, 3 m P.

Gradients are taken to be as wide as the weights (`--reduce-dtype` says otherwise: MixedPrecision's own
default is float32, which costs another 2 P/N with 16-bit weights). Activations are not counted: they depend
on the model, not on its sharding.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from .layout import Layout, Spec, plan
from .policy import STRATEGIES, MixedPrecision, Strategy
from .report import SLOTS, Report, Setting, human, predict, render

__all__ = ["estimate", "main"]

_WIDE = ("float32", "float64")
_DTYPES = ("bfloat16", "float16", *_WIDE)


def estimate(
    params: float,
    ranks: int,
    *,
    layers: int = 32,
    param_dtype: str = "float32",
    reduce_dtype: str | None = None,
    master_dtype: str | None = None,
    optimizer: str = "adamw",
    microbatches: int = 1,
    mesh: tuple[int, int] | None = None,
    reshard_after_forward: bool | int = True,
) -> dict[str, Report]:
    """A report for each strategy, by its name. `mesh` (replicate, shard) is for hybrid_shard.

    ValueError names what cannot be: fewer parameters than layers, a mesh of another number of ranks.
    """
    total = round(params)
    if ranks < 1 or layers < 1 or microbatches < 1 or total < layers:
        raise ValueError(
            f"estimate: params={params:g}, layers={layers}, ranks={ranks}, microbatches={microbatches}; "
            "expected at least one of each, and a parameter for every layer"
        )
    if optimizer not in SLOTS:
        raise ValueError(f"estimate: optimizer={optimizer!r}; use one of {', '.join(SLOTS)}")
    mesh = mesh or _default_mesh(ranks)
    if mesh[0] * mesh[1] != ranks or min(mesh) < 1:
        raise ValueError(f"estimate: mesh {mesh[0]}x{mesh[1]} is not of {ranks} ranks")
    if master_dtype is None:
        master_dtype = param_dtype if param_dtype in _WIDE else "float32"
    precision = MixedPrecision(
        param=param_dtype, reduce=reduce_dtype or param_dtype, gather=param_dtype, master=master_dtype
    )
    reports = {}
    for strategy in STRATEGIES.values():
        replicate, shard = _sizes(strategy, ranks, mesh)
        setting = Setting(
            strategy, shard, replicate, reshard_after_forward, precision, slots=SLOTS[optimizer]
        )
        reports[strategy.name] = predict(
            _layout(total, layers, param_dtype, shard), setting, microbatches=microbatches
        )
    return reports


def _default_mesh(ranks: int) -> tuple[int, int]:
    """Two groups if they are equal, else one."""
    return (2, ranks // 2) if ranks % 2 == 0 else (1, ranks)


def _sizes(strategy: Strategy, ranks: int, mesh: tuple[int, int]) -> tuple[int, int]:
    if strategy.name == "hybrid_shard":
        return mesh
    return (1, ranks) if strategy.shards else (ranks, 1)


def _layout(total: int, layers: int, dtype: str, shards: int) -> Layout:
    sizes = [(total * (k + 1)) // layers - (total * k) // layers for k in range(layers)]
    specs = [Spec(f"layers.{k}.w", (size,), dtype) for k, size in enumerate(sizes)]
    units = [f"layers.{k}" for k in range(layers)]
    return plan(specs, {spec.name: unit for spec, unit in zip(specs, units, strict=True)}, units, shards)


# --- the command line ---------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for misuse."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        reports = estimate(
            options.params,
            options.ranks,
            layers=options.layers,
            param_dtype=options.param_dtype,
            reduce_dtype=options.reduce_dtype,
            master_dtype=options.master_dtype,
            optimizer=options.optimizer,
            microbatches=options.microbatches,
            mesh=options.mesh,
        )
    except ValueError as error:
        parser.error(str(error))
    if options.json:
        described = {
            name: getattr(options, name)
            for name in ("params", "ranks", "layers", "param_dtype", "optimizer", "microbatches")
        }
        strategies = {name: _brief(report) for name, report in reports.items()}
        print(json.dumps({**described, "strategies": strategies}, indent=1))
    else:
        print(_text(options, reports))
    return 0


def _brief(report: Report) -> dict[str, object]:
    """The units are equal: the largest stands for all."""
    found = report.to_dict()
    units = found.pop("units")
    return {
        **found,
        "state_and_live_bytes": report.total.state + report.total.live,
        "unit": max(units, key=lambda unit: unit["parameters"]),
    }


def _text(options: argparse.Namespace, reports: dict[str, Report]) -> str:
    sizes_of = ("weights", "gradients", "optimizer", "state", "live", "together", "sent/step")
    rows: list[Sequence[str]] = [("strategy", "ZeRO", "mesh", *sizes_of)]
    for name, report in reports.items():
        total, setting = report.total, report.setting
        sizes = (total.weights, total.gradients, total.optimizer, total.state, total.live)
        rows.append(
            (
                name,
                str(setting.strategy.zero),
                f"{setting.replicate_size}x{setting.shard_size}",
                *map(human, (*sizes, total.state + total.live, total.bytes_sent)),
            )
        )
    head = (
        f"{options.params:g} parameters in {options.layers} units on {options.ranks} ranks, "
        f"{options.param_dtype} (gradients reduced in {options.reduce_dtype or options.param_dtype}), "
        f"{options.optimizer}, {options.microbatches} microbatch(es) a step; on each "
        "rank (1 GB = 1e9 bytes)"
    )
    return "\n".join([head, *render(rows, rule_before=(1,)), "without activations"])


def _mesh(text: str) -> tuple[int, int]:
    replicate, _, shard = text.partition("x")
    return int(replicate), int(shard)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sharding.estimate",
        description="Memory and traffic of each strategy on each rank, without any arrays.",
    )
    parser.add_argument("--params", type=float, required=True, help="parameters of the model, as in 7e9")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--layers", type=int, default=32, help="equal units (default 32)")
    parser.add_argument("--param-dtype", choices=_DTYPES, default="float32", help="weights, as computed with")
    parser.add_argument("--reduce-dtype", choices=_DTYPES, help="gradients (default: as the weights)")
    parser.add_argument("--master-dtype", choices=_DTYPES, help="what is updated (default: float32 or wider)")
    parser.add_argument("--optimizer", choices=sorted(SLOTS), default="adamw")
    parser.add_argument("--microbatches", type=int, default=1, help="in a step, each reduced (default 1)")
    parser.add_argument("--mesh", type=_mesh, help="for hybrid_shard: REPLICATExSHARD (default: two groups)")
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
