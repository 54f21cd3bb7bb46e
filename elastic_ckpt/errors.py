"""The errors that a user of elastic_ckpt meets.

Every error names what is known of: parameter, file, expected, found, remedy. All are picklable, since the same error is
raised on every rank of the job (see :mod:`elastic_ckpt.distributed`). Attributes have a checkpoint's text as it is; in
what is printed of an error, its control characters are escaped.

A remedy is data wherever following it takes no person: config entries, arguments of ``load_checkpoint``, a command. Its
text is made of that data, so that what is printed is what can be followed.
"""

from __future__ import annotations

import errno
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic_ckpt.core.text import NamesText, printable, printable_lines, whole_text

#: Of a process or machine that has used up its descriptors or its memory.
_USED_UP = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
#: Opens the page that has a section for each class.
_HELP = "elastic-ckpt docs troubleshooting"
_DETAILS = ("parameter", "file", "expected", "found", "remedy", "rank")


@dataclass(frozen=True)
class Remedy:
    """One way out of an error, which suffices by itself.

    Beside its data, ``text`` says what following it does; without any, what a person has to do.
    """

    text: str = ""
    #: Entries to merge into ``"elastic_checkpoint"`` of the DeepSpeed config.
    config: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of ``function``, beside those of the call
    function: str = "load_checkpoint"  # that was called
    code: str = ""  # a statement for the script, before the load
    command: Sequence[str] = ()  # a command line, in words
    when: str = ""  # what must be true, which only a person can know
    at_saved_topology: bool = False  # the same load at the saved degrees and ZeRO stage: none for a load there
    by_own_loader: bool = False  # and plain DeepSpeed was seen to load such a checkpoint there

    def __str__(self) -> str:
        steps = [shlex.join(self.command)] if self.command else []
        if self.config:
            steps.append(f'"elastic_checkpoint": {json.dumps(self.config, ensure_ascii=False)}')
        if self.arguments:
            given = {key: repr(value) for key, value in self.arguments.items()}
            others = [f"{key}={value}" for key, value in given.items() if key != "load_dir"]
            steps.append(f"{self.function}({', '.join([given.get('load_dir', '...'), *others])})")
        if self.code:
            steps.append(f"{self.code} before the load")
        done = " ".join(filter(None, [" and ".join(steps), self.text]))
        return f"{self.when}: {done}" if self.when else done

    @property
    def is_data(self) -> bool:
        """Whether a program can follow it."""
        return bool(self.config or self.arguments or self.command)


#: What ``remedy`` of an error may be: a sentence for a person, one way out, or several.
Remedies = str | Remedy | Sequence[Remedy] | None

#: When a state can be left out: an optimizer that looks for it in a step would raise.
MADE_ANEW = "if the optimizer's next step computes it again"
#: For a save that is damaged or does not fit.
ANOTHER_TAG = Remedy("use another tag")
#: For what cannot be loaded elsewhere.
AT_ITS_TOPOLOGY = Remedy("load at the topology it was saved with", at_saved_topology=True)
AT_ITS_DTYPE = Remedy("resume with the dtype of master weights and states that the checkpoint was saved with")
#: For optimizers of which DeepSpeed's own loader restores what this package cannot, and nothing in the files proves it.
BY_DEEPSPEED = Remedy(AT_ITS_TOPOLOGY.text, at_saved_topology=True, by_own_loader=True)
WITHOUT_STATES = Remedy("leaves all optimizer states out", arguments={"load_optimizer_states": False})
WEIGHTS_ALONE = Remedy("loads only the weights", arguments={"load_module_only": True})
NOT_STRICT = Remedy("restores what matches and reports the rest", arguments={"load_module_strict": False})
#: For states of another optimizer.
ITS_OPTIMIZER = (Remedy("resume with the optimizer that saved it"), WITHOUT_STATES)


#: Where names that were parameters of their own are one in the live model.
UNTIE = Remedy("build the model as it was saved, without this tie")


def remedy_text(remedies: Iterable[Remedy], remarks: Iterable[str] = ()) -> str | None:
    """Ways out, and remarks, as they are printed; ``None``: nothing is known."""
    ways = "; or ".join(map(str, remedies))
    return "; ".join(filter(None, [ways, *remarks])) or None


def shortened(names: Iterable[str], most: int = 8) -> NamesText:
    """The first few names, and the number of others; with ``+``, sentences keep all of them for a file."""
    every = list(names)
    shown = ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")
    return NamesText(shown, ", ".join(every))


def listed(names: Iterable[str]) -> NamesText:
    """Names for an error message: sorted, the first few, and the number of others."""
    return shortened(sorted(names)) or NamesText("none", "none")


