"""The command ``topoproxy``: finds the subcommand, and turns errors into messages and exit codes.

A subcommand is a module of this package that contains a click command of the same name. It is imported when
it is called, so that ``version`` does not load the daemon, and an error in one module does not break the
others.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import click

from proxy import __version__
from proxy.cli.exit_codes import EPILOG, epilog
from proxy.model.errnos import UNWRITABLE_OUTPUT
from proxy.model.errors import TopoproxyError
from proxy.standard_streams import flush_or_discard, prepare, report, write_errors

if TYPE_CHECKING:
    from proxy.config.schema import Config

COMMANDS = {
    "serve": "Run the proxy between kubelet and the container runtime.",
    "status": "Show what the running proxy does: pools, owners, containers, problems.",
    "reload": "Make the running daemon reread its configuration.",
    "report": "Print the description of the node for schedulers.",
    "agent": "Publish the node in the cluster (container image): objects, Events; end rejected pods.",
    "scheduler-extender": "Report to kube-scheduler which nodes would admit a pod, and bind the pod.",
    "observe": "Show what enforcing would change, against the cpusets that the kernel has.",
    "explain": "Show why a container is on its CPUs, or why it was rejected.",
    "hooks": "List, write, test, enable and disable hooks.",
    "enforce": "Show and pause how the plan is applied to running pods.",
    "attach": "Point kubelet at topoproxy; undone if its calls do not arrive.",
    "detach": "Point kubelet back at the runtime, and restore every file.",
    "takeover": "Take a node over from kubelet's static CPU manager, without a drain.",
    "release": "Give every container back what it would have had without topoproxy.",
    "topology": "Show the machine as a picture, or as JSON.",
    "devices": "Show the devices of the machine: where they are, and which container has them.",
    "simulate": "Simulate pods on machines, without a node: what is placed where, what is rejected.",
    "check-config": "Check a configuration and print what is in effect.",
    "doctor": "Check this node: what keeps topoproxy from working, and how to repair it.",
    "upgrade": "Show what another version would change, or replace the running daemon by it.",
    "bundle": "Collect what a bug report needs: one file, without secrets.",
    "demo": "Demonstrate topoproxy, without root and without a runtime.",
    "version": "Print the version.",
}

EX_IOERR = 74
"""sysexits: an error while writing."""
READER_GONE = 141
"""128 and SIGPIPE: the process that read the output has ended."""


class _ReaderGoneError(Exception):
    """The process that read the output has ended. click would end with 1 for the OSError itself."""


@contextlib.contextmanager
def _output() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise _ReaderGoneError from error


class Commands(click.Group):
    """A group that imports a subcommand when it is called."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the command line, which may print a help text."""
        with _output():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> object:
        """Run the subcommand."""
        with _output():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order in which a new user needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a subcommand; None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        try:
            module = importlib.import_module(f"proxy.cli.{name}")
        except ImportError as error:
            raise TopoproxyError(f"cannot run {cmd_name}: {error.name or error} is not installed") from error
        command = getattr(module, name)
        assert isinstance(command, click.Command)
        _add_exit_codes(command, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand, or suggest the one that was probably intended."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            ctx.fail(f"There is no command {args[0]!r}.{f' Did you mean {close[0]}?' if close else ''}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _add_exit_codes(command: click.Command, name: str) -> None:
    """End the help of a command, or of each command of a group, with its exit codes."""
    command.epilog = epilog(name)
    if isinstance(command, click.Group):
        command.epilog = EPILOG
        for part, each in command.commands.items():
            _add_exit_codes(each, f"{name} {part}")


@click.command(
    cls=Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=f"Each command explains itself: topoproxy COMMAND --help. {EPILOG}",
)
@click.version_option(__version__, prog_name="topoproxy", message="%(prog)s %(version)s")
def cli() -> None:
    """A transparent CRI proxy that places containers on CPUs and memory nodes.

    topoproxy sits between kubelet and the container runtime on the CRI (Container Runtime Interface) socket.
    Calls pass unchanged, except a few that create or update pods and containers: for those it chooses CPUs
    and memory nodes, and first moves the containers that share CPUs out of the way.

    \b
    First steps
      topoproxy demo                        see it at work on an imitated node
      topoproxy topology                    see this machine as topoproxy reads it
      topoproxy simulate PODS               see where pods would be placed, without a node
      topoproxy check-config --defaults     see all settings, with explanations
      topoproxy serve --mode observe        decide and log, change nothing

    \b
    On a node
      /etc/topoproxy/config.yaml            the configuration, if the defaults do not fit
      topoproxy attach                      start topoproxy and set kubelet's containerRuntimeEndpoint
      topoproxy detach                      undo that
      topoproxy status                      is it ready, and what does it do?
      topoproxy doctor                      what keeps this node from working?
      topoproxy explain POD                 why these CPUs?
      topoproxy hooks --help                plugins of your own
      topoproxy agent                       publish the node in the cluster (container image)
      crictl -r unix:///run/topoproxy/cri.sock ps
    """  # noqa: D301 - click wants the real backspace


def run_command_line(args: Sequence[str] | None = None) -> int | Config:
    """Run a command.

    Args:
        args: The words after the program's name; those of the process if None.

    Returns:
        The exit code; for ``serve``, the configuration of the daemon to run.
    """
    code: int | Config | None
    prepare()
    if sys.stdout is None and not _is_service(sys.argv[1:] if args is None else args):
        report("topoproxy: cannot write the output: standard output is closed")
        return EX_IOERR
    try:
        code = cli.main(args, "topoproxy", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.ClickException as error:
        write_errors(error.show)
        code = error.exit_code
    except TopoproxyError as error:
        report(f"topoproxy: {error}")
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        code = 130
    except (_ReaderGoneError, BrokenPipeError):
        code = READER_GONE
    except Exception as error:
        if _is_unwritable(error):
            report(f"topoproxy: cannot write the output: {error.strerror}")
            code = EX_IOERR
        else:
            if os.environ.get("TOPOPROXY_DEBUG"):
                raise
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            report(f"topoproxy: internal error: {what} (TOPOPROXY_DEBUG=1 shows where)")
            code = 1
    flush_or_discard()
    return code or 0


def _is_service(args: Sequence[str]) -> bool:
    """Return whether a command is a service: it writes no output, and may be started with it closed."""
    return bool({"serve", "agent", "scheduler-extender"} & set(args[:1]))


def _is_unwritable(error: Exception) -> TypeGuard[OSError]:
    """Return whether our own output cannot be written; an error that names a file is about that file."""
    return isinstance(error, OSError) and error.filename is None and error.errno in UNWRITABLE_OUTPUT


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run a command, including the daemon, in this process, and end the process."""
    end = run_command_line(args)
    if not isinstance(end, int):
        from proxy.process import run_and_report

        end = run_and_report(end)
    sys.exit(end)
