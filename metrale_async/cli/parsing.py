"""From a command line to configuration objects, with every violation found in one pass.

argparse splits the words and prints the help; it stops at the first wrong value, so values reach it as plain text and
are converted and checked here. A flag exists because a configuration dataclass declares it
(:mod:`metrale_async.arguments`).
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar

from metrale_async.arguments import ArgumentInfo, allowed_range, argument_info, flag_name
from metrale_async.cli.environment import environment_violations
from metrale_async.errors import ConfigurationError

PROGRAM: Final = "python -m metrale_async"
_SHOWN_VALUE_CHARS: Final = 80


@dataclass(frozen=True, slots=True)
class Positional:
    """A word that needs no flag, and may be left out."""

    name: str
    help: str
    default: str | None = None


@dataclass(frozen=True, slots=True)
class Flag:
    """One declared flag, with its type read from the dataclass annotation."""

    field_name: str
    info: ArgumentInfo
    kind: type
    """str, int, float or bool; of one item where ``repeated``."""
    repeated: bool
    default: Any

    @property
    def name(self) -> str:
        return flag_name(self.field_name)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, "--no-" + self.name[2:]) if self.kind is bool else (self.name,)

    @property
    def metavar(self) -> str:
        if self.info.metavar:
            return self.info.metavar
        if self.info.choices:
            return "{" + ",".join(self.info.choices) + "}"
        return {int: "N", float: "X"}.get(self.kind, "TEXT")

    @property
    def allowed(self) -> str:
        """The values that are accepted, in words."""
        if self.info.choices or self.info.minimum is not None or self.info.maximum is not None:
            return allowed_range(self.info)
        words = {int: "an integer", float: "a number", bool: "given or not"}.get(self.kind, "any text")
        return f"{words}, or auto" if self.info.auto else words

    @property
    def default_text(self) -> str:
        if self.default is None:
            return "auto" if self.info.auto else "not set"
        if self.kind is bool:
            return "on" if self.default else "off"
        if self.repeated:
            return ", ".join(self.default) or "none"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def convert(self, text: str) -> Any:
        """The value that ``text`` stands for; raises ValueError."""
        if self.info.auto and text == "auto":
            return None
        return self.kind(text)


def flags_of(configuration: type) -> list[Flag]:
    """The flags that a configuration dataclass declares, in its order."""
    hints = typing.get_type_hints(configuration)
    flags = []
    for field in dataclasses.fields(configuration):
        info = argument_info(field)
        if info is None:
            continue
        kind, repeated = _kind(hints[field.name])
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        flags.append(Flag(field.name, info, kind, repeated, default))
    return flags


def _kind(hint: Any) -> tuple[type, bool]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (member for member in typing.get_args(hint) if member is not types.NoneType)
    repeated = typing.get_origin(hint) is tuple
    if repeated:
        hint = typing.get_args(hint)[0]
    if hint not in (str, int, float, bool):
        raise TypeError(f"a flag cannot have the type {hint!r}")
    return hint, repeated


Configuration = TypeVar("Configuration")


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """What a command line says: its words by name, and one checked object of every configuration class."""

    words: Mapping[str, str | None]
    configurations: Mapping[type, Any]

    def of(self, configuration: type[Configuration]) -> Configuration:
        return typing.cast("Configuration", self.configurations[configuration])


class CommandLine:
    """The words and flags of one command.

    A positional that has the name of a configuration's field is given to that configuration.
    """

    def __init__(
        self,
        command: str,
        description: str,
        *,
        positionals: Sequence[Positional] = (),
        configurations: Sequence[type] = (),
        epilog: str | None = None,
    ) -> None:
        self.command = command
        self.positionals = tuple(positionals)
        self.flags = {configuration: flags_of(configuration) for configuration in configurations}
        self._parser = _Parser(
            prog=f"{PROGRAM} {command}",
            usage=self._usage(),
            description=description,
            epilog=epilog,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        self._by_name: dict[str, Flag] = {}
        self._fill_parser()

    def parse(self, line: Sequence[str], environment: Mapping[str, str] | None = None) -> ParsedLine:
        """Read a command line; raises ConfigurationError with every violation at once, SystemExit(0) after --help.

        ``environment`` (default: this process's) is held against the declared variables in the same pass.
        """
        found = environment_violations(os.environ if environment is None else environment)
        known = self._drop_unknown_flags(line, found)
        space, extra = self._parser.parse_known_args(known)
        found += [f"{_shorten(word)} is one word too many" for word in extra if word != "--"]
        given = {word: getattr(space, word.name) for word in self.positionals}
        words = {word.name: word.default if value is None else value for word, value in given.items()}
        configurations = {
            configuration: self._configuration(configuration, space, words, found) for configuration in self.flags
        }
        if found:
            raise ConfigurationError(found)
        return ParsedLine(words, configurations)

    def format_help(self) -> str:
        return self._parser.format_help()

    def _usage(self) -> str:
        words = [f"[{word.name.upper()}]" for word in self.positionals]
        return " ".join([PROGRAM, self.command, *words, "[flags]"])

    def _fill_parser(self) -> None:
        arguments = self._parser.add_argument_group("Arguments") if self.positionals else self._parser
        for word in self.positionals:
            help = word.help
            if word.default:
                help += f" (default: {word.default})"
            arguments.add_argument(word.name, nargs="?", default=None, help=help, metavar=word.name.upper())
        groups: dict[str, argparse._ArgumentGroup] = {}
        for flag in (flag for flags in self.flags.values() for flag in flags):
            group = groups.get(flag.info.group) or self._parser.add_argument_group(flag.info.group)
            groups[flag.info.group] = group
            self._by_name.update(dict.fromkeys(flag.names, flag))
            help = _escape(f"{flag.info.help} ({_allowed_and_default(flag)})")
            if flag.kind is bool:
                group.add_argument(
                    flag.name, dest=flag.field_name, action=argparse.BooleanOptionalAction, default=_ABSENT, help=help
                )
            else:
                # A flag without its value must not stop the reading, so the value is optional here and missed later.
                group.add_argument(
                    flag.name,
                    dest=flag.field_name,
                    nargs="?",
                    const=_VALUE_MISSING,
                    default=[] if flag.repeated else _ABSENT,
                    action="append" if flag.repeated else "store",
                    metavar=flag.metavar,
                    help=help,
                )
        self._parser.add_argument(_PLACEHOLDER, action="store_true", help=argparse.SUPPRESS)
        group = self._parser.add_argument_group("Help")
        group.add_argument("-h", "--help", action="help", help="show this page")

    def _drop_unknown_flags(self, line: Sequence[str], found: list[str]) -> list[str]:
        """``line`` with a placeholder for each flag nobody declared and the value that seems to belong to it."""
        kept: list[str] = []
        words = iter(range(len(line)))
        for index in words:
            word = line[index]
            if word == "--":
                return [*kept, *line[index:]]
            name, has_value = word.partition("=")[::2]
            if not word.startswith("-") or word == "-" or _is_number(word) or name in ("-h", "--help"):
                kept.append(word)
                continue
            flag = self._by_name.get(name)
            if flag is not None and not (flag.kind is bool and "=" in word):
                kept.append(word)
                continue
            kept.append(_PLACEHOLDER)
            if flag is not None:
                found.append(f"{name} takes no value; use {flag.names[0]} or {flag.names[1]}")
                continue
            close = difflib.get_close_matches(name, self._by_name, n=1, cutoff=0.6)
            hint = f"; did you mean {close[0]}?" if close else ""
            found.append(f"{_shorten(name)} is not a flag of {self.command}{hint}")
            follower = line[index + 1] if index + 1 < len(line) else "-"
            if not has_value and not (follower.startswith("-") and not _is_number(follower)):
                next(words)
        return kept

    def _configuration(
        self, configuration: type, space: argparse.Namespace, words: Mapping[str, str | None], found: list[str]
    ) -> Any:
        values: dict[str, Any] = {}
        for flag in self.flags[configuration]:
            given = getattr(space, flag.field_name)
            if given is _ABSENT or given == []:
                continue
            if flag.kind is bool:
                values[flag.field_name] = given
                continue
            converted = [self._converted(flag, text, found) for text in (given if flag.repeated else [given])]
            if _VALUE_MISSING not in converted:
                values[flag.field_name] = tuple(converted) if flag.repeated else converted[0]
        for field in dataclasses.fields(configuration):
            if words.get(field.name) is not None:
                values[field.name] = words[field.name]
        try:
            return configuration(**values)
        except ConfigurationError as error:
            found.extend(error.violations)
            return None

    def _converted(self, flag: Flag, text: str, found: list[str]) -> Any:
        """The value of one occurrence of a flag; ``_VALUE_MISSING`` if there is none that makes sense."""
        if text == _VALUE_MISSING:
            found.append(f"{flag.name} needs a value: {flag.allowed}")
            return _VALUE_MISSING
        try:
            return flag.convert(text)
        except ValueError:
            words = {int: "an integer", float: "a number"}[flag.kind]
            found.append(f"{flag.name} is {_shorten(text)!r}, not {words}; allowed: {flag.allowed}")
            return _VALUE_MISSING


_ABSENT: Final = object()
_VALUE_MISSING: Final = "\0no value"
"""No word of a command line can hold a null character."""
_PLACEHOLDER: Final = "--\0refused"
"""Stands where a refused flag stood, so that the flag before it does not take the word after it."""


def _allowed_and_default(flag: Flag) -> str:
    limited = flag.info.choices is None and (flag.info.minimum is not None or flag.info.maximum is not None)
    parts = [flag.allowed] if limited else []
    parts.append("may be repeated" if flag.repeated else f"default: {flag.default_text}")
    return "; ".join(parts)


def _escape(help: str) -> str:
    return help.replace("%", "%%")


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN_VALUE_CHARS else text[:_SHOWN_VALUE_CHARS] + "..."


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


class _Parser(argparse.ArgumentParser):
    """argparse without its habit of ending the process at the first error."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message)


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        # Values are optional to argparse only; see _fill_parser.
        return action.metavar if isinstance(action.metavar, str) else super()._format_args(action, default_metavar)