def keeps_first(names: Iterable[str]) -> Remedy:
    """The way to keep what was saved under one name of each tied parameter, states included."""
    return Remedy(f"keeps the values under {listed(names)}", config={"replicated_params": "first"})


class ElasticCkptError(Exception):
    """A load was refused or failed."""

    default_remedy: Remedies = None
    remedies: tuple[Remedy, ...]  #: each suffices
    remarks: tuple[str, ...]  #: what else is to know of them
    #: Whether the checkpoint is known to be damaged: then, and only then, ``"on_damage"`` takes an older one.
    proves_damage = False

    def __init__(
        self,
        problem: str,  # one sentence that states what is wrong
        file: str | None = None,  # path of the file concerned
        expected: Any = None,  # what a correct checkpoint or engine would have
        found: Any = None,  # what is there instead
        *,
        parameter: str | Iterable[str] | None = None,  # the model parameters, buffers or states concerned
        remedy: Remedies = None,  # what the user can do, as data where it can be; of the class if not given
        rank: int | None = None,  # global rank that met the problem first
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.file = file
        self.rank = rank
        self.parameter = parameter if parameter is None or isinstance(parameter, str) else listed(parameter)
        #: All of them, where ``parameter`` names the first few.
        self.parameters = () if parameter is None or isinstance(parameter, str) else tuple(sorted(parameter))
        texts = (each if each is None or isinstance(each, str) else str(each) for each in (expected, found))
        self.expected, self.found = texts  # maybe with lists of which the first few names are printed
        self.remarks = ()
        self.remedy = remedy or self.default_remedy

    def __str__(self) -> str:
        known = {name: value for name, value in self.texts.items() if value is not None}
        details = (f"\n  {name + ':':<11}{printable(str(value))}" for name, value in known.items())
        return f"{printable(self.problem)}{''.join(details)}\n  {'see:':<11}{_HELP}#{type(self).__name__.lower()}"

    @property
    def remedy(self) -> str | None:
        """The ways out, and remarks, as they are printed; ``None``: nothing is known."""
        return remedy_text(self.remedies, self.remarks)

    @remedy.setter
    def remedy(self, remedy: Remedies) -> None:
        if remedy is None or isinstance(remedy, (str, Remedy)):
            remedy = [remedy if isinstance(remedy, Remedy) else Remedy(remedy)] if remedy else []
        self.remedies = tuple(remedy)

    def refuse_its_topology(self) -> None:
        """Replace ways that are a load at the topology of the save: this was one."""
        ways = [each for each in self.remedies if not each.at_saved_topology]
        if any(each.by_own_loader for each in self.remedies):
            ways.append(Remedy("gives DeepSpeed's own loader, which restores such states", config={"mode": "off"}))
        none = Remedy("there is no known remedy: please report it, with the output of elastic-ckpt inspect")
        self.remedies = tuple(ways) or (none,)

    @property
    def texts(self) -> dict[str, Any]:
        """Everything but the problem, as it is printed: of many names, the first few."""
        return {name: getattr(self, name) for name in _DETAILS}

    @property
    def document(self) -> dict[str, Any]:
        """Everything for a file, as JSON has it: lists of names are whole, and remedies are data."""
        known: dict[str, Any] = {
            name: whole_text(value) for name, value in self.texts.items() if isinstance(value, str)
        }
        known |= {"parameters": self.parameters} if self.parameters else {}
        remedies = [{key: value for key, value in asdict(each).items() if value} for each in self.remedies]
        return {"error": type(self).__name__, "problem": self.problem, **known, "remedies": remedies}

    @property
    def details(self) -> dict[str, Any]:
        """Everything but the problem, as arguments of another error."""
        remedies = (*self.remedies, *map(Remedy, self.remarks))
        return self.texts | {"parameter": self.parameters or self.parameter, "remedy": remedies}


class ConfigError(ElasticCkptError):
    """A key or value under ``"elastic_checkpoint"`` is invalid."""


class NotFoundError(ElasticCkptError):
    """The folder, the tag or the ``latest`` file does not exist."""


class DamagedError(ElasticCkptError):
    """A file is missing, truncated, unreadable, or belongs to another save."""

    default_remedy = Remedy("restore the folder from its original"), ANOTHER_TAG
    proves_damage = True


class SavedOverError(DamagedError):
    """A file was replaced or rewritten while it was being loaded: the folder may be whole in a moment."""


class MixedSavesError(DamagedError):
    """Files may be of two saves: what they count or hold does not fit together, which a change of the run explains too.

    Damage is not proven, so that ``"on_damage"`` never goes back for it.
    """

    proves_damage = False


class ConflictingCopiesError(DamagedError):
    """Nodes or folders have different files under one name: which belongs to the save is not known."""


class LayoutError(DamagedError):
    """Files contradict the layout that they state: one is damaged, or of another save, or the layout is unknown.

    Damage is not proven, so that ``"on_damage"`` never goes back for it.
    """

    proves_damage = False


class UnknownLayoutError(LayoutError):
    """A file lacks an entry that every known DeepSpeed writes, or has another kind of it.

    It is damaged, or of a release that is not known. Alone of the errors about damage, it leaves a load to DeepSpeed's
    own loader, if that was found to fit.
    """


class MissingFilesError(LayoutError):
    """Files that the save has written, by what the others state, are not there."""

    proves_damage = True


class UnsafePickleError(ElasticCkptError):
    """A file would run code that is not on the list of safe globals."""


class MismatchError(ElasticCkptError):
    """Checkpoint and live engine disagree: names, shapes, dtypes, groups, states."""


class UnsupportedError(ElasticCkptError):
    """This version cannot restore something exactly, and refuses it by name."""

    default_remedy = AT_ITS_TOPOLOGY


class UnforeseenError(ElasticCkptError):
    """An unexpected exception, on one rank or on all."""


class CommunicationError(ElasticCkptError):
    """A rank died, hangs, or failed while the others waited for it: the job's process group is of no more use."""


class PartialLoadError(ElasticCkptError):
    """Reading failed after every rank had agreed to load: the engine is partly overwritten."""

    #: A remark beside the ways out of the cause.
    LOAD_AGAIN = "once the cause is gone, load again into this engine or a new one"


def refuse_used_up(error: Exception, path: str) -> None:
    """Raise :class:`UnforeseenError` if a file could not be read for want of descriptors or memory."""
    if isinstance(error, OSError) and error.errno in _USED_UP:
        problem = "this process has used up its file descriptors or its memory"
        expected = "a file that can be read"
        remedy = "raise the limit (ulimit -n) or free memory, and load again: the checkpoint is not damaged"
        found = f"{type(error).__name__}: {error.strerror}"
        raise UnforeseenError(problem, path, expected, found, remedy=remedy) from error


def without_frames(error: ElasticCkptError) -> ElasticCkptError:
    """An error that is kept, without the frames of its traceback: these hold whatever was made before it."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error


@contextmanager
def errors_of_file(path: str | None) -> Iterator[None]:
    """Lets an error of the body that names no file name this one, from which the values are that it is about."""
    try:
        yield
    except ElasticCkptError as error:
        if error.file is None:
            error.file = path
        raise


@contextmanager
def printable_errors() -> Iterator[None]:
    """Run a body, of whose exceptions a traceback prints no control characters. Local."""
    try:
        yield
    except Exception as error:
        with_printable_causes(error)
        raise


def with_printable_causes(error: BaseException) -> BaseException:
    """An error of any class whose traceback, down to its first cause, has no control characters but newlines.

    It is the error itself, unless its class makes its text in a way of its own.
    """
    shown: dict[int, BaseException] = {}
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if id(each) not in shown:
            shown[id(each)] = _with_printable_text(each)
            waiting += filter(None, (each.__cause__, each.__context__))
    for each in list(shown.values()):
        cause = each.__cause__
        context = each.__context__
        is_suppressed = each.__suppress_context__
        each.__cause__ = cause and shown.get(id(cause), cause)
        each.__context__ = context and shown.get(id(context), context)
        each.__suppress_context__ = is_suppressed  # which setting a cause sets
    return shown[id(error)]


def _with_printable_text(error: BaseException) -> BaseException:
    """An error with other text, or a :class:`RuntimeError` in its place."""
    if notes := getattr(error, "__notes__", None):
        error.__notes__ = [_printable_text(str(note)) for note in notes]  # type: ignore[attr-defined]
    if _is_printable(error):
        return error
    if isinstance(error, OSError) and error.strerror:  # which prints paths as Python's code has them
        error.strerror = _printable_text(error.strerror)
    elif type(error).__str__ is BaseException.__str__ and len(error.args) == 1:
        error.args = (_printable_text(str(error)),)
    if _is_printable(error):
        return error
    instead = RuntimeError(f"{type(error).__name__}: {_printable_text(str(error))}").with_traceback(error.__traceback__)
    instead.__cause__ = error.__cause__
    instead.__context__ = error.__context__
    instead.__suppress_context__ = error.__suppress_context__
    return instead


def _is_printable(error: BaseException) -> bool:
    try:
        return str(error) == printable_lines(str(error))
    except Exception:  # of a class whose text cannot be made: a traceback says so in its place
        return True


def _printable_text(text: str) -> str:
    """Text of others, which may have lines and be indented."""
    return printable_lines(text.expandtabs(4))
