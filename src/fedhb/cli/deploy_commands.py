"""`fedhb deploy init | config | up`: a federation of real nodes on Flower, made ready and tried out."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from fedhb.cli.options import SetOption, with_settings
from fedhb.errors import InputError
from fedhb.runs.settings import Settings, own_tables, read_toml

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


def register(
    app: typer.Typer, console: Console, errors: Console, show: Callable[..., None]
) -> None:
    """Add the commands to the command line."""
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
            f"try it here: fedhb deploy up {folder} --nodes {nodes}; on several machines: docs/deployment.md",
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
        from fedhb.flower.federated_task import Rules
        from fedhb.runs.session import claim

        chosen = resolve(folder / "settings.toml", flags, set_, nodes)
        rules = given(deadline=deadline, min_answers=min_answers, retries=retries)
        Rules(nodes=nodes, **rules)
        target = (out or folder / "run").absolute()
        claim(target, resume)
        values = {"nodes": nodes, "out": str(target), "resume": resume, **rules}
        path = app_files.write_run_config(folder, chosen, values)
        start = f"FLWR_HOME={folder.absolute()}/flower flwr run {folder}/app fedhb --run-config {path} --stream"
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
        """Start a SuperLink with TLS and node authentication and nodes on this machine, run, show progress, stop everything."""
        need_flower()
        from fedhb.flower.deploy import app_files, certificates
        from fedhb.flower.deploy.flower_processes import end_in_order
        from fedhb.flower.deploy.local_federation import up as run_up
        from fedhb.flower.federated_task import Rules
        from fedhb.runs.progress import RoundProgress
        from fedhb.runs.session import claim

        file = folder / "settings.toml"
        chosen = resolve(file if file.exists() else None, flags, set_, nodes)
        rules = given(deadline=deadline, min_answers=min_answers, retries=retries)
        Rules(nodes=nodes, **rules)  # before anything starts: it knows the bounds
        target = (out or folder / "run").absolute()
        claim(target, resume)
        check_data(chosen, nodes)
        if resume and (done := finished(target, chosen)) is not None:
            console.print(
                f"{target} was finished already: nothing to do", highlight=False, markup=False
            )
            show(done)
            return
        if not file.exists():
            app_files.init(folder, nodes, ["127.0.0.1"], 8000, chosen)
        for k in range(nodes):
            if not (folder / "keys" / f"node-{k}").exists():
                certificates.make_node_key(folder / "keys" / f"node-{k}")
        if not resume:  # a run that goes on may refuse them: they are written once it has not
            app_files.write_settings(folder, chosen)
        shared = {"shared": str(Path(chosen.data).absolute())} if chosen.data else {}
        keep = {"keep": str((folder / "memory").absolute())}
        configs = [
            {"partition-id": k, **shared, "keep": f"{keep['keep']}/node-{k}"} for k in range(nodes)
        ]
        bar = RoundProgress(f"{chosen.algorithm} on {nodes} nodes", errors)
        state: dict[str, Any] = {"records": []}

        def on_round(record: dict[str, Any]) -> None:
            if not state["records"]:
                bar.on_start(record["round"] - 1, chosen.rounds, record["seconds"])
            state["records"].append(record)
            bar.show(record["round"], record)

        values = {"nodes": nodes, "out": str(target), "resume": resume, **rules}
        end_in_order()
        try:
            result = run_up(
                folder,
                chosen,
                values,
                configs,
                lambda text: errors.print(text, markup=False),
                on_round,
            )
        except KeyboardInterrupt:
            words = [
                "fedhb",
                "deploy",
                "up",
                folder,
                "--nodes",
                nodes,
                *(["--out", out] if out else []),
                *as_flags(rules),
            ]
            again = escape(shlex.join(map(str, [*words, "--resume"])))
            errors.print(f"\nstopped; go on with [bold]{again}[/bold]", soft_wrap=True)
            raise
        finally:
            bar.on_end()
        show(result)
        console.print(pace(state["records"]), highlight=False)
        console.print(
            f"results in {target}; the same run in one process: fedhb train {folder}/settings.toml",
            highlight=False,
            markup=False,
        )


def check_data(chosen: Settings, nodes: int) -> None:
    """Refuse a file that cannot be read, or has clients that would have no node, before anything starts."""
    if not chosen.data:
        return
    from fedhb.runs.from_settings import make_clients

    groups = make_clients(chosen)
    count = sum(len(group) for group in groups if group is not None)
    if count != nodes:
        raise InputError(
            f"--nodes {nodes}, but {chosen.data} has {count} clients, each of which needs one: give --nodes {count}"
        )


def need_flower() -> None:
    """Refuse politely where Flower is not installed."""
    import importlib.util

    if importlib.util.find_spec("flwr") is None:
        raise InputError("Flower is not installed: pip install 'fedhb[flower]'")


def resolve(
    source: Path | None, flags: dict[str, Any], overrides: list[str] | None, nodes: int
) -> Settings:
    """The settings of a run on so many nodes. All of them take part in every round unless a fraction is given."""
    if nodes < 1:
        raise InputError(f"nodes={nodes}: give at least 1")
    if flags.get("num_clients") not in (None, nodes):
        raise InputError(
            f"num_clients={flags['num_clients']} on {nodes} nodes: a node is a client; leave num_clients out"
        )
    for name, why in NO_EFFECT.items():
        if flags.get(name) is not None:
            raise InputError(
                f"{name}={flags[name]} has no effect on a federation: {why}; leave it out"
            )
    content = read_toml(source) if source is not None else {}
    every = {} if "fraction" in content else {"fraction": 1.0}
    own = {key: value for key, value in flags.items() if value is not None}
    chosen = Settings.resolve(every | content, own, overrides or ())
    own_tables(chosen, overrides or ())
    from fedhb.flower.federated_task import federated

    federated(chosen)
    return replace(chosen, num_clients=nodes)


def finished(target: Path, chosen: Settings) -> dict[str, Any] | None:
    """The result of this very run, where the folder holds it undamaged."""
    from fedhb.runs.folder import RunFolder

    try:
        result = RunFolder(target).result()
        held = Settings.resolve(target / "settings.toml", {})
    except InputError:
        return None
    return result if held == chosen else None


NO_EFFECT = {"checkpoint_every": "every round is kept", "workers": "each node is a process"}
"""Settings of a simulation alone."""


def given(**values: Any) -> dict[str, Any]:
    """Those that were given."""
    return {key: value for key, value in values.items() if value is not None}


def as_flags(values: dict[str, Any]) -> list[str]:
    """The same as words of a command line."""
    return [
        word for key, value in values.items() for word in (f"--{key.replace('_', '-')}", str(value))
    ]


def pace(records: list[dict[str, Any]]) -> str:
    """How long a round took, and what of it was what."""
    if not records:
        return "no round was run"
    mean = sum(r["seconds"] for r in records) / len(records)
    work, process = (
        sum(r["node_seconds"].get(f"{what}_seconds", 0.0) for r in records) / len(records)
        for what in ("work", "process")
    )
    start, wait = max(process - work, 0.0), max(mean - process, 0.0)
    return (
        f"a round took {mean:.1f} s: {work:.2f} s of work on the slowest node, {start:.1f} s to start its process (Flower starts "
        f"one per message, which imports torch), {wait:.1f} s of polling (nodes look for messages every 3 s) and transport"
    )
