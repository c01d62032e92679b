"""The part that W1 and W2 share: all contenders on one task, and the table of their times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from fedhb.clients.clients import Clients
from fedhb.engine.cohort import cores
from fedhb_paper.bench.bench_task import Task
from fedhb_paper.bench.flower_peer import Flower, missing
from fedhb_paper.bench.measure import REFERENCE, alternate, best_of, compare, over
from fedhb_paper.bench.ours import Ours
from fedhb_paper.bench.peers import PlainTorch, agreement
from fedhb_paper.bench.processes import Tell

OURS = ("fedavg", "fedbabu", "niw", "mixture")
MEANING = {
    "plain_torch_1": "plain PyTorch, one client after another, 1 thread",
    "plain_torch_best": "plain PyTorch, on 1 thread or all cores, whichever is faster",
    "handwritten": "FedAvg by hand, all cores: the limit",
    "fedavg": "fedhb, FedAvg",
    "fedbabu": "fedhb, FedBABU",
    "niw": "fedhb, NIW",
    "mixture": "fedhb, Mixture with two prototypes",
    "flower": "Flower's simulation on Ray, FedAvg",
}


def side_by_side(
    task: Task,
    clients: Clients,
    limits: Mapping[str, Callable[[], Any]],
    repeats: int,
    tell: Tell,
    *,
    settle: bool,
    scale: float = 1.0,
) -> dict[str, Any]:
    """Measure all contenders in turn.

    Args:
        task, clients: what is trained.
        limits: functions that make the variants of the hand-written contender, by name.
        repeats: timed rounds of every contender.
        tell: is told of the progress.
        settle: whether a round before each timed one fills the caches (see `alternate`).
        scale: a factor of all seconds.
    """
    notes = []
    contenders: dict[str, Any] = {}
    try:
        # processes are forked first: a fork after the first use of a second thread may hang
        tell(0.0, "starting the contenders")
        contenders |= {name: Ours(name, task, clients) for name in OURS}
        contenders |= {name: make() for name, make in limits.items()}
        for threads in sorted({1, cores()}):
            contenders[f"plain_torch_{threads}"] = PlainTorch(task, clients, threads)
        left_out = missing()
        if left_out is None:
            try:
                contenders["flower"] = Flower(task)
            except RuntimeError as error:  # the others' numbers are worth having without it
                left_out = f"flower left out: {error}"
        if left_out is not None:
            notes.append(left_out)
        for contender in contenders.values():
            contender()
        reference = contenders[REFERENCE].weights()
        alike = {
            name: agreement(contenders[name].weights(), reference) for name in ("fedavg", *limits)
        }
        seconds = alternate(contenders, repeats, tell, settle=settle)
    finally:
        for contender in contenders.values():
            contender.close()
    variants = {
        name: values
        for name, values in seconds.items()
        if name in limits or name.startswith("plain_torch_")
    }
    best = {
        "plain_torch_best": best_of(seconds, [name for name in variants if name not in limits]),
        "handwritten": best_of(seconds, list(limits)),
    }
    chosen = {
        REFERENCE: seconds[REFERENCE],
        **{name: seconds[variant] for name, variant in best.items()},
    }
    chosen |= {name: seconds[name] for name in (*OURS, "flower") if name in seconds}
    results = compare(chosen, scale)
    results["variants"] = compare(variants, scale) | {"best": best}
    results["niw_over_fedbabu"] = over(seconds, "niw", "fedbabu")
    results["mixture_over_fedbabu"] = over(seconds, "mixture", "fedbabu")
    results["agreement"] = alike
    if "flower" in contenders:
        results["flower_startup"] = contenders["flower"].startup
    return results | {"repeats": repeats, "notes": notes}


def table(results: Mapping[str, Any], title: str) -> Table:
    """Return a table of the contenders: seconds a round, and the ratio to plain PyTorch."""
    caption = [
        f"{name} over FedBABU: {results[f'{name}_over_fedbabu']['ratio']:.2f}"
        for name in ("niw", "mixture")
    ]
    if "flower_startup" in results:
        caption.append(f"Flower's start-up: {results['flower_startup']:.1f} s")
    caption.append(
        "fedavg's weights differ from plain PyTorch's by up to "
        f"{results['agreement']['fedavg']:.0e} after a round"
    )
    shown = Table(
        "contender",
        "",
        title=title,
        caption="; ".join(caption) + "".join(f"\n{escape(note)}" for note in results["notes"]),
    )
    for header in ("seconds a round", "ratio to plain", "quartiles"):
        shown.add_column(header, justify="right")
    for name, about in MEANING.items():
        if name in results:
            low, high = results["spread"][name]
            shown.add_row(
                name,
                about,
                f"{results[name]:.4f}",
                f"{results['ratio'][name]:.2f}",
                f"{low:.2f} .. {high:.2f}",
            )
    return shown
