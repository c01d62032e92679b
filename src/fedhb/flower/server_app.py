"""The ServerApp: a census, the engine's own round loop over nodes, and the files of every run.

Run config: `settings` (the text of a settings file), `out` (a folder of the server's machine),
`resume`, and `Rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedhb.engine.loop import State
from fedhb.errors import InputError, reason
from fedhb.evaluation.evaluate import Metrics, Watch, tabulate
from fedhb.evaluation.ledger import evaluated_hash
from fedhb.files import sealed
from fedhb.flower.census import Census
from fedhb.flower.federated_task import FederatedTask, Rules, settings_of
from fedhb.flower.journal import Journal
from fedhb.flower.node_cohort import Federated
from fedhb.flower.roster import Roster
from fedhb.runs.folder import RunFolder
from fedhb.runs.from_settings import make_server_inputs
from fedhb.runs.load import load
from fedhb.runs.run import Run
from fedhb.runs.session import Evaluated, Session

CENSUS = "census.json"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Do a whole run."""
    serve(grid, context.run_config)


def serve(grid: Grid, config: Mapping[str, Any]) -> Run:
    """Do a whole run by its run config. How it ended is in OUT/status.json."""
    rules, out = Rules.of(config), str(config.get("out", ""))
    if not out:
        raise InputError(
            "the run config has no out: give the folder for the results, on the server's machine"
        )
    resume = bool(config.get("resume", False))
    folder = RunFolder(Path(out).absolute())
    folder.claim(resume)
    with folder.locked():
        journal = Journal(folder.path)
        try:
            roster = Roster(grid, rules, journal)
            census = take_census(roster, folder, resume)
            settings = settings_of(config)
            task = FederatedTask.of(settings, census, make_server_inputs(settings))
            session = Session(task, folder, resume)
            host = FlowerHost(session, task, roster)
            if session.finished(host):
                run: Run = load(folder.path, settings.model.name or None)
            else:
                run = session.carry_out(host)
        except BaseException as error:
            journal.stand("failed", reason(error))
            raise
        journal.stand("done")
        return run


class FlowerHost:
    """The host of a session on Flower (runs/session.py): nodes train and evaluate.

    Args:
        session: of the run.
        task: what server and nodes have alike.
        roster: the nodes, the rules they follow, and the journal.
    """

    checkpoint_every = 1
    """A round over a network takes longer than its checkpoint, and clients keep two memories."""

    def __init__(self, session: Session, task: FederatedTask, roster: Roster):
        self.session, self.task, self.roster = session, task, roster

    @property
    def evaluated_hash(self) -> str:
        """A hash of everything that the evaluation's numbers depend on."""
        settings = self.task.settings
        return evaluated_hash(
            self.session.trained_hash, settings.personal_plan, settings.evaluation.split
        )

    def engine(self, state: State) -> Federated:
        """Return the executor: it sends messages to the nodes."""
        rounds, done = self.task.training.rounds, self.session.timetable.rounds_done(state.done)
        self.roster.journal.stand("training", f"{done} of {rounds} rounds are done")
        self.cohort = Federated(
            self.task,
            self.session.algorithm,
            self.session.timetable,
            self.roster,
            state.counted,
        )
        return self.cohort

    def files(self) -> Mapping[str, bytes]:
        """Return the census: a resumed run goes on with the same clients."""
        content = {"census": self.task.census.to_json(), "owners": self.roster.owners}
        return {CENSUS: sealed(content)}

    def evaluate(self, run: Run, watch: Watch) -> Evaluated:
        """Return the metrics that the nodes send."""
        self.roster.journal.stand("evaluating")
        split, census = self.task.settings.evaluation.split, self.task.census
        before, after = self.cohort.evaluate(run, split)
        known = group(census, census.clients, before, after)
        novel = group(census, census.holdout, before, after)
        return Evaluated(split if known else None, known, novel)


def take_census(roster: Roster, folder: RunFolder, resume: bool) -> Census:
    """Return the census; a resumed run has one, and goes on with the nodes that are here."""
    journal = roster.journal
    if resume and (folder.path / CENSUS).exists():
        kept = folder.read_json(CENSUS, required=True)
        roster.owners = {int(client): str(key) for client, key in kept["owners"].items()}
        journal.stand("waiting", "for the nodes of the run that is resumed")
        return Census.read(kept["census"])
    return roster.gather(lambda text: journal.stand("waiting", text))


def group(
    census: Census,
    ids: tuple[int, ...],
    before: Mapping[int, Metrics],
    after: Mapping[int, Metrics],
) -> dict[str, Any] | None:
    """Return the table of these clients, or None where none of them has metrics."""
    held = [k for k, client in enumerate(ids) if client in before]
    if not held:
        return None
    everyone = sorted((*census.clients, *census.holdout))
    names = [census.names[everyone.index(client)] if census.names else client for client in ids]
    return tabulate(names, {k: before[ids[k]] for k in held}, {k: after[ids[k]] for k in held})
