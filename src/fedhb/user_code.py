"""Functions of the user's own, named as pkg.mod:function."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

from fedhb.errors import InputError


def imported(purpose: str, name: str, kind: str = "factory") -> Any:
    """Return the object that `pkg.mod:attribute` names, also one in the working directory."""
    module, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"{purpose} {name!r} cannot be imported ({error}): write pkg.mod:{kind}, importable "
            "from here"
        ) from None
    finally:
        sys.path.pop(0)


def takes(purpose: str, function: Any, *given: Any, **options: Any) -> None:
    """Refuse a function of the user's that cannot be called with these arguments."""
    try:
        inspect.signature(function).bind(*given, **options)
    except ValueError:  # it has no signature
        return
    except TypeError as error:
        raise InputError(f"{purpose} does not take these options ({error})") from None
