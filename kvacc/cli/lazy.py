"""A click group that imports a command when it is used, and answers mistakes in one line."""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import click

from kvacc.errors import KvaccError, unknown

USAGE_ERROR = 2
INTERRUPTED = 130


class LazyGroup(click.Group):
    """Commands named by ``"module:attribute"``.

    Args:
        commands_table: command name -> (``"module:attribute"``, short help). The short
            help is here so that listing the commands imports none of them.
        resumable: commands that go on where they were interrupted.
    """

    def __init__(
        self,
        *args: Any,
        commands_table: Mapping[str, tuple[str, str]],
        resumable: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.commands_table = commands_table
        self.resumable = resumable

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands_table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands_table:
            return None
        module, attribute = self.commands_table[cmd_name][0].split(":")
        return getattr(importlib.import_module(module), attribute)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if not name.startswith("-") and name not in self.commands_table:
            raise unknown("command", name, self.commands_table)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_text) for name, (_, help_text) in self.commands_table.items()])

    def main(self, args: Sequence[str] | None = None, **options: Any) -> Any:
        """Run a command line. A mistake becomes ``error: ...`` and exit code 2; an
        exception that is not a mistake of the user keeps its traceback."""
        if not options.pop("standalone_mode", True):
            return super().main(args, standalone_mode=False, **options)
        arguments = list(sys.argv[1:] if args is None else args)
        try:
            # In this mode click returns the exit code of --help and ctx.exit().
            result = super().main(arguments, standalone_mode=False, **options)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except (KvaccError, click.ClickException) as error:
            if "--debug" in arguments[: _command_index(arguments)]:
                raise
            if isinstance(error, click.ClickException):
                _fail(error.format_message(), error.exit_code)
            _fail(str(error), USAGE_ERROR)
        except (KeyboardInterrupt, click.Abort):
            click.echo(f"interrupted{self._how_to_go_on(arguments)}", err=True)
            sys.exit(INTERRUPTED)
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
            # The reader of our output (head, less) has had enough; there is nobody to tell.
            sys.stdout = None  # type: ignore[assignment]
            sys.exit(1)
        sys.exit(result if isinstance(result, int) else 0)

    def _how_to_go_on(self, arguments: list[str]) -> str:
        command = arguments[_command_index(arguments) :][:1]
        return "; run the same command again to resume" if command and command[0] in self.resumable else ""


def _command_index(arguments: list[str]) -> int:
    """Place of the command's name: options after it are not the group's."""
    return next((i for i, word in enumerate(arguments) if not word.startswith("-")), len(arguments))


def _fail(message: str, code: int) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(code)
