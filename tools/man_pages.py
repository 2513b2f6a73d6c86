"""Writes the man pages, one for each command, from the command line's own parser: ``make docs``."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator
from pathlib import Path

from allreduced.cli.main import command_line

REPOSITORY = Path(__file__).parents[1]
PAGES = REPOSITORY / "docs" / "man"


def pages() -> dict[str, str]:
    """Return the pages by the names of their files."""
    parser = command_line()
    commands = dict(_commands(parser))
    made = {f"{parser.prog}.1": _page(parser, parser.prog, parser.description or "", tuple(commands))}
    for name, (command, about) in commands.items():
        made[f"{parser.prog}-{name}.1"] = _page(command, f"{parser.prog}-{name}", about, (), above=parser.prog)
    return made


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, tuple[argparse.ArgumentParser, str]]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            about = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, command in action.choices.items():
                yield name, (command, about[name])


def _page(parser: argparse.ArgumentParser, name: str, about: str, commands: tuple[str, ...], *, above: str = "") -> str:
    release = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    lines = [
        '.\\" Made by `make docs` from the parser of the command; changes belong there.',
        f'.TH "{name.upper()}" 1 "" "allreduced {release}" "User commands"',
        ".ad l",  # options are long words
        ".SH NAME",
        f"{_text(name)} \\- {_text(about.rstrip('.'))}",
        ".SH SYNOPSIS",
        _synopsis(parser, name, commands),
        ".SH DESCRIPTION",
        _text(parser.description or about),
    ]
    options = [action for action in parser._actions if not isinstance(action, argparse._SubParsersAction)]
    if commands:
        lines.append(".SH COMMANDS")
        for command, (_, said) in _commands(parser):
            lines += [
                ".TP",
                f"\\fB{_text(command)}\\fR",
                f"{_text(_sentence(said))} See \\fB{_text(name)}\\-{_text(command)}\\fR(1).",
            ]
    lines.append(".SH OPTIONS")
    for action in options:
        lines += [".TP", _heading(action), _text(_sentence(_help(parser, action)))]
    if parser.epilog:
        lines += [".SH NOTES", ".nf", *(_text(line) for line in parser.epilog.rstrip("\n").split("\n")), ".fi"]
    also = (
        [f"\\fB{_text(above)}\\fR(1)"]
        if above
        else [f"\\fB{_text(f'{name}-{command}')}\\fR(1)" for command in commands]
    )
    lines += [".SH SEE ALSO", ",\n".join(also)]
    return "\n".join(lines) + "\n"


def _synopsis(parser: argparse.ArgumentParser, name: str, commands: tuple[str, ...]) -> str:
    words = [f"\\fB{_text(name.replace('-', ' ', 1))}\\fR"]
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._VersionAction | argparse._SubParsersAction):
            continue
        word = _heading(action, short=True)
        words.append(word if action.required or not action.option_strings else f"[{word}]")
    if commands:
        words.append("\\fICOMMAND\\fR …")
    return " ".join(words)


def _heading(action: argparse.Action, *, short: bool = False) -> str:
    value = ""
    if action.nargs != 0:
        shown = action.metavar or (None if action.choices is None else "|".join(map(str, action.choices)))
        if isinstance(shown, tuple):
            shown = " ".join(shown)
        shown = shown or action.dest.upper()
        breakable = _text(shown).replace(",", ",\\:").replace("|", "|\\:")
        value = f"\\fI{breakable}\\fR" + (" …" if action.nargs in (argparse.REMAINDER, "*", "+") else "")
    if not action.option_strings:
        return value
    names = action.option_strings[-1:] if short else action.option_strings
    bold = ", ".join(f"\\fB{_text(name)}\\fR" for name in names)
    return f"{bold} {value}".rstrip()


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = action.help or ""
    return text % {**vars(action), "prog": parser.prog} if "%" in text else text


def _sentence(text: str) -> str:
    return text if not text or text.endswith(".") else f"{text}."


def _text(text: str) -> str:
    """Return text that troff sets as it is."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def main() -> None:
    """Write the pages, and remove those of commands that are no more."""
    made = pages()
    PAGES.mkdir(exist_ok=True)
    for old in PAGES.glob("*.1"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        (PAGES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
