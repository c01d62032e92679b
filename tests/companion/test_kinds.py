"""The kinds of experiments on digits, and that our own experiments are sound."""

from __future__ import annotations

import io
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from small_experiment import COMMON, write

from fedhb.algorithms import build
from fedhb.errors import InputError
from fedhb.runs import run_grid
from fedhb.runs.from_settings import make_clients, train
from fedhb.runs.settings import Settings
from fedhb_paper import cells, convergence, costs, experiments, gates, novel_users, table, workbench

ROOT = Path(__file__).parents[2] / "experiments"


class Silent:
    def begin(self, todo):
        pass

    def tell(self, job, share, text):
        assert 0 <= share <= 1

    def recorded(self, record):
        pass


def complete(folder, **choice):
    experiment = experiments.load(folder, "small")
    keys = experiments.choose(experiment, **choice)
    return experiment, workbench.complete(experiment, keys, 1, Silent()).records


def shown(tables) -> str:
    console = Console(width=250, file=io.StringIO())
    for one in tables:
        console.print(one)
    return " ".join(console.file.getvalue().split())


def settings(kind: str, cells_: str, variants: str, top: str = "") -> str:
    return f'title = "t"\nkind = "{kind}"\nseeds = [0, 1]\n{top}\n{COMMON}\n{cells_}\n[variants]\n{variants}\n'


# ---- cells and variants


def test_a_variant_overrides_its_cell_and_a_cell_the_common_settings():
    content = {
        "common": {
            "rounds": 3,
            "lr": 0.5,
            "niw": {"kl_weight": 0.5, "p_do": 0.5},
            "model": {"hidden": 8},
        },
        "cells": {"c": {"rounds": 4, "niw": {"p_do": 0.25}, "mixture": {"sigma2": 3.0}}},
        "variants": {
            "niw": {},
            "other": {"algorithm": "niw", "lr": 0.25, "niw": {"kl_weight": 0.125}},
        },
    }
    first, other = (
        run_grid.settings_of(content, {"cell": "c", "variant": v, "seed": 5})
        for v in ("niw", "other")
    )
    assert (first.training.rounds, first.training.lr) == (4, 0.5)
    assert (first.seed, first.place.workers) == (5, 1)
    assert first.options == {"niw": {"kl_weight": 0.5, "p_do": 0.25}, "model": {"hidden": 8}}
    assert other.training.lr == 0.25 and other.options["niw"] == {"kl_weight": 0.125, "p_do": 0.25}
    flat = cells.resolved(content, {"cell": "c", "variant": "other", "seed": 5})
    assert flat["niw.kl_weight"] == 0.125 and flat["model.hidden"] == 8 and flat["model"] == "mlp"
    assert flat["niw.eps"] == build("niw").eps and not any(
        name.startswith("mixture") for name in flat
    )


def test_the_clients_are_where_the_network_is():
    run = SimpleNamespace(
        problem=SimpleNamespace(network=SimpleNamespace(device=torch.device("meta")))
    )
    clients, novel = cells.clients_of(
        run, Settings.of(dataset="digits", num_clients=5, holdout_clients=2)
    )
    assert (len(clients), len(novel)) == (3, 2)
    assert all(share.x.is_meta for share in (clients.train, clients.test, novel.train, novel.test))
    assert cells.clients_of(run, Settings.of(dataset="digits", num_clients=5))[1] is None


@pytest.mark.parametrize(("name", "grid", "parts"), [
    ("theorem_convergence", "steps", ("gap", "last")),
    ("theorem_generalisation", "n", ("hellinger", "global", "best", "printed")),
])  # fmt: skip
def test_records_that_were_taken_at_other_places_are_not_averaged_with_the_others(
    name, grid, parts
):
    experiment = experiments.load(ROOT, name)
    kept = workbench.standing(experiment, experiments.choose(experiment)).records
    old = {part: kept[0]["result"][part][:-1] for part in (grid, *parts)}
    mixed = [{**kept[0], "result": kept[0]["result"] | old, "stale": ["seeds"]}, *kept[1:]]
    for some in (mixed, mixed[:1]):  # beside valid ones, and alone
        assert "*" in shown(experiment.kind.tables(experiment.settings, [], some)) or len(some) > 1
        assert experiment.kind.figures(experiment.settings, [], some)
    without = experiment.kind.tables(experiment.settings, [], kept[1:])
    assert shown(experiment.kind.tables(experiment.settings, [], mixed)) == shown(without)


