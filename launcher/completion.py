"""`vlm-relay completion`: a script that completes the command's words in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import shtab

_FOLDERS = ("checkpoint", "out")
_FILES = ("images",)


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for a shell that shtab knows; arguments that are files are completed as such."""
    for action in _actions(parser):
        if action.dest in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.type is Path or action.dest in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument, of the subcommands too."""
    for action in parser._actions:  # argparse has no public name for them
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)
        else:
            yield action
