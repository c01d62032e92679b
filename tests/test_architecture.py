"""The shape of the code: imports point one way, algorithms know nothing of engines or files,
nothing is ever unpickled.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator
from pathlib import Path

import pytest
from builders import CASES, problem

import fedhb
from fedhb.algorithms import ALGORITHMS
from fedhb.algorithms.contract import Vector
from fedhb.algorithms.toolbox import SHARED_ANSWERS
from fedhb.seeding import Randomness

ROOT = Path(fedhb.__file__).parent
FILES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}

ROOMS = (
    ("errors", "seeding", "files", "settings_fields", "user_code", "processes", "progress_bars"),
    ("data",),
    ("clients",),
    ("likelihood", "distributions"),
    ("network",),
    ("training",),
    ("algorithms",),
    ("answers",),
    ("engine",),
    ("evaluation",),
    ("runs",),
    ("flower",),
    ("report",),
    ("cli", "__main__"),
)
"""A room imports from itself and from those before it in this list, never from one after it."""

LEVEL = {name: level for level, names in enumerate(ROOMS) for name in names}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def part(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that is imported anywhere in a file, also inside functions: (dotted name, line)."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: relative import"
            assert node.module is not None
            if node.module == "fedhb":  # from fedhb import data: the names are modules
                yield from ((f"fedhb.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield node.module, node.lineno


def test_every_part_has_a_room():
    assert {part(file) for file in FILES} - {"__init__"} == set(LEVEL)


@pytest.mark.parametrize("file", [file for file in FILES if file != "__init__.py"])
def test_imports_point_one_way(file):
    own = part(file)
    for module, line in imports(FILES[file]):
        if module.startswith("fedhb."):
            other = module.split(".")[1]
            if other == "__version__":
                continue
            assert LEVEL[other] <= LEVEL[own], (
                f"{file}:{line} imports {module}, which comes after it"
            )


def test_the_check_sees_imports(tmp_path):
    """The parser of this file finds imports of every form."""
    path = tmp_path / "module.py"
    path.write_text(
        "import os.path\nfrom fedhb import cli, data\ndef f():\n    from fedhb.engine import loop\n"
    )
    assert sorted(name for name, _ in imports(path)) == [
        "fedhb.cli",
        "fedhb.data",
        "fedhb.engine",
        "os.path",
    ]


def test_no_cycles_between_modules():
    """Within a layer too: the modules of the package can be put in an order."""
    names = {
        "fedhb." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): file
        for file in FILES
    }
    top = {
        name: [n for n in top_level(FILES[file], names) if n in names]
        for name, file in names.items()
        if file != "__init__.py"
    }
    done: set[str] = set()
    while len(done) < len(top):
        ready = [
            name for name, needs in top.items() if name not in done and done >= set(needs) - {name}
        ]
        assert ready, f"a cycle among {sorted(set(top) - done)}"
        done.update(ready)


def top_level(path: Path, names: Container[str]) -> list[str]:
    """The modules of the package that are imported when this one is, not later inside a function or
    for types alone; `names` are all modules.
    """
    found = []
    for node in tree(path).body:
        if isinstance(node, ast.ImportFrom) and node.module == "fedhb":
            found += [f"fedhb.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("fedhb."):
            # `from fedhb.engine import loop` imports a module, `from fedhb.engine.loop import run`
            # a name of one
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                found.append(module if module in names else str(node.module))
    return found


ALGORITHM_FILES = [file for file in FILES if file.startswith("algorithms/")]
OUTSIDE = {
    "os",
    "pathlib",
    "io",
    "logging",
    "sys",
    "json",
    "shutil",
    "tempfile",
    "socket",
    "multiprocessing",
    "rich",
    "safetensors",
}


@pytest.mark.parametrize("file", ALGORITHM_FILES)
def test_algorithms_know_nothing_of_engines_files_devices_or_logging(file):
    for module, line in imports(FILES[file]):
        first, *rest = module.split(".")
        assert first not in OUTSIDE, f"{file}:{line} imports {module}"
        assert first != "fedhb" or not rest or rest[0] not in ("data", "files"), (
            f"{file}:{line} imports {module}"
        )
    for node in ast.walk(tree(FILES[file])):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input"}, f"{file}:{node.lineno}"
        if isinstance(node, ast.Attribute):
            assert node.attr not in {"cuda", "is_available", "manual_seed", "set_num_threads"}, (
                f"{file}:{node.lineno}"
            )


def test_distributions_know_nothing_of_federated_learning():
    words = {"client", "clients", "server", "round", "rounds", "cohort", "federation"}
    for node in ast.walk(tree(ROOT / "distributions.py")):
        name = (
            node.id
            if isinstance(node, ast.Name)
            else node.arg
            if isinstance(node, ast.arg)
            else None
        )
        assert name not in words, f"distributions.py:{getattr(node, 'lineno', 0)}: {name}"
    assert {m for m, _ in imports(ROOT / "distributions.py") if m.startswith("fedhb.")} <= {
        "fedhb.errors"
    }


@pytest.mark.parametrize("file", FILES)
def test_nothing_is_ever_unpickled(file):
    for module, line in imports(FILES[file]):
        assert module.split(".")[0] not in {
            "pickle",
            "cPickle",
            "dill",
            "joblib",
            "shelve",
            "marshal",
        }, f"{file}:{line}"
    for node in ast.walk(tree(FILES[file])):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert called not in {"torch.load", "torch.save", "eval", "exec"}, (
            f"{file}:{node.lineno}: {called}"
        )
        for keyword in node.keywords:
            if keyword.arg == "allow_pickle":
                assert isinstance(keyword.value, ast.Constant) and keyword.value.value is False, (
                    f"{file}:{node.lineno}"
                )
        if called in {"np.load", "numpy.load"}:
            assert any(keyword.arg == "allow_pickle" for keyword in node.keywords), (
                f"{file}:{node.lineno}"
            )


@pytest.mark.parametrize("file", FILES)
def test_nobody_touches_the_global_random_state(file):
    """Seeding torch's global generator is allowed only where it is put back (fork_rng); numpy's and
    Python's never.
    """
    for node in ast.walk(tree(FILES[file])):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"np.random.seed", "numpy.random.seed", "random.seed"}, (
                f"{file}:{node.lineno}"
            )
            if called == "torch.manual_seed":
                guarded = [
                    w
                    for w in ast.walk(tree(FILES[file]))
                    if isinstance(w, ast.With)
                    and w.lineno < node.lineno <= (w.end_lineno or 0)
                    and "fork_rng" in ast.unparse(w.items[0])
                ]
                assert guarded, f"{file}:{node.lineno}: torch.manual_seed without fork_rng"


GENERIC_ROOMS = ("answers", "engine", "evaluation", "flower")
COMMON = {*SHARED_ANSWERS, "theta"}
"""What every algorithm may send, and the network's own vectors."""

