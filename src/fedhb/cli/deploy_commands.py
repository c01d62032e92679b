"""`fedhb deploy init | config | up`: a federation of real nodes on Flower, made ready and tried."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from fedhb.cli.options import SetOption, with_settings
from fedhb.cli.result_tables import show_result
from fedhb.errors import InputError
from fedhb.runs.settings import Settings, check_tables, read_toml

Deadline = Annotated[
    float | None, typer.Option(help="seconds that nodes have for a round's answers [600]")
]
MinAnswers = Annotated[
    float | None,
    typer.Option(
        "--min-answers",
        help="share of a round's clients that must answer, else it is tried again [0.5]",
    ),
]
Retries = Annotated[int | None, typer.Option(help="how often a failed round is tried again [3]")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="the deployment's folder")]
NO_EFFECT = {"checkpoint_every": "every round is kept", "workers": "each node is a process"}
"""Settings of a simulation alone."""


def register(app: typer.Typer, console: Console, errors: Console) -> None:
    """Add the commands."""
    deploy = typer.Typer(
        help="A federation of real nodes on Flower: make it ready, try it out.",
        no_args_is_help=True,
    )
    app.add_typer(deploy, name="deploy")

    @deploy.command()
    @with_settings
    def init(
        flags: dict[str, Any],
        folder: Folder,
        nodes: Annotated[int, typer.Option(help="number of nodes: a key is made for each")] = 3,
        host: Annotated[
            list[str] | None, typer.Option(help="names and addresses of the server [127.0.0.1]")
        ] = None,
        port: Annotated[int, typer.Option(help="the server's port")] = 8000,
        settings: Annotated[
            Path | None, typer.Option(help="a settings file; flags override it")
        ] = None,
        set_: SetOption = None,
    ) -> None:
        """Write the app, its configuration, certificates and node keys."""
        need_flower()
        from fedhb.flower.deploy import app_files

        chosen = resolve(settings, flags, set_, nodes)
        app_files.init(folder, nodes, host or ["127.0.0.1"], port, chosen)
        console.print(
            f"{folder}: app, settings.toml, run.toml, certificates and {nodes} node keys",
            highlight=False,
            markup=False,
        )
        console.print(
            f"try it here: fedhb deploy up {folder} --nodes {nodes}; on several machines: "
            "docs/deployment.md",
            highlight=False,
        )

    @deploy.command()
    @with_settings
    def config(
        flags: dict[str, Any],
        folder: Folder,
        nodes: Annotated[
            int, typer.Option(help="clients that must be there before the first round")
        ],
        out: Annotated[
            Path | None,
            typer.Option(help="folder for results, on the server's machine [DIR/run]"),
        ] = None,
        resume: Annotated[
            bool, typer.Option("--resume", help="go on where the run in --out stopped")
        ] = False,
        deadline: Deadline = None,
        min_answers: MinAnswers = None,
        retries: Retries = None,
        set_: SetOption = None,
    ) -> None:
        """Write DIR/run.toml, the run config of `flwr run`, from DIR/settings.toml and flags."""
        need_flower()
        from fedhb.flower.deploy import app_files

        chosen = resolve(folder / "settings.toml", flags, set_, nodes)
        target = (out or folder / "run").absolute()
        rules = {"deadline": deadline, "min_answers": min_answers, "retries": retries}
        path = app_files.write_run_config(folder, chosen, run_config(nodes, target, resume, rules))
        start = (
            f"FLWR_HOME={folder.absolute()}/flower flwr run {folder}/app fedhb --run-config {path} "
            "--stream"
        )
        console.print(
            f"{path}: start it with {start}", highlight=False, markup=False, soft_wrap=True
        )

    @deploy.command()
    @with_settings
    def up(
        flags: dict[str, Any],
        folder: Annotated[
            Path,
            typer.Argument(
                metavar="[DIR]", help="the deployment's folder; made where it is absent"
            ),
        ] = Path("runs/federation"),
        nodes: Annotated[int, typer.Option(help="number of nodes: as many clients")] = 3,
        out: Annotated[Path | None, typer.Option(help="folder for results [DIR/run]")] = None,
        resume: Annotated[
            bool, typer.Option("--resume", help="go on where the run in --out stopped")
        ] = False,
        deadline: Deadline = None,
        min_answers: MinAnswers = None,
        retries: Retries = None,
        set_: SetOption = None,
    ) -> None:
        """Run a federation on this machine, show its progress, and stop everything.

        It has a SuperLink with TLS and node authentication, and nodes with keys.
        """
        need_flower()
        from fedhb.flower.deploy import app_files
        from fedhb.flower.deploy.flower_processes import end_in_order
        from fedhb.flower.deploy.local_federation import up as run_up
        from fedhb.runs.progress import RoundProgress

        file = folder / "settings.toml"
        chosen = resolve(file if file.exists() else None, flags, set_, nodes)
        target = (out or folder / "run").absolute()
        rules = {"deadline": deadline, "min_answers": min_answers, "retries": retries}
        values = run_config(nodes, target, resume, rules)
        check_data(chosen, nodes)
        if resume and (result := finished(target, chosen)) is not None:
            console.print(
                f"{target} was finished already: nothing to do", highlight=False, markup=False
            )
            show_result(console, result)
            return
        if not file.exists():
            app_files.init(folder, nodes, ["127.0.0.1"], 8000, chosen)
        app_files.make_missing_keys(folder, nodes)
        if not resume:  # a resumed run may refuse them: they are written once it has not
            app_files.write_settings(folder, chosen)
        bar = RoundProgress(f"{chosen.algorithm} on {nodes} nodes", errors)
        records: list[dict[str, Any]] = []

        def on_round(record: dict[str, Any]) -> None:
            if not records:
                bar.on_start(record["round"] - 1, chosen.training.rounds, record["seconds"])
            records.append(record)
            bar.show(record["round"], record)

        end_in_order()
        try:
            result = run_up(
                folder,
                chosen,
                values,
                node_configs(folder, chosen, nodes),
                lambda text: errors.print(text, markup=False),
                on_round,
            )
        except KeyboardInterrupt:
            words = ["fedhb", "deploy", "up", folder, "--nodes", nodes]
            words += ["--out", out] if out else []
            words += [*as_flags(rules), "--resume"]
            again = escape(shlex.join(map(str, words)))
            errors.print(f"\nstopped; go on with [bold]{again}[/bold]", soft_wrap=True)
            raise
        finally:
            bar.close()
        show_result(console, result)
        console.print(pace(records), highlight=False)
        console.print(
            f"results in {target}; the same run in one process: fedhb train {folder}/settings.toml",
            highlight=False,
            markup=False,
        )


def run_config(nodes: int, target: Path, resume: bool, rules: dict[str, Any]) -> dict[str, Any]:
    """Return the run config beside the settings; refuse rules out of bounds and a used folder.

    Args:
        nodes: the number of clients.
        target: the folder for results.
        resume: go on where the run in it stopped.
        rules: values of `Rules`; None where not given.
    """
    from fedhb.flower.federated_task import Rules
    from fedhb.runs.folder import RunFolder

    given = {key: value for key, value in rules.items() if value is not None}
    Rules(nodes=nodes, **given)  # before anything starts: it knows the bounds
    RunFolder(target).claim(resume)
    return {"nodes": nodes, "out": str(target), "resume": resume, **given}


def node_configs(folder: Path, chosen: Settings, nodes: int) -> list[dict[str, Any]]:
    """Return the config of every node on this machine."""
    file, memory = chosen.data.file, (folder / "memory").absolute()
    shared = {"shared": str(Path(file).absolute())} if file else {}
    return [{"partition-id": k, **shared, "keep": f"{memory}/node-{k}"} for k in range(nodes)]


def check_data(chosen: Settings, nodes: int) -> None:
    """Refuse a file that cannot be read, or has clients without a node, before anything starts."""
    if not chosen.data.file:
        return
    from fedhb.runs.from_settings import make_clients

    count = sum(len(group) for group in make_clients(chosen) if group is not None)
    if count != nodes:
        raise InputError(
            f"--nodes {nodes}, but {chosen.data.file} has {count} clients, each of which needs "
            f"one: give --nodes {count}"
        )


def need_flower() -> None:
    """Refuse to go on where Flower is not installed."""
    if importlib.util.find_spec("flwr") is None:
        raise InputError("Flower is not installed: pip install 'fedhb[flower]'")


def resolve(
    source: Path | None, flags: dict[str, Any], overrides: list[str] | None, nodes: int
) -> Settings:
    """Return the settings of a run on so many nodes.

    All of them take part in every round unless a fraction is given.
    """
    if nodes < 1:
        raise InputError(f"nodes={nodes}: give at least 1")
    if flags.get("num_clients") not in (None, nodes):
        raise InputError(
            f"num_clients={flags['num_clients']} on {nodes} nodes: a node is a client; leave "
            "num_clients out"
        )
    for name, why in NO_EFFECT.items():
        if flags.get(name) is not None:
            raise InputError(
                f"{name}={flags[name]} has no effect on a federation: {why}; leave it out"
            )
    content = read_toml(source) if source is not None else {}
    every = {} if "fraction" in content else {"fraction": 1.0}
    given = {key: value for key, value in flags.items() if value is not None}
    chosen = Settings.resolve(every | content, given, overrides or ())
    check_tables(chosen, overrides or ())
    from fedhb.flower.federated_task import federated

    federated(chosen)
    return chosen.change(num_clients=nodes)


def finished(target: Path, chosen: Settings) -> dict[str, Any] | None:
    """Return the result of this very run, where the folder holds it undamaged."""
    from fedhb.runs.folder import RunFolder

    try:
        result = RunFolder(target).result()
        stored = Settings.resolve(target / "settings.toml", {})
    except InputError:
        return None
    return result if stored == chosen else None


def as_flags(values: dict[str, Any]) -> list[str]:
    """Return the values that are given as words of a command line."""
    return [
        word
        for key, value in values.items()
        if value is not None
        for word in (f"--{key.replace('_', '-')}", str(value))
    ]


def pace(records: list[dict[str, Any]]) -> str:
    """Return how long a round took, and the parts of that time."""
    if not records:
        return "no round was run"
    mean = sum(r["seconds"] for r in records) / len(records)
    work, process = (
        sum(r["node_seconds"].get(f"{part}_seconds", 0.0) for r in records) / len(records)
        for part in ("work", "process")
    )
    start, wait = max(process - work, 0.0), max(mean - process, 0.0)
    return (
        f"a round took {mean:.1f} s: {work:.2f} s of work on the slowest node, {start:.1f} s to "
        f"start its process (Flower starts one per message, which imports torch), {wait:.1f} s of "
        "polling (nodes look for messages every 3 s) and transport"
    )