def test_what_there_was_before_a_setting():
    assert cells.before("lr") == 0.1 and cells.before("niw.eps") == build("niw").eps
    for name in ("model.hidden", "nosuch", "niw.nosuch"):
        assert cells.before(name) is cells.MISSING


# ---- table


def test_hold_out_clients_and_gates_are_recorded(tmp_path):
    write(
        tmp_path,
        settings(
            "table", '[cells.c]\ndataset = "digits"\nholdout_clients = 2', "mixture = {}\nniw = {}"
        ),
        printed="",
    )
    experiment, records = complete(tmp_path)
    mixture = next(r["result"] for r in records if r["key"]["variant"] == "mixture")
    assert mixture["holdout_global"]["accuracy"] > 0 and set(mixture["gates"]) == set(gates.GATES)
    assert mixture["gates"]["learned"] == mixture["global"]
    assert "gates" not in next(r["result"] for r in records if r["key"]["variant"] == "niw")
    text = shown(table.tables(experiment.settings, [], records))
    assert (
        "novel clients, personalisation: c" in text and "mixtures: global accuracy by gate" in text
    )


def test_global_prediction_without_what_clients_remember(tmp_path):
    """FedPop's clients predict with their own heads; without them with mu_z.

    For the others nothing changes.
    """
    write(
        tmp_path,
        settings("table", '[cells.c]\ndataset = "digits"', "fedpop = {}\npfedbayes = {}\nniw = {}"),
        printed="",
    )
    experiment, records = complete(tmp_path)
    records = [r for r in records if r["key"]["seed"] == records[0]["key"]["seed"]]
    of = {r["key"]["variant"]: r for r in records}
    assert "population" not in of["niw"]["result"] and "population" not in of["pfedbayes"]["result"]
    chosen = run_grid.settings_of(experiment.settings, of["fedpop"]["key"])
    run = train(chosen, None, progress=False)
    clients, _ = make_clients(chosen)
    found = []
    for k in range(len(clients)):
        x, y = clients.test.examples(k)
        found.append(
            run.problem.likelihood.metrics(
                run.algorithm.predict(run.problem, run.state.server, x, run.rng), y
            )["nll"]
        )
    result = of["fedpop"]["result"]
    assert result["population"]["nll"] == pytest.approx(sum(found) / len(found))
    assert result["population"]["nll"] != result["global"]["nll"]
    assert table.of_task(result, "population") == result["population"]
    assert table.of_task(of["niw"]["result"], "population") == of["niw"]["result"]["global"]
    text = shown(table.tables(experiment.settings, [], records))
    without = text[
        text.index("global prediction by the server alone: c") : text.index("personalisation: c")
    ]
    assert (
        f"{result['population']['nll']:.3f}" in without
        and f"{of['niw']['result']['global']['nll']:.3f}" in without
    )


