"""The public names."""

from __future__ import annotations

import contextlib
import inspect
import re
import subprocess
import sys
import types
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from pathlib import Path

import pytest
import warm
from problems import Dyadic, optimizer_for

import offbeat


def test_all_is_sorted_in_its_two_blocks() -> None:
    """Values and functions of the library first, then the named methods; capitals before small letters."""
    names = offbeat.__all__
    cut = len(names) - len(offbeat.methods.__all__)
    first, second = names[:cut], names[cut:]
    assert second == offbeat.methods.__all__ == sorted(offbeat.methods.__all__)
    # As ruff sorts __all__: CONSTANTS, then Classes, then functions.
    assert first == sorted(first, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert len(set(names)) == len(names)


def test_all_is_complete() -> None:
    for name in offbeat.__all__:
        assert hasattr(offbeat, name), name
    here = {
        name
        for name, value in vars(offbeat).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert here == set(offbeat.__all__)  # neither more nor less


def test_help_groups_the_names() -> None:
    """A newcomer sees groups, not an alphabet: each name once, and in the groups of the reference."""
    groups = re.findall(r"^([A-Z][^:\n]+): ((?:.+\n)(?:    [A-Z].+\n)*)", offbeat.__doc__ or "", re.MULTILINE)
    told = {title.partition(",")[0]: names.split() for title, names in groups}
    own = [name for name in offbeat.__all__ if name not in offbeat.methods.__all__ and name != "method"]
    assert sorted(name for names in told.values() for name in names) == sorted(own)
    text = (Path(__file__).parent.parent / "docs/reference.md").read_text()
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[2:]:
        title, names = section.partition("\n")[0], re.findall(r"::: offbeat\.names\.(\w+)", section)
        assert set(names) == {*told[title], *(told["Errors"] if title == "A run" else [])}, title


def test_dir_shows_nothing_private() -> None:
    assert not [name for name in dir(offbeat) if name.startswith("_") and not name.startswith("__")]
    assert set(offbeat.__all__) <= set(dir(offbeat))


def test_no_module_is_in_all() -> None:
    assert not [name for name in offbeat.__all__ if isinstance(getattr(offbeat, name), types.ModuleType)]


def test_every_public_name_says_what_it_is() -> None:
    for name in offbeat.__all__:
        value = getattr(offbeat, name)
        assert value.__doc__, name
        assert not value.__doc__.startswith(f"{name}("), f"{name} has the docstring dataclasses make up"


def test_star_import() -> None:
    space: dict[str, object] = {}
    exec("from offbeat import *", space)
    assert set(offbeat.__all__) <= set(space)


@pytest.mark.parametrize("name", offbeat.methods.__all__)
def test_every_method_has_an_example(name: str) -> None:
    function = getattr(offbeat, name)
    text = inspect.getdoc(function)
    assert text is not None
    assert text.splitlines()[0].endswith(".")
    assert f"sync = offbeat.{name}(model, optimizer" in text


@pytest.mark.parametrize("name", offbeat.methods.__all__)
def test_every_example_runs(name: str) -> None:
    model = Dyadic()
    text = inspect.getdoc(getattr(offbeat, name)) or ""
    line = next(line.strip() for line in text.splitlines() if line.strip().startswith("sync = "))
    line = line.replace("nodes=8", "nodes=1")  # the example has eight workers per node, the test one in all
    line = line.replace("fragments=4", "fragments=2")  # and its model has two layers
    space = {"offbeat": offbeat, "model": model, "optimizer": optimizer_for(model)}
    exec(line, space)
    assert isinstance(space["sync"], offbeat.Synchronizer)


@pytest.mark.parametrize("name", offbeat.methods.__all__)
def test_every_method_takes_its_options_by_name(name: str) -> None:
    parameters = inspect.signature(getattr(offbeat, name)).parameters
    assert list(parameters)[:2] == ["model", "optimizer"]
    kinds = [p.kind for p in parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    assert kinds == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 2 + [inspect.Parameter.KEYWORD_ONLY] * (
        len(kinds) - 2
    )
    assert parameters["group"].default is None


def needed(requirements: Iterable[str]) -> set[str]:
    """The distributions that these requirements bring along, in small letters and with dashes."""
    found: set[str] = set()
    rest = [entry for entry in requirements if "extra ==" not in entry]
    while rest:
        name = re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", rest.pop().strip())[0]).lower()
        if name in found or name == "offbeat":
            continue
        found.add(name)
        with contextlib.suppress(PackageNotFoundError):
            rest += [entry for entry in requires(name) or [] if "extra ==" not in entry]
    return found


def modules_of(distributions: set[str]) -> set[str]:
    """The names under which they are imported; those not installed here may have their own."""
    owners = {
        module: {re.sub(r"[-_.]+", "-", name).lower() for name in names}
        for module, names in packages_distributions().items()
    }
    found = {module for module, names in owners.items() if names <= distributions}
    installed = set().union(*owners.values())
    return found | {name.replace("-", "_") for name in distributions - installed}


@pytest.mark.slow
def test_the_library_needs_torch_alone() -> None:
    """Imported where none of the extras can be found."""
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = [entry for entries in project["optional-dependencies"].values() for entry in entries]
    blocked = modules_of(needed(extras) - needed(project["dependencies"]))
    assert {"typer", "PIL", "rich", "sklearn", "scipy", "pytest"} <= blocked
    code = (
        "import sys\n"
        f"for name in {sorted(blocked)!r}: sys.modules[name] = None\n"
        "import offbeat\n"
        "import torch\n"
        "model = torch.nn.Linear(1, 1)\n"
        "with offbeat.local_sgd(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1) as sync:\n"
        "    model(torch.ones(1)).sum().backward()\n"
        "    sync.step()\n"
        "print(sync.totals.rounds, offbeat.__version__)\n"
    )
    quiet = ["-W", "ignore:Failed to initialize NumPy"]  # which is torch's to say
    command = [sys.executable, *quiet, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout.split() == ["1", offbeat.__version__]


def test_the_version_is_the_packages() -> None:
    assert version("offbeat") == offbeat.__version__


def test_errors_are_one_tree() -> None:
    """All that are defined, public, and drawn."""
    defined = {name for name, value in vars(offbeat.base.errors).items() if inspect.isclass(value)}
    assert "NotFinite" in defined
    assert issubclass(offbeat.base.errors.BadArgument, ValueError)
    defined.remove("BadArgument")
    for name in defined:
        assert issubclass(getattr(offbeat, name), offbeat.OffbeatError), name
    drawn = re.findall(r"^[├└]── (\w+) ", offbeat.base.errors.__doc__ or "", re.MULTILINE)
    assert sorted(["OffbeatError", *drawn]) == sorted(defined)
    assert issubclass(offbeat.OffbeatError, RuntimeError)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import offbeat.simulate", "from offbeat.plan import predict"])
def test_a_package_does_not_hide_the_function_of_its_name(first: str) -> None:
    """Public names are imported when the first is used, perhaps after the packages that have them."""
    code = (
        "import sys\n"
        "for name in [*sys.modules]:\n"
        "    if name.partition('.')[0] == 'offbeat': del sys.modules[name]\n"
        f"{first}\nimport offbeat\nprint(offbeat.simulate(lambda comm: comm.size, 2))"
    )
    done = warm.run("-c", code)
    assert (done.stdout, done.stderr) == ("[2, 2]\n", "")