OTHER_MEANINGS = {
    "client": "a column of tables and records",
    "rounds": "a setting",
    "time": "a field of the journal of a server",
}
"""Names of arrays that are words of the field too, and what they mean in the generic rooms."""


def names_of_algorithms() -> set[str]:
    """Return the names of the algorithms, of their classes, and of their arrays."""
    names = {*ALGORITHMS, *(cls.__name__ for cls in ALGORITHMS.values())}
    for algorithm in CASES.values():
        names |= {*algorithm.answer, *algorithm.each, *algorithm.known}
        kinds = [kind for kind in algorithm.answer.values() if isinstance(kind, Vector)]
        names |= {kind.relative_to for kind in kinds if kind.relative_to is not None}
        names |= algorithm.start(problem(), Randomness(0)).keys()
    return names - COMMON - OTHER_MEANINGS.keys()


def named(path: Path, names: set[str]) -> list[str]:
    """Return the strings, variables and attributes of a file that are among these names.

    A formatted number's own format is no such string ({x:g}), and a short name such as m may be a
    variable's.
    """
    module = tree(path)
    formats = {
        id(node)
        for text in ast.walk(module)
        if isinstance(text, ast.FormattedValue) and text.format_spec is not None
        for node in ast.walk(text.format_spec)
    }
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and id(node) not in formats and node.value in names:
            found.append(f"{path.name}:{node.lineno}: {node.value!r}")
        elif isinstance(node, ast.alias) and node.name in names:
            found.append(f"{path.name}:{node.lineno}: imports {node.name}")
        elif isinstance(node, ast.Attribute) and node.attr in names and not constant(node):
            found.append(f"{path.name}:{node.lineno}: .{node.attr}")
    return found