def test_gates_by_hand():
    """Two prototypes far apart: the oracle takes the one that fits, equal shares take their mean."""
    chosen = Settings.of(
        num_clients=6,
        shards_per_client=3,
        rounds=2,
        algorithm="mixture",
        options={"mixture": {"noise": 0.3, "begin": "nearest"}},
    )
    run = train(chosen, None, progress=False)
    found = gates.metrics(run, chosen)
    clients, _ = make_clients(chosen)
    problem, server = run.problem, run.state.server
    oracle, uniform, best = [], [], set()
    for k in range(len(clients)):
        x, y = clients.test.examples(k)
        a, b = clients.train.examples(k)
        every = [i * len(a) // 100 for i in range(100)]
        each = []
        for j in range(2):
            weights = run.algorithm.prototypes(problem, server)
            weights.theta = weights.theta[j].expand(2, -1)
            outputs = [
                problem.network.outputs(weights, data.expand(2, *data.shape))
                for data in (x, a[every])
            ]
            each.append([problem.likelihood.predictive(output)[0] for output in outputs])
        fit = [p[1].gather(1, b[every, None]).log().sum() for p in each]
        best.add(int(fit[1] > fit[0]))
        oracle.append(problem.likelihood.metrics(each[int(fit[1] > fit[0])][0], y)["nll"])
        uniform.append(problem.likelihood.metrics((each[0][0] + each[1][0]) / 2, y)["nll"])
    assert best == {0, 1}
    assert found["oracle"]["nll"] == pytest.approx(statistics.fmean(oracle), rel=1e-5)
    assert found["uniform"]["nll"] == pytest.approx(statistics.fmean(uniform), rel=1e-5)


# ---- convergence


def test_convergence_keeps_the_curve(tmp_path):
    one = '[cells."f=0.5"]\ndataset = "digits"\n'
    whole = '[cells.all]\ndataset = "digits"\nfraction = 1.0\nrounds = 6\nniw = {begin = "last"}'
    write(tmp_path, settings("convergence", one + whole, "niw = {}", 'optimum = "all"'), printed="")
    experiment, records = complete(tmp_path)
    lengths = {r["key"]["cell"]: len(r["result"]["negative_elbo"]) for r in records}
    assert lengths == {"f=0.5": 3, "all": 6}
    curves = [(r["key"]["cell"], r["result"]["negative_elbo"]) for r in records]
    ends = {
        name: statistics.fmean(convergence.end(curve) for cell, curve in curves if cell == name)
        for name in lengths
    }
    text = shown(convergence.tables(experiment.settings, [], records))
    assert (
        f"{ends['f=0.5'] - ends['all']:+,.0f}" in text
        and "+0" in text
        and f"{ends['f=0.5']:,.0f} ±" in text
    )
    assert "3 rounds, seeds 0,1" in text and "6 rounds, seeds 0,1" in text
    lost = [
        r if r["key"]["cell"] == "all" else {**r, "result": {"diverged": "said"}} for r in records
    ]
    assert "f=0.5 2 diverged" in shown(convergence.tables(experiment.settings, [], lost))
    chosen = run_grid.settings_of(
        experiment.settings, {"cell": "f=0.5", "variant": "niw", "seed": 0}
    )
    run = train(chosen, None, progress=False)
    assert [r["negative_elbo"] for r in run.records] == records[0]["result"]["negative_elbo"]


# ---- novel


def test_novel_clients_personalise_with_n_examples(tmp_path):
    one = '[cells.c]\ndataset = "digits"\nholdout_clients = 3\nrounds = 8\nlocal_epochs = 2\n'
    one += "personal_epochs = 10\npersonal_lr = 0.05"
    write(
        tmp_path, settings("novel", one, "niw = {}\nfedavg = {}", "examples = [2, 200]"), printed=""
    )
    experiment, records = complete(tmp_path)
    for r in records:
        assert set(r["result"]["after"]) == {"2", "200"} and r["settings"]["examples"] == [2, 200]
        assert (
            r["result"]["after"]["200"]["nll"] < r["result"]["before"]["nll"]
        )  # three classes of ten
    chosen = run_grid.settings_of(experiment.settings, records[0]["key"])
    run = train(chosen, None, progress=False)
    _, unseen = make_clients(chosen)
    assert (
        run.evaluate(unseen.with_at_most(2, 0))["personalised"]
        == records[0]["result"]["after"]["2"]
    )
    assert (
        run.result["holdout"]["personalised"] == records[0]["result"]["after"]["200"]
    )  # no client has as many: all of them
    text = shown(novel_users.tables(experiment.settings, [], records))
    assert "c: nll of novel clients" in text and "fedavg" in text and "diverged" not in text
    lost = [
        {**r, "result": {"diverged": "said"}} if r["key"]["variant"] == "niw" else r
        for r in records
    ]
    assert "niw 2 diverged" in shown(novel_users.tables(experiment.settings, [], lost))


def test_novel_needs_numbers_and_novel_clients(tmp_path):
    write(tmp_path, settings("novel", '[cells.c]\ndataset = "digits"', "niw = {}"), printed="")
    with pytest.raises(InputError, match="examples"):
        complete(tmp_path)
    write(
        tmp_path,
        settings("novel", '[cells.c]\ndataset = "digits"', "niw = {}", "examples = [5]"),
        printed="",
    )
    with pytest.raises(InputError, match="holds out"):
        complete(tmp_path)


# ---- costs


def test_costs(tmp_path):
    variants = 'niw = {niw = {dof = "full", update = "body"}}\nmixture = {mixture = {update = "body"}}\nfedbabu = {}\nfedpop = {}\n'
    variants += (
        '"mixture K=5" = {algorithm = "mixture", mixture = {num_prototypes = 5, update = "body"}}'
    )
    printed = "cell,algorithm,task,metric,mean,std\nc,niw,down,formula,2d,\nc,niw,client,formula,F + B + O(d),\n"
    text = settings("costs", '[cells.c]\ndataset = "digits"', variants, "repeats = 2").replace(
        "seeds = [0, 1]", "seeds = [0]"
    )
    write(tmp_path, text, printed=printed)
    experiment, records = complete(tmp_path)
    found = {r["key"]["variant"]: r["result"] for r in records}
    ways = {
        name: [r["bytes"][way] / 4 / r["parameters"] for way in ("down", "up")]
        for name, r in found.items()
    }
    assert (
        ways["niw"] == [2, 1]
        and ways["mixture"] == [3, 2]
        and ways["mixture K=5"] == [6, 2]
        and ways["fedbabu"] == [1, 1]
    )
    for r in found.values():
        assert set(r["seconds"]) == set(costs.STEPS) and all(s > 0 for s in r["seconds"].values())
        assert r["answers"] == 4 and r["batches"]["personalised"] == r["batches"]["client"]
    text = shown(costs.tables(experiment.settings, experiment.printed(), records))
    assert (
        "2.00 d" in text
        and "printed 2d" in text
        and "printed F + B + O(d)" in text
        and " ms" in text
    )
    text = shown(costs.tables(experiment.settings, [], records))
    assert f"{found['niw']['seconds']['client']:.4f}" in text


def test_the_median_leaves_the_first_out(monkeypatch):
    ticks = iter([0, 100, 100, 101, 101, 104, 104, 106])
    monkeypatch.setattr(costs.time, "perf_counter", lambda: next(ticks))
    assert costs.median(lambda: None, 3) == 2


# ---- our own experiments

NAMES = experiments.names(ROOT)


def test_the_tables_and_figures_of_the_paper_are_there():
    wanted = "all_mnist controls mnist_convergence sensitivity_p_drop sensitivity_k ensembles running_time complexity novel_users"
    assert {
        *wanted.split(),
        "cifar_body",
        "cifar_c",
        "cifar_more_k",
        "cifar_c_more_k",
        "cifar_dynamics",
    } <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_our_experiments_are_sound(name):
    """Every key resolves to settings that exist, and every printed number belongs to a cell and a
    variant.
    """
    experiment = experiments.load(ROOT, name)
    keys = experiments.choose(experiment)
    standing = workbench.standing(experiment, keys)
    assert (experiment.path / "README.md").exists() and experiment.title
    printed = experiment.printed()
    assert {row["cell"] for row in printed} <= {key.get("cell") for key in keys}
    assert {row["algorithm"] for row in printed} <= {key.get("variant") for key in keys}
    assert all(
        "," not in str(key.get("variant", "")) for key in keys
    )  # the command line separates variants by commas
    assert experiment.kind.tables(experiment.settings, printed, standing.records) or not (
        printed or standing.records
    )


def test_printed_numbers_of_the_paper():
    """Some of them, read off the page."""
    rows = {
        (name, r["cell"], r["algorithm"], r["task"]): (r["mean"], r["std"])
        for name in ("all_mnist", "cifar_body", "cifar_c_more_k", "running_time")
        for r in experiments.load(ROOT, name).printed()
    }
    assert len(rows) == 100 + 160 + 144 + 16
    assert rows["all_mnist", "mnist tau=1", "fedpa", "global"] == (93.38, None)
    assert rows["all_mnist", "emnist tau=1", "fedbabu", "personalised"] == (83.09, None)
    assert rows["all_mnist", "fashion-mnist tau=5", "niw", "personalised"] == (89.91, None)
    assert rows["cifar_body", "s=10 f=1.0 tau=1", "mixture", "global"] == (49.52, 0.88)
    assert rows["cifar_body", "s=100 f=0.1 tau=10", "pfedbayes", "global"] == (28.21, 1.42)
    assert rows["cifar_c_more_k", "s=100 f=1.0 tau=4", "centralised", "holdout_personalised"] == (
        76.58,
        12.63,
    )
    assert rows["running_time", "cifar-100", "mixture K=5", "server"] == (1.434, None)
