"""What server and nodes build alike from the run's settings and the census: network, likelihood, algorithm, plans."""

from __future__ import annotations

import hashlib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from fedhb import data
from fedhb.algorithms import Algorithm, Arrays, Federation, Plan, Problem
from fedhb.answers.defence import Defence
from fedhb.answers.privacy import Privacy
from fedhb.engine.loop import Training
from fedhb.engine.schedule import cohort_size
from fedhb.errors import InputError
from fedhb.flower.census import Census
from fedhb.likelihood import Categorical, Likelihood
from fedhb.network import nets
from fedhb.network.factory import check_model, regression
from fedhb.network.vectors import Network
from fedhb.runs.folder import RunFolder
from fedhb.runs.from_settings import algorithm_of, model_of
from fedhb.runs.recorder import fingerprint_of
from fedhb.runs.session import Job, mechanism
from fedhb.runs.settings import Settings
from fedhb.seeding import Randomness
from fedhb.settings_fields import convert


@dataclass(frozen=True)
class Rules:
    """How a federation is run: the run config beside its settings.

    Attributes:
        nodes: how many clients there must be before the first round.
        deadline: seconds that a round's nodes have for their answers.
        min_answers: share of a round's cohort that must answer; with fewer the round fails and is tried again.
        retries: how often a failed round is tried again.
        patience: seconds to wait for the nodes before the first round.
        poll: seconds between looks for answers.
        max_growth: a vector of an answer may be this many times as long as those before.
    """

    nodes: int = 2
    deadline: float = 600.0
    min_answers: float = 0.5
    retries: int = 3
    patience: float = 600.0
    poll: float = 0.25
    max_growth: float = 100.0

    def __post_init__(self) -> None:
        for name in ("deadline", "patience", "poll", "max_growth"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name}={getattr(self, name)}: give a positive number")
        if self.nodes < 1 or self.retries < 0:
            raise InputError(
                f"nodes={self.nodes}, retries={self.retries}: give at least one node and no negative number"
            )
        if not 0 < self.min_answers <= 1:
            raise InputError(
                f"min_answers={self.min_answers}: give a share of the cohort, above 0 and at most 1"
            )

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Rules:
        """From a run config, whose keys have hyphens."""
        defaults = {field.name: field.default for field in fields(cls)}
        given = {
            name: config[name.replace("_", "-")]
            for name in defaults
            if name.replace("_", "-") in config
        }
        return cls(**{name: convert(name, value, defaults[name]) for name, value in given.items()})

    def needed(self, cohort: int) -> int:
        """How many of a cohort must answer."""
        return max(1, math.ceil(self.min_answers * cohort - 1e-9))


def settings_of(config: Mapping[str, Any]) -> Settings:
    """The run's settings from its run config, where they are the text of a settings file."""
    try:
        content = tomllib.loads(str(config.get("settings", "")))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the run config's settings are not TOML: {error}") from None
    return Settings.resolve(content, {})


def federated(settings: Settings) -> Algorithm:
    """The algorithm of a federation, after a check of what the settings alone can tell."""
    algorithm = algorithm_of(settings)
    if algorithm.pools:
        raise InputError(
            f"{algorithm.name} pools its clients' data, which a federation keeps apart: use fedhb train"
        )
    if not settings.data:
        data.check_name(settings.dataset)
    if settings.model and ":" not in settings.model:
        nets.check_name(settings.model)
    return algorithm


@dataclass(frozen=True)
class Task:
    """A run as server and nodes see it."""

    settings: Settings
    census: Census
    algorithm: Algorithm
    problem: Problem
    spec: Mapping[str, Any]

    @classmethod
    def of(cls, settings: Settings, census: Census, server_inputs: Tensor | None = None) -> Task:
        """The task of these settings for these clients."""
        algorithm, clients = federated(settings), census.specimen()
        model, spec = model_of(settings, clients)
        network = Network(
            model,
            head=settings.head or None,
            batch_norm=settings.batch_norm,
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
        network.to(settings.device)
        return cls(settings, census, algorithm, Problem(network, likelihood, federation), spec)

    @property
    def training(self) -> Training:
        """The rounds."""
        s = self.settings
        plan = Plan(s.local_epochs, s.batch_size, s.lr, s.momentum, self.algorithm.update == "full")
        return Training(s.rounds, s.fraction, plan, s.schedule, s.seed)

    @property
    def personal_plan(self) -> Plan:
        """How clients personalise."""
        s = self.settings
        return Plan(s.personal_epochs, s.batch_size, s.personal_lr, s.momentum, train_head=True)

    def job(self, folder: RunFolder | None = None) -> Job:
        """The run for `conduct`. It resumes under the same settings and census alone."""
        s, count = self.settings, len(self.census.clients)
        size, privacy = cohort_size(count, s.fraction), None
        if s.dp_noise and folder is not None:
            privacy = mechanism(folder, s.dp_noise, s.dp_clip, s.dp_delta, count, size)
        elif s.dp_noise:  # a node, which clips: the noise is the server's, and its secret too
            privacy = Privacy(s.dp_noise, s.dp_clip, s.dp_delta, count, size)
        private = (s.dp_noise, s.dp_clip, s.dp_delta, privacy.mark) if privacy is not None else ()
        census = hashlib.sha256(self.census.to_json().encode()).hexdigest()
        clients = replace(
            self.census.specimen(),
            files={"census": census},
            server_inputs=self.problem.federation.server_inputs,
        )
        return Job(
            problem=self.problem,
            algorithm=self.algorithm,
            training=self.training,
            personal_plan=self.personal_plan,
            num_clients=count,
            input_shape=self.census.input_shape,
            fingerprint=fingerprint_of(
                self.problem,
                self.algorithm,
                self.training,
                clients,
                *private,
                *([s.defence] if s.defence else []),
            ),
            asked=hashlib.sha256(repr((self.personal_plan, s.evaluate_on)).encode()).hexdigest(),
            constants=self.problem.network.constants(),
            privacy=privacy,
            defence=Defence.named(s.defence),
            augment=self.census.augment or None,
        )

    def network_digest(self) -> str:
        """A hash of the network as it was made: nodes with another version of something would train another one."""
        digest = hashlib.sha256()
        for key, value in sorted(self.problem.network.constants().items()):
            digest.update(key.encode() + value.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def sample_answer(self) -> Arrays:
        """An answer of the right keys, shapes and types: what a client with two examples of nothing finds."""
        s, rng, clients = (
            self.settings,
            Randomness(self.settings.seed),
            self.census.specimen().to(self.settings.device),
        )
        received = self.algorithm.broadcast(
            self.algorithm.start(self.problem, rng), clients.ids.tolist()
        )
        plan = Plan(1, s.batch_size, s.lr, s.momentum, self.algorithm.update == "full")
        memory = self.algorithm.remember(self.problem, clients)
        return self.algorithm.local_update(self.problem, received, clients, memory, plan, rng)[0]
