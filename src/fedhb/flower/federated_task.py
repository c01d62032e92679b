"""Makes the same task on the server and on the nodes, from the run's settings and the census."""

from __future__ import annotations

import hashlib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from fedhb import data
from fedhb.algorithms import Algorithm, Arrays, Federation, Problem
from fedhb.algorithms.contract import Steps
from fedhb.engine.timetable import Stage, Timetable
from fedhb.errors import InputError
from fedhb.flower.census import Census
from fedhb.likelihood import Categorical, Likelihood
from fedhb.network import nets
from fedhb.network.factory import check_model, regression
from fedhb.network.vectors import Network
from fedhb.runs.from_settings import algorithm_of, model_of
from fedhb.runs.session import Task
from fedhb.runs.settings import Section, Settings
from fedhb.seeding import Randomness
from fedhb.settings_fields import convert, setting


def _positive(default: float, help: str) -> Any:
    return setting(default, help, positive=True, below=math.inf)


@dataclass(frozen=True)
class Rules(Section):
    """How a federation is run: the run config beside its settings."""

    nodes: int = setting(2, "clients that must be there before the first round", least=1)
    deadline: float = _positive(600.0, "seconds that a round's nodes have for their answers")
    min_answers: float = setting(
        0.5,
        "share of a round's cohort that must answer; with fewer the round is tried again",
        positive=True,
        most=1,
    )
    retries: int = setting(3, "how often a failed round is tried again", least=0)
    patience: float = _positive(600.0, "seconds to wait for the nodes before the first round")
    poll: float = _positive(0.25, "seconds between looks for answers")
    max_growth: float = _positive(
        100.0, "a vector of an answer may be this many times as long as those before"
    )

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Rules:
        """Return the rules in a run config, whose keys have hyphens."""
        defaults = {about.name: about.default for about in fields(cls)}
        given = {
            name: config[name.replace("_", "-")]
            for name in defaults
            if name.replace("_", "-") in config
        }
        return cls(**{name: convert(name, value, defaults[name]) for name, value in given.items()})

    def needed(self, cohort: int) -> int:
        """Return how many of a cohort must answer."""
        return max(1, math.ceil(self.min_answers * cohort - 1e-9))


def settings_of(config: Mapping[str, Any]) -> Settings:
    """Return the run's settings, which its run config holds as the text of a settings file."""
    try:
        content = tomllib.loads(str(config.get("settings", "")))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the run config's settings are not TOML: {error}") from None
    return Settings.resolve(content, {})


def federated(settings: Settings) -> Algorithm:
    """Return the algorithm of a federation; refuse settings that no federation can have."""
    algorithm = algorithm_of(settings)
    if algorithm.pools:
        raise InputError(
            f"{algorithm.name} pools its clients' data, which a federation keeps apart: use fedhb "
            "train"
        )
    if not settings.data.file:
        data.check_name(settings.data.dataset)
    if settings.model.name and ":" not in settings.model.name:
        nets.check_name(settings.model.name)
    return algorithm


@dataclass(frozen=True)
class FederatedTask(Task):
    """The task of a run, as server and nodes see it.

    Attributes:
        census: what the server knows of its clients.
    """

    census: Census = field(kw_only=True)

    @classmethod
    def of(
        cls, settings: Settings, census: Census, server_inputs: Tensor | None = None
    ) -> FederatedTask:
        """Return the task of these settings for these clients."""
        algorithm, specimen = federated(settings), census.specimen()
        clients = replace(specimen, files=census.files, augment=census.augment or None)
        model = model_of(settings, clients)
        network = Network(
            model.module,
            head=model.head,
            batch_norm=settings.model.batch_norm,
            scaling=clients.scaling,
        )
        likelihood: Likelihood
        if census.num_classes:
            likelihood = Categorical(census.num_classes)
        else:
            likelihood = regression(network, clients, census.num_targets, *census.targets)
        check_model(network, likelihood, clients)
        federation = Federation(
            len(census.clients), census.num_examples, census.num_classes or None, server_inputs
        )
        network.to(settings.place.device)
        return cls(
            settings,
            algorithm,
            Problem(network, likelihood, federation),
            clients,
            model.head,
            model.again,
            (hashlib.sha256(census.to_json().encode()).hexdigest(),),
            census=census,
        )

    def shared_hash(self) -> str:
        """Return a hash of what server and nodes must have alike.

        That is all that training depends on, without what the server keeps to itself: its inputs,
        and the key of its noise.
        """
        federation = replace(self.problem.federation, server_inputs=None)
        shared = replace(self, problem=replace(self.problem, federation=federation))
        return shared.trained_hash(shared.mechanism())

    def steps(self, number: int) -> Steps:
        """Return the steps of a client in this exchange: those of the algorithm, or of a phase."""
        stages = (
            Stage(phase, phase.steps, draw=lambda number: []) for phase in self.algorithm.phases
        )
        stage = Timetable(self.training.rounds, tuple(stages)).stage(number)
        return self.algorithm if stage is None else stage.steps

    def sample_answer(self, steps: Steps) -> Arrays:
        """Return an answer of the right keys, shapes and types, of a client with two zeros."""
        rng, device = Randomness(self.settings.seed), self.settings.place.device
        clients = self.census.specimen().to(device)
        server = self.algorithm.start(self.problem, rng)
        received = steps.broadcast(server, clients.ids.tolist())
        memory = self.algorithm.remember(self.problem, clients)
        plan = replace(self.training.plan, epochs=1)
        answers, _ = steps.local_update(self.problem, received, clients, memory, plan, rng)
        return answers
