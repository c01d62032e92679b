"""The ServerApp: a census, the engine's own round loop over nodes, and the same files as every run of fedhb.

Run config: `settings` (the text of a settings file), `out` (a folder of the server's machine), `resume`, and `Rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedhb.engine.loop import Callback, State
from fedhb.errors import InputError
from fedhb.evaluation.evaluate import tabulate
from fedhb.files import sealed
from fedhb.flower.census import Census
from fedhb.flower.federated_task import Rules, Task, settings_of
from fedhb.flower.journal import Journal
from fedhb.flower.node_cohort import Federated
from fedhb.flower.roster import Roster
from fedhb.runs.description import problem_record
from fedhb.runs.fit import versions
from fedhb.runs.folder import RunFolder
from fedhb.runs.from_settings import make_clients
from fedhb.runs.load import load
from fedhb.runs.run import Run
from fedhb.runs.session import claim, conduct
from fedhb.runs.settings import Settings

CENSUS = "census.json"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """A whole run."""
    serve(grid, context.run_config)


def serve(grid: Grid, config: Mapping[str, Any]) -> Run:
    """A whole run, by its run config. How it ended is in OUT/status.json."""
    settings, rules = settings_of(config), Rules.of(config)
    out = str(config.get("out", ""))
    if not out:
        raise InputError(
            "the run config has no out: give the folder for the results, on the server's machine"
        )
    resume = bool(config.get("resume", False))
    folder = claim(Path(out).absolute(), resume)
    assert folder is not None
    with folder.locked():
        journal = Journal(folder.path)
        try:
            result = federate(grid, settings, rules, folder, resume, journal)
        except BaseException as error:
            journal.stand("failed", str(error) or type(error).__name__)
            raise
        journal.stand("done")
        return result


def federate(
    grid: Grid, settings: Settings, rules: Rules, folder: RunFolder, resume: bool, journal: Journal
) -> Run:
    """A run in a folder that is this process's own."""
    roster = Roster(grid, rules, journal)
    census = take_census(roster, folder, journal, resume)
    task = Task.of(settings, census, server_inputs(settings))
    job = task.job(folder)
    if resume and job.finished(folder):
        found: Run = load(folder.path, settings.model or None)
        return found
    made: list[Federated] = []

    def engine(state: State) -> Federated:
        journal.stand("training", f"{state.done} of {job.training.rounds} rounds are done")
        made.append(Federated(task, job.trained, grid, roster, rules, journal, state.counted))
        return made[0]

    def files(result: Run) -> dict[str, bytes]:
        return {
            "settings.toml": settings.to_toml(versions()).encode(),
            "problem.json": sealed(
                problem_record(result, settings.head or None, settings.batch_norm, task.spec)
            ),
            CENSUS: sealed({"census": census.to_json(), "owners": roster.owners}),
        }

    def evaluation(result: Run) -> dict[str, Any]:
        journal.stand("evaluating")
        before, after = made[0].evaluate(result, settings.evaluate_on)
        known, novel = (
            group(census, ids, before, after) for ids in (census.clients, census.holdout)
        )
        return {"split": settings.evaluate_on if known else None, "known": known, "novel": novel}

    return conduct(
        job,
        engine,
        evaluation,
        files,
        about={"dataset": census.dataset, "data": dict(census.files)},
        folder=folder,
        resume=resume,
        checkpoint_every=1,  # a round over a network takes longer than its checkpoint, and clients keep two memories
        progress=True,
        callbacks=[_Later(made)],
    )


class _Later(Callback):
    """Tells the executor of every round; it is made only once the run's state is known."""

    def __init__(self, made: list[Federated]):
        self.made = made

    def on_round(self, record: dict[str, Any], state: State) -> None:
        """Pass it on."""
        self.made[0].on_round(record, state)


def take_census(roster: Roster, folder: RunFolder, journal: Journal, resume: bool) -> Census:
    """Count the nodes; a resumed run has been counted already, and goes on with the nodes that are here."""
    if resume and (folder.path / CENSUS).exists():
        kept = folder.read_json(CENSUS, required=True)
        roster.owners = {int(client): str(key) for client, key in kept["owners"].items()}
        journal.stand("waiting", "for the nodes of the run that is resumed")
        return Census.read(kept["census"])
    return roster.gather(lambda text: journal.stand("waiting", text))


def server_inputs(settings: Settings) -> Any:
    """The unlabelled inputs that the server holds, of a named data set."""
    return make_clients(settings)[0].server_inputs if settings.server_share else None


def group(
    census: Census, ids: tuple[int, ...], before: Mapping[int, Any], after: Mapping[int, Any]
) -> dict[str, Any] | None:
    """The table of these clients, or None where none of them has metrics."""
    held = [k for k, client in enumerate(ids) if client in before]
    if not held:
        return None
    everyone = sorted((*census.clients, *census.holdout))
    who = [census.names[everyone.index(client)] if census.names else client for client in ids]
    return tabulate(who, {k: before[ids[k]] for k in held}, {k: after[ids[k]] for k in held})