def constant(node: ast.Attribute) -> bool:
    return ast.unparse(node.value) in ("math", "np", "torch")  # math.pi


@pytest.mark.parametrize("file", [file for file in FILES if part(file) in GENERIC_ROOMS])
def test_generic_code_knows_no_algorithm_and_none_of_its_arrays(file):
    """It reads the algorithm's declaration instead (algorithms/contract.py)."""
    assert named(FILES[file], names_of_algorithms()) == []


def test_the_check_sees_names_of_algorithms(tmp_path):
    names = names_of_algorithms()
    assert {"niw", "FedEM", "pi", "g", "curvature", "reach", "m0", "V0", "r", "beta"} <= names
    assert {"group", "head_rho", "evidence"} <= names and not {"head", "kl", "theta"} & names
    path = tmp_path / "module.py"
    path.write_text(
        "from fedhb.algorithms import FedEM\n"
        "x = answers['pi'] + server['theta']\n"
        "y = algorithms.NIW if name == 'niw' else f'{x:g}'\n"
    )
    assert sorted(named(path, names)) == [
        "module.py:1: imports FedEM",
        "module.py:2: 'pi'",
        "module.py:3: 'niw'",
        "module.py:3: .NIW",
    ]


def test_public_names_exist():
    for name in fedhb.__all__:
        assert getattr(fedhb, name) is not None


def test_no_two_modules_have_one_name():
    stems = [Path(file).stem for file in FILES if not file.endswith("__init__.py")]
    assert sorted(stems) == sorted(set(stems))


@pytest.mark.parametrize("file", FILES)
def test_the_library_does_not_know_its_companion(file):
    for module, line in imports(FILES[file]):
        assert module.split(".")[0] != "fedhb_paper", f"{file}:{line} imports {module}"


TESTS = Path(__file__).parent
TESTED_ELSEWHERE = {
    "engine/allocator.py": "engines/test_cost.py",  # a hint to the C library; no number depends on it
    "training/plan.py": "runs/test_fit.py",  # five values without a method
    "cli/algorithms_command.py": "cli/test_main.py",
    "cli/deploy_commands.py": "flower/test_local_federation.py",
    "runs/simulation.py": "runs/test_fit.py",  # fit hands everything on to it
    "flower/client_app.py": "flower/test_node_cohort.py",  # the nodes in this process call it
}
"""Modules that have no test file of their own, and the file that tests them."""

MODULES = [file for file in FILES if Path(file).stem not in ("__init__", "__main__")]


@pytest.mark.parametrize("file", MODULES)
def test_every_module_has_a_test_file(file):
    """tests/<room>/test_<module>.py, or several test_<module>_<concern>.py."""
    room, stem = TESTS / (part(file) if "/" in file else ""), Path(file).stem
    own = [*room.glob(f"test_{stem}.py"), *room.glob(f"test_{stem}_*.py")]
    if file in TESTED_ELSEWHERE:
        assert not own and (TESTS / TESTED_ELSEWHERE[file]).is_file(), TESTED_ELSEWHERE[file]
    else:
        assert own, f"{file} has no tests/{room.name}/test_{stem}.py"


def test_no_exception_is_left_of_a_module_that_is_gone():
    assert TESTED_ELSEWHERE.keys() <= FILES.keys()


def test_no_test_file_is_too_long_to_read():
    lengths = {
        str(path.relative_to(TESTS)): len(path.read_text(encoding="utf-8").splitlines())
        for path in TESTS.rglob("*.py")
    }
    assert {name for name, length in lengths.items() if length > 400} == set()
