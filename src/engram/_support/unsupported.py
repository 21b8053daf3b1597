"""Arguments that engram does not take: TorchRL's later ones and unknown ones are rejected by name, never ignored."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, NamedTuple, NoReturn, TypedDict, get_type_hints

from engram.types import Declared


@contextmanager
def needs(call: str, extra: str) -> Iterator[None]:
    """Around the import of an optional package: one that is missing is named, with what installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        text = f'{call}: needs {error.name}: pip install "engram-replay[{extra}]".'
        raise ModuleNotFoundError(text, name=error.name) from error


class Later(NamedTuple):
    """A keyword of TorchRL's that is not supported yet."""

    #: What it will come with.
    carrier: str
    #: Its values, beside None and False, that ask for what is there already.
    same: tuple[object, ...] = ()
    #: Where no other value will ever come: what it is to be.
    expected: str = ""

    def accepts(self, value: object) -> bool:
        """Whether a value changes nothing here."""
        same = (None, False, *self.same)
        return any(value is one for one in same) or (isinstance(value, str) and value in same)


class TracingArguments(TypedDict, total=False):
    """Keywords of TorchRL's storages and writers that a buffer acts on."""

    compilable: Annotated[object, Later("", (True,), "True or False, on which no result depends")]


def carriers(arguments: type[object]) -> dict[str, Later]:
    """What each of the keywords of such a ``TypedDict`` is annotated with."""
    return {name: known.__metadata__[0] for name, known in get_type_hints(arguments, include_extras=True).items()}


NOT_TRACED = carriers(TracingArguments)


def reject_unsupported(
    call: str,
    arguments: Mapping[str, object],
    not_yet: Mapping[str, Later],
    taker: Callable[..., object] | Iterable[str] = (),
) -> None:
    """Raise ``TypeError`` for arguments that are left over.

    Args:
        call: what messages begin with.
        arguments: the arguments.
        not_yet: the known ones. Values of theirs that change nothing are accepted.
        taker: the class or function that was called, or the names of its arguments, among which a message looks for the one meant.
    """
    for name, value in arguments.items():
        if name not in not_yet:
            raise TypeError(f"{call}: unexpected argument {name!r}.{meant(name, taker)}")
        if not not_yet[name].accepts(value):
            carrier, _, expected = not_yet[name]
            if expected:
                raise TypeError(f"{call}: {name}: expected {expected}, got {value!r}.")
            raise TypeError(f"{call}: the argument {name!r} is not supported yet; it will come with {carrier}.")


def take_compilable(component: Declared, arguments: Mapping[str, object]) -> None:
    """Let the traits of a storage or writer say that it was made with ``compilable=True``."""
    if arguments.get("compilable"):
        component.traits = component.traits._replace(untraced=True)


def meant(name: str, taker: Callable[..., object] | Iterable[str]) -> str:
    """A question after the argument that a misspelt one may mean; empty if none is close.

    >>> from engram._support.unsupported import meant
    >>> meant("batchsize", ["size", "batch_size"])
    ' Did you mean batch_size?'
    """
    names = _arguments_of(taker)
    if name in ("capacity", "buffer_size", "max_size") and "storage" in names:
        return " Write storage=LazyTensorStorage(n), a storage of n rows."
    if name in ("alpha", "beta", "eps") and "sampler" in names:
        return " Use (TensorDict)PrioritizedReplayBuffer, or sampler=PrioritizedSampler(alpha=…, beta=…)."
    close = difflib.get_close_matches(name.lower(), names, n=1)
    return f" Did you mean {close[0]}?" if close else ""


def _arguments_of(taker: Callable[..., object] | Iterable[str]) -> list[str]:
    if not callable(taker):
        return list(taker)
    calls = (
        [vars(cls)["__init__"] for cls in taker.__mro__ if "__init__" in vars(cls)]
        if inspect.isclass(taker)
        else [taker]
    )
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    signatures = [inspect.signature(call).parameters.values() for call in calls if inspect.isroutine(call)]
    return [parameter.name for parameters in signatures for parameter in parameters if parameter.kind in named]


#: In place of rows by number.
BY_NUMBER = "Sample them, or use ReplayBuffer.open(directory) where the store is."


def refused(call: str, instead: str) -> RuntimeError:
    """The error of a call that needs rows here which are on a server."""
    return RuntimeError(f"{call}: the rows are on a server, and this needs them here. {instead}")


def refusing(call: str, instead: str) -> Callable[..., NoReturn]:
    """A method that raises :func:`refused`."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise refused(call, instead)

    return refuse
